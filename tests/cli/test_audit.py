"""``dphero audit`` for people."""

from types import SimpleNamespace

from dphero.cli.privacy import audit


def test_a_path_that_looks_like_markup_is_shown_as_it_is(capsys):
    claim = SimpleNamespace(epsilon=3.0, delta=1e-5)
    figures = {"true_epsilon": None, "epsilon_any": 1.0, "epsilon_fitted": None, "confidence": 0.95, "uncharged": 3,
               "noise_multiplier": 1.0}  # fmt: skip
    found = SimpleNamespace(name="one step", claim=claim, refuted=True, **figures)
    report = SimpleNamespace(
        title="run [old] [/b]",
        conclusion="REFUTED by 1 of 2 tests: one step",
        refuted=True,
        audits=[found],
        one_runs=[],
        checks=[],
        attacks=[],
        notes=["see [a] :dog:"],
        confidence=None,
        ledger=SimpleNamespace(printed_epsilon=3.0, refuted=False),
    )
    audit._show(report)
    shown = capsys.readouterr().out
    assert "Audit of run [old] [/b]" in shown and "Note: see [a] :dog:." in shown
    assert shown.startswith("REFUTED by 1 of 2 tests: one step.\n")
    assert "REFUTED" in shown and "[bold" not in shown
    assert "its own ledger" in shown and "one step: 3 releases are not on the ledger" in shown
