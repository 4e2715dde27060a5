"""``dphero audit``: for people, for machines, for run directories; errors that help."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dphero._files import seal_json
from dphero.audit.mechanism import audit_mechanism
from dphero.audit.report import Report, plot_roc, save
from dphero.audit.run_ledger import check_ledger
from dphero.audit.trainings.membership import Roc
from dphero.cli import app
from dphero.experiments import RunDirectory
from tests.audit.faults import FAULTS

pytest.importorskip("sklearn")


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few seconds."""
    pytest.importorskip("safetensors")
    path = tmp_path_factory.mktemp("runs") / "digits"
    made = run("train", "--data", "digits", "--method", "dp-sgd", "--noise-multiplier", 1.5, "--epochs", 6,
               "--seed", 1, "--out", path, "--json")  # fmt: skip
    assert made.exit_code == 0, made.stderr
    return path


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer releases and trainings than an audit needs to see anything, for tests of what is done with the findings.

    ``test_a_run_is_audited_in_its_directory`` runs all of it.
    """

    def short(*arguments: Any, releases: int, **settings: Any) -> Any:
        return audit_mechanism(*arguments, releases=20, **settings)

    monkeypatch.setattr("dphero.audit.runs.audit_mechanism", short)
    monkeypatch.setattr("dphero.audit.runs._LARGE", 0)  # the mechanism is audited on a small network
    monkeypatch.setattr("dphero.audit.mechanism._FEWEST", 40)
    monkeypatch.setattr("dphero.audit.laws.white_box._PLAIN", 16)
    monkeypatch.setattr("dphero.audit.runs._FEWEST_TRAININGS", 20)
    monkeypatch.setattr("dphero.audit.runs._SHADOWS", 4)
    monkeypatch.setattr("dphero.audit.runs._QUICK_STEPS", 18)  # all of the finished run


def test_published_prints_one_object_for_each_mechanism(tmp_path: Path) -> None:
    result = run("audit", "published", "--json", "--releases", 40, "--out", tmp_path / "trial")
    assert result.exit_code == 0, result.stderr
    published, ellipsoid = (json.loads(line) for line in result.stdout.splitlines())
    for record in (published, ellipsoid):
        assert {
            "mechanism",
            "claimed_epsilon",
            "true_epsilon",
            "audited_epsilon",
            "confidence",
            "delta",
        } <= record.keys()
        assert record["confidence"] == 0.95 and record["delta"] == 1e-5
    assert published["mechanism"] == "published recipe" and ellipsoid["mechanism"] == "ellipsoid"
    assert published["claimed_epsilon"] < published["audited_epsilon"] < published["true_epsilon"]
    assert ellipsoid["audited_epsilon"] <= ellipsoid["claimed_epsilon"] == ellipsoid["true_epsilon"]
    assert {path.name for path in (tmp_path / "trial").iterdir()} == {
        "audit.json", "epsilons.png", "epsilons.svg", "trade-off.png", "trade-off.svg",
    }  # fmt: skip


def test_a_run_is_audited_in_its_directory(finished: Path) -> None:
    before = {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    result = run("audit", finished, "--quick", "--releases", 40)
    assert result.exit_code == 0, result.stderr
    shown = " ".join(result.stdout.split())
    assert shown.startswith("Not refuted: 6 attacks, 22 checks found nothing against ε = "), shown
    for words in ("trade-off curve), assuming that", "normal scores), assuming", "is about two lots, at the σ beside",
                  "release", "sampling", "release, biases", "its own ledger", "small trainings", "gradient canaries",
                  "about the 500 coins were right", "not refuted", "the run's own claim: ε =",
                  "Membership inference, loss threshold: AUC", "hold together with confidence 0.95",
                  "audited at noise multiplier 1, the recipe's is 1.5"):  # fmt: skip
        assert words in shown
    assert all((finished / name).read_bytes() == content for name, content in before.items())
    record = json.loads((finished / "audit" / "audit.json").read_text())
    assert record["refuted"] is False and record["membership"][0]["members"] == 1437
    (one_run,) = record["one_run"]
    assert record["ledger"]["refuted"] is False and record["ledger"]["releases"] == record["ledger"]["steps"] == 18
    assert all(each["true_epsilon"] is None for each in record["audits"])  # nobody knows it
    assert one_run["canaries"] == 500 and one_run["confidence"] == pytest.approx(1 - 0.05 / 3)
    assert 0.4 < one_run["audited_epsilon"] < one_run["claimed_epsilon"]  # six other seeds: 0.7 to 1.0
    assert (finished / "audit" / "roc.svg").read_text().startswith("<?xml")


def test_without_quick_the_training_is_audited_too(few: None) -> None:
    from dphero.audit import audit_recipe
    from dphero.experiments import resolve

    told: list[str] = []
    recipe = resolve({"data": "digits", "method": "sgd", "epochs": 2.0})
    report = audit_recipe(recipe, quick=False, releases=40, tell=lambda what, done, total: told.append(what))
    (one_run,), (attack,) = report.one_runs, report.attacks
    assert one_run.canaries == 143 and one_run.confidence == 0.975 and report.confidence == 0.95
    assert attack.name == "LiRA" and attack.members == attack.others
    assert "neither by single releases nor by gradient canaries" in report.notes[0] and not report.refuted
    assert list(dict.fromkeys(told)) == ["Small trainings", "Training with input canaries", "Training shadow models"]


def test_where_absence_is_a_blank_record_all_of_it_is_audited(few: None) -> None:
    """Shuffled epochs: the number of records is public, and must be the true one."""
    from dphero.audit import audit_recipe
    from dphero.experiments import resolve

    recipe = resolve({"data": "digits", "method": "dp-mp", "noise_multiplier": 4.0, "epochs": 2.0})
    for size in ("public", 1437):
        report = audit_recipe(recipe.with_(dataset_size=size), quick=False, releases=40)
        (one_run,), (attack,) = report.one_runs, report.attacks
        assert one_run.canaries == 143 and attack.name == "LiRA" and not report.refuted


@pytest.mark.slow
def test_data_of_ones_own_are_audited(tmp_path: Path, few: None) -> None:
    random = np.random.default_rng(0)
    images, labels = random.random((300, 8, 8), dtype=np.float32), np.arange(300) % 3
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images[:30], y_test=labels[:30])
    own = ("audit", "--method", "dp-sgd", "--data", tmp_path / "own.npz", "--quick", "--releases", 40)
    result = run(*own, "--dataset-size", "public", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["refuted"] is False


@pytest.mark.slow
def test_parameters_that_no_canary_enters_are_noted(tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from dphero.audit import audit_recipe
    from dphero.experiments import resolve

    (tmp_path / "normed.py").write_text(
        "from torch import nn\n"
        "def network(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("dphero.audit.runs._LARGE", 1000)
    settings = {"data": "digits", "method": "dp-sgd", "noise_multiplier": 1.0, "epochs": 1.0}
    notes = audit_recipe(resolve({**settings, "model": "normed:network"}), releases=20).notes
    assert any(note.startswith("no canary enters 1.weight, 1.bias: a leak") for note in notes), notes


# -- the run's own word ---------------------------------------------------------------------------------------------


def changed(finished: Path, to: Path, name: str, **changes: Any) -> RunDirectory:
    """A copy of the run in which one of its files says something else, and says it on purpose: the digests agree."""
    if not to.exists():
        shutil.copytree(finished, to, ignore=shutil.ignore_patterns("audit", "tensorboard"))
    (to / name).write_text(json.dumps({**json.loads((to / name).read_text()), **changes}))
    result = json.loads((to / "result.json").read_text())
    (to / "result.json").write_text(json.dumps(seal_json({**result, "files": {}})))
    return RunDirectory.open(to)


@pytest.mark.slow
def test_a_run_that_printed_too_little_is_refuted(finished: Path, tmp_path: Path, few: None) -> None:
    changed(finished, tmp_path / "run", "result.json", epsilon=0.3)
    result = run("audit", tmp_path / "run", "--quick", "--releases", 40, "--json")
    assert result.exit_code == 1, result.stderr
    record = json.loads(result.stdout)
    assert record["refuted"] and record["ledger"]["problems"] == ["it printed less than its ledger costs"]
    (one_run,) = record["one_run"]
    assert one_run["claimed_epsilon"] == 0.3 < one_run["audited_epsilon"] and one_run["refuted"]
    assert not any(each["refuted"] for each in record["audits"])


def test_an_accountant_that_is_wrong_both_times_is_noticed_by_another(finished: Path, tmp_path: Path) -> None:
    """A run that printed the price at 10 δ, audited by the same accountant."""
    with FAULTS["priced at 10 δ"]():
        printed = check_ledger(RunDirectory.open(finished)).ledger_epsilon
        found = check_ledger(changed(finished, tmp_path / "run", "result.json", epsilon=printed))
    assert found.ledger_epsilon == printed and found.independent_epsilon > printed
    assert found.problems == ("it printed less than dp-accounting alone finds",)


def test_the_ledger_of_a_run_must_agree_with_it(finished: Path, tmp_path: Path) -> None:
    sound = check_ledger(RunDirectory.open(finished))
    assert not sound.refuted and sound.ledger_epsilon == pytest.approx(sound.printed_epsilon, rel=1e-9)
    (event,) = json.loads((finished / "ledger.json").read_text())["events"]
    short = changed(finished, tmp_path / "short", "ledger.json", events=[{**event, "count": 4}])
    missing, steps = check_ledger(short).problems
    assert "it printed more than its ledger costs" in missing and steps == "14 of its 18 steps are not on its ledger"
    changed(finished, tmp_path / "short", "result.json", steps=4, epsilon=1.9)
    assert "14 of its 18 steps are not on its ledger" in check_ledger(short).problems  # its metrics remember them
    quiet = changed(finished, tmp_path / "quiet", "ledger.json", events=[{**event, "noise_multiplier": 0.7}])
    assert check_ledger(quiet).problems == ("it printed less than its ledger costs",)
    (tmp_path / "quiet" / "ledger.json").write_text("{}")
    with pytest.raises(ValueError, match=r"ledger.json is damaged"):
        check_ledger(quiet)


def test_ledgers_that_pay_once_or_by_a_filter_agree_with_their_runs(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    methods = {"label-dp": ("--epsilon", 2), "ipa-rf": ("--noise-multiplier", 3), "sas-dp": ("--noise-multiplier", 3)}
    for method, noise in methods.items():
        made = run("train", "--data", "digits", "--method", method, *noise, "--epochs", 1, "--seed", 1,
                   "--out", tmp_path / method, "--json")  # fmt: skip
        assert made.exit_code == 0, made.stderr
        assert check_ledger(RunDirectory.open(tmp_path / method)).problems == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a run directory, or 'published', or --method NAME"),
        (["nowhere"], "there is no run directory nowhere"),
        (["published", "--data", "digits"], "--data, --epsilon and --dataset-size belong to --method"),
        (["published", "--epsilon", "0"], "--data, --epsilon and --dataset-size belong to --method"),
        (["published", "--delta", "0"], "delta must be above 0"),
        (["somewhere", "--delta", "0"], "--noise-multiplier and --delta are the run's own"),
        (["published", "--out", __file__], "test_audit_command.py is no folder; give another --out"),
        (["--method", "dp-sgd", "--data", "digits", "--dataset-size", "few"], "--dataset-size must be a whole number"),
        (["published", "--confidence", "95"], "--confidence must lie between 0 and 1, got 95"),
        (["published", "--releases", "5"], "Invalid value for '--releases'"),
        (["--method", "dp-magic", "--data", "digits"], "method 'dp-magic' is unknown"),
        (["--method", "dp-sgd"], "which data?"),
        (["somewhere", "--delta", "0.1"], "--noise-multiplier and --delta are the run's own"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    result = run("audit", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.stderr


def test_a_folder_that_is_no_run_and_a_run_that_is_not_finished(tmp_path: Path, finished: Path) -> None:
    result = run("audit", tmp_path)
    assert result.exit_code == 2 and "no recipe.toml" in " ".join(result.stderr.split())
    (tmp_path / "recipe.toml").write_text((finished / "recipe.toml").read_text())
    result = run("audit", tmp_path)
    assert result.exit_code == 2 and "is not finished" in " ".join(result.stderr.split())


@pytest.mark.slow
def test_a_refuted_claim_is_exit_code_1(few: None) -> None:
    with FAULTS["half the noise"](), FAULTS["half the noise"]():
        result = run("audit", "--method", "dp-sgd", "--data", "digits", "--quick", "--releases", 40)
    assert result.exit_code == 1 and "REFUTED" in result.stdout


def test_a_refuted_claim_is_exit_code_1_wherever_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be full only when the audit is done."""

    def full(*arguments: Any) -> None:
        raise OSError("no space left on device")

    for refuted, status in ((True, 1), (False, 2)):
        report = Report("a run", attacks=[Roc.of("loss threshold", np.array([1.0]), np.array([0.0]))])
        monkeypatch.setattr(Report, "refuted", refuted)
        monkeypatch.setattr("dphero.audit.report.save", full)
        monkeypatch.setattr("dphero.cli.privacy.audit._report", lambda *arguments, report=report: report)
        result = run("audit", "--method", "dp-sgd", "--data", "digits", "--json", "--out", tmp_path / "audit")
        assert result.exit_code == status and "no space left on device" in result.stderr


