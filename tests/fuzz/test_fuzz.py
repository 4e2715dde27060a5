"""The short part of ``make fuzz``."""

import pytest

from dphero.experiments.runs import rundir
from tests.fuzz import command_lines, corruptions
from tests.trainer import training

pytest.importorskip("sklearn")


def test_damaged_checkpoints_are_refused_or_without_effect(tmp_path):
    findings = corruptions.fuzz_checkpoints(60, 1, tmp_path)
    assert not findings.faults and findings.counts["refused"] > 30


def test_damaged_runs_and_odd_command_lines_end_with_one_line(tmp_path):
    damage = corruptions.fuzz_runs(15, 1, tmp_path)
    assert not damage.faults and damage.counts["refused"] > 5
    lines = command_lines.fuzz(30, 1, tmp_path / "finished", tmp_path / "lines")
    assert not lines.faults and lines.counts["refused"] > 15


def test_a_checkpoint_of_other_guidance_is_refused_and_nothing_is_said_of_noise(tmp_path, caplog):
    """The state that is put back was never used: no noise went back."""
    shuffled, plain = (training(**options) for options in ({"guidance": "isotropic"}, {}))
    shuffled.steps(3)
    shuffled.engine.save(tmp_path / "run.pt")
    with pytest.raises(ValueError):
        plain.engine.load(tmp_path / "run.pt")
    assert "went back" not in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_the_digests_the_fuzzer_finds_what_is_silently_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir.files, "digests", lambda path: {})
    findings = corruptions.fuzz_runs(80, 1, tmp_path)
    assert any(fault.startswith("silently accepted") for fault in findings.faults)
