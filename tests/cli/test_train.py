"""``dphero train`` as people and machines use it."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from dphero.cli import app
from dphero.experiments import RunDirectory

pytest.importorskip("sklearn")


def run(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def test_machines_get_one_object_on_the_last_line(tmp_path):
    out = tmp_path / "run"
    result = run("--data", "digits", "--epsilon", 5, "--epochs", 2, "--seed", 1, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout.splitlines()[-1])
    assert list(record) == ["accuracy", "epsilon", "is_bound", "delta", "steps", "method", "run"]
    assert record["is_bound"] is True
    assert 4.9 < record["epsilon"] <= 5 and record["steps"] == 6 and record["method"] == "dp-hero"
    assert record["run"] == str(out)


def test_people_get_accuracy_statement_and_what_to_keep_secret(tmp_path):
    result = run(
        "--data", "digits", "--noise-multiplier", 2, "--epochs", 1, "--seed", 1, "--out", tmp_path / "run",
    )  # fmt: skip
    shown = " ".join(result.stdout.split())
    for words in ("Test accuracy", "Privacy statement", "one training example", "keep it as secret as the data"):
        assert words in shown


def test_a_recipe_file_and_flags_over_it(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'data = "digits"\nmethod = "dp-hero"\nnoise_multiplier = 2.0\nepochs = 3\n[options]\nexponent = 0.5\n'
    )
    out = tmp_path / "run"
    arguments = ("--recipe", recipe, "--epochs", 1, "--set", "floor=0.2", "--set", "refresh_every=5", "--out", out)
    assert run(*arguments, "--json").exit_code == 0
    kept = RunDirectory.open(out).recipe
    assert (kept.epochs, kept.options) == (1, {"exponent": 0.5, "floor": 0.2, "refresh_every": 5})


@pytest.mark.parametrize(
    "module, name, extra",
    [("sklearn.datasets", "scikit-learn", "demo"), ("safetensors.torch", "safetensors", "experiments")],
)
def test_a_package_that_is_missing_is_named_with_one_way_to_get_it(module, name, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    result = run("--data", "digits", "--noise-multiplier", 5, "--epochs", 0.1, "--out", tmp_path / "run")
    shown = " ".join(result.stderr.split())
    assert result.exit_code == 2 and name in shown, result.output
    assert shown.count("pip install") == 1 and shown.endswith(f": pip install 'dphero[{extra}]'")
    assert not (tmp_path / "run" / "ledger.json").exists()  # nothing was spent


def test_a_package_that_is_broken_is_not_called_missing(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ImportError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr("dphero.experiments.train", fail)
    result = run("--data", "digits", "--noise-multiplier", 5, "--epochs", 0.1, "--out", tmp_path / "run")
    assert isinstance(result.exception, ImportError) and "pip install" not in result.stderr


def test_a_corrected_command_takes_the_same_folder_and_a_moved_run_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = run("--data", "digits", "--out", "run")
    assert refused.exit_code == 2 and "give --epsilon" in refused.stderr
    assert run("--data", "digits", "--noise-multiplier", 5, "--epochs", 0.1, "--out", "run").exit_code == 0
    moved = f"moved [old] :dog: {'x' * 100}"
    (tmp_path / "run").rename(moved)
    shown = run("--resume", moved)
    assert shown.exit_code == 0 and "Privacy statement" in shown.stdout, shown.output
    assert "[old] :dog:" in shown.stdout and shown.stdout.count("x" * 30) and "…" not in shown.stdout
    assert json.loads(run("--resume", moved, "--json").stdout)["run"] == moved


def test_runs_get_a_folder_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run("--data", "digits", "--noise-multiplier", 5, "--epochs", 0.3).exit_code == 0
    assert len(list((tmp_path / "runs").glob("digits-dp-hero-*"))) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "which data?"),
        (("--data", "mnits"), "mnits"),
        (("--data", "digits", "--epsilon", "0"), "epsilon"),
        (("--data", "digits", "--epsilon", "3", "--noise-multiplier", "1"), "both given"),
        (("--data", "digits", "--epsilon", "3", "--method", "dp-hiro"), "did you mean 'dp-hero'"),
        (("--data", "digits", "--epsilon", "3", "--set", "exponent"), "NAME=VALUE"),
        (("--data", "digits", "--epsilon", "3", "--dataset-size", "many"), "--dataset-size"),
        (("--data", "digits", "--epsilon", "3", "--dataset-size", "²"), "--dataset-size"),
        (
            ("--data", "digits", "--epsilon", "3", "--physical-batch", "all"),
            '--physical-batch must be a whole number or "auto"',
        ),
        (("--data", "digits", "--epsilon", "3", "--set", "exponent=abc"), "'exponent' of method 'dp-hero' must be a"),
        (("--data", "digits", "--epsilon", "3", "--seed", "99999999999999999999999999"), "seed must be"),
        (("--resume", "nowhere"), "not the directory of a run"),
        (("--resume", "nowhere", "--epochs", "3"), "leave out all other settings"),
        (("--data", "digits", "--epsilon", "3", "--recipe", "missing.toml"), "missing.toml"),
    ],
)
def test_bad_input_is_one_helpful_line(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("dphero: error:") and words in message


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("--data", "digits", "--epsilon", 3, "--out", tmp_path / "file" / "run")
    assert result.exit_code == 2 and "file" in result.stderr


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    out = tmp_path / "run"
    settings = ["--data", "digits", "--noise-multiplier", "3", "--epochs", "2000", "--seed", "0", "--out", str(out)]
    command = [sys.executable, "-m", "dphero.cli", "train", *settings]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not (out / "metrics.jsonl").exists() or not RunDirectory.open(out).metrics:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"go on with: dphero train --resume {out}" in " ".join(errors.split())
    assert (out / "checkpoint.pt").exists() and not (out / "result.json").exists()


@pytest.mark.slow
def test_a_terminal_that_is_closed_does_not_cost_the_last_steps(tmp_path):
    out = tmp_path / "run"
    settings = ["--data", "digits", "--noise-multiplier", "3", "--epochs", "2000", "--seed", "0", "--out", str(out)]
    process, terminal = pty.fork()
    if not process:
        os.execv(sys.executable, [sys.executable, "-m", "dphero.cli", "train", *settings])
    while not (out / "metrics.jsonl").exists() or not RunDirectory.open(out).metrics:
        os.read(terminal, 1 << 16)
    before = (out / "checkpoint.pt").stat().st_mtime_ns
    os.close(terminal)  # sends SIGHUP, and whatever is printed from now on fails
    os.waitpid(process, 0)
    assert (out / "checkpoint.pt").stat().st_mtime_ns > before and RunDirectory.open(out).result is None


def test_a_second_ctrl_c_says_what_was_done(tmp_path, monkeypatch):
    from dphero import experiments

    def stopped(directory, report):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments, "train", stopped)
    result = run("--data", "digits", "--epsilon", 3, "--out", tmp_path / "run")
    assert result.exit_code == 130
    said = " ".join(result.stderr.split())
    assert "stopped at once; nothing was saved after the last checkpoint" in said
    assert said.endswith(f"dphero train --resume {tmp_path / 'run'}")
