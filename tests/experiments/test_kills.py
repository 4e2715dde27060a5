"""Runs that are killed at random moments end as the unbroken ones (all methods: ``benchmarks/kills.py``)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kills.py"
WITHOUT = """
import runpy, sys
from dphero.experiments.runs import training
save = training._Loop._save
def forgetful(self):
    latest, losses = self.latest, self.losses
    self.latest, self.losses = training.Progress(latest.step, latest.steps), []  # as checkpoints were before
    save(self)
    self.latest, self.losses = latest, losses
training._Loop._save = forgetful
script = sys.argv.pop(1)
runpy.run_path(script, run_name="__main__")
"""


def kills(*command):
    arguments = ["--kills", "8", "--methods", "dp-hero,dp-mp,sgd", "--seed", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_kill_9_changes_neither_weights_nor_ledger_nor_statement_nor_metrics():
    done = kills()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_running_figures_that_are_not_saved_are_missed():
    done = kills("-c", WITHOUT)
    assert done.returncode == 1 and "metrics" in done.stdout and "model.safetensors" not in done.stdout, done.stderr