@pytest.mark.slow
def test_gradient_canaries_see_an_engine_without_noise(few: None) -> None:
    """The command's own training: with next to no noise, its claim is refuted."""
    from dphero.audit import audit_recipe
    from dphero.experiments import resolve

    recipe = resolve({"data": "digits", "method": "dp-sgd", "noise_multiplier": 6.0, "epochs": 2.0})
    with FAULTS["half the noise"](), FAULTS["half the noise"](), FAULTS["half the noise"](), FAULTS["half the noise"]():
        report = audit_recipe(recipe, releases=20)
    (one_run,) = report.one_runs
    assert one_run.refuted and report.refuted


def test_a_method_without_noise_in_some_directions_is_said_to_have_none(few: None) -> None:
    """The published recipe on a convolution whose weight is rank deficient."""
    result = run("audit", "--method", "dp-hero-published", "--data", "digits", "--quick", "--releases", 40)
    assert result.exit_code == 0, result.stderr
    assert "its true ε is infinite" in " ".join(result.stdout.split())


def test_ctrl_c_leaves_nothing_behind(
    finished: Path, tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dphero.audit.runs._gradient_canaries", interrupted)  # some way into the audit
    result = run("audit", finished, "--quick", "--releases", 40, "--out", tmp_path / "audit")
    assert result.exit_code == 130 and result.stdout == ""
    assert "interrupted; the audit is not finished, and nothing was written" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr and not (tmp_path / "audit").exists()


def test_pictures_are_replaced_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = Roc.of("loss threshold", np.array([1.0]), np.array([0.0]))
    save(Report("before", attacks=[attack]), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dphero.audit.report.plot_roc", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(Report("after", attacks=[attack]), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_pictures_of_little_data(tmp_path: Path) -> None:
    attack = Roc.of("loss threshold", np.array([1.0]), np.array([0.0]))
    assert plot_roc([attack]).axes[0].get_xscale() == "log"
    save(Report("nothing but an attack", attacks=[attack]), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"audit.json", "roc.png", "roc.svg"}
