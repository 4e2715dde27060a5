"""``dphero compare`` as users meet it: the table, bad input, Ctrl-C, kill -9, and going on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dphero.accounting import Ledger, PoissonGaussian, price
from dphero.cli import app
from dphero.cli.runs import compare
from dphero.experiments.comparison import sweep
from dphero.experiments.comparison.worker import train_run

pytest.importorskip("sklearn")

SOURCE = str(Path(__file__).parents[2] / "src")


def run(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def start(*arguments):
    """Begin a comparison in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "200"}
    command = [sys.executable, "-m", "dphero.cli", "compare", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process=None, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        assert process is None or process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def evaluations(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_on_record(run):
    """The number of releases in the run's ledger."""
    return Ledger.from_json((run / "ledger.json").read_text()).steps


class Here:
    """A pool without processes."""

    def __init__(self, state, size):
        self.state = state

    def run(self, asked_to_stop):
        while self.state.waiting:
            planned = self.state.begin()
            self.state.end(planned, train_run(str(self.state.path(planned)), planned.recipe.as_dict()))
            self.state.report()


@pytest.mark.timeout(300)
def test_interrupted_twice_nothing_is_lost_and_nothing_trained_twice(tmp_path, monkeypatch):
    out, epochs = tmp_path / "out", 40
    short = out / "runs" / "dp-sgd_eps3_epochs1_seed0"
    long = out / "runs" / f"dp-sgd_eps3_epochs{epochs}_seed0"

    for name in ("plot_accuracy", "plot_curves"):  # seconds each, and not the point
        monkeypatch.setattr(f"dphero.experiments.comparison.compare.{name}", lambda *arguments: None)

    # Ctrl-C in the middle of the second run: it saves.
    show = compare._Reporter.__call__

    def interrupt(display, standing):
        show(display, standing)
        if standing.done and any(state.get("step", 0) >= 6 for state in standing.running.values()):
            monkeypatch.setattr(compare._Reporter, "__call__", show)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(compare._Reporter, "__call__", interrupt)
    arguments = ["--data", "digits", "--methods", "dp-sgd", "--epsilons", 3, "--seeds", 1, "--workers", 1]
    result = run(*arguments, "--vary", f"epochs=1,{epochs}", "--out", out)
    assert result.exit_code == 130
    assert f"1 of 2 runs finished; the others were saved; go on with: dphero compare --resume {out}" in result.stderr
    assert "failed" not in result.stderr  # it saved, as it was told to
    finished = (short / "result.json").stat().st_mtime_ns
    first = steps_on_record(long)
    assert 6 <= first < 3 * epochs and (long / "checkpoint.pt").exists()
    assert [row["seeds"] for row in json.loads((out / "table.json").read_text())["rows"]] == [1, 0]
    before = evaluations(long / "metrics.jsonl")

    # kill -9: nobody tells the worker, and yet it saves, and leaves.
    process = start("--resume", out)
    wait_for(lambda: len(evaluations(long / "metrics.jsonl")) > len(before) + 1, process)
    process.kill()
    process.communicate()
    wait_for(lambda: steps_on_record(long) > first)
    assert first + 3 < steps_on_record(long) < 3 * epochs

    # To the end (in this process: another one would only cost seconds).
    monkeypatch.setattr(sweep, "Pool", Here)
    result = run("--resume", out, "--json", "--workers", 1)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["seeds"] for row in rows] == [1, 1]
    assert (short / "result.json").stat().st_mtime_ns == finished
    result = json.loads((long / "result.json").read_text())
    assert result["steps"] == steps_on_record(long) == 3 * epochs
    ledger = Ledger().with_event(PoissonGaussian(512 / 1437, result["noise_multiplier"]), 3 * epochs)
    assert price(ledger, 1e-4).epsilon == result["epsilon"] == rows[1]["epsilon"] <= 3
    lines = evaluations(long / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(3, 3 * epochs + 1, 3))
    assert lines[: len(before)] == before


def test_the_table_for_people_and_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "Pool", Here)
    out = tmp_path / "out"
    result = run("--data", "digits", "--epochs", 1, "--epsilons", 3, "--seeds", "4,", "--workers", 1, "--out", out)
    assert result.exit_code == 0, result.stderr
    shown = " ".join(result.stdout.split())
    for words in ("dp-sgd", "dp-hero", "true ε", "one training example", "sample standard deviation", str(out.name)):
        assert words in shown
    for name in ("plan.json", "table.csv", "table.json", "table.md", "accuracy.png", "accuracy.svg", "accuracy.csv"):
        assert (out / name).is_file()
    assert (out / "runs" / "dp-hero_eps3_seed4" / "statement.txt").is_file()

    # The same command again trains nothing, and says the same.
    again = run(
        "--data", "digits", "--epochs", 1, "--epsilons", 3, "--seeds", "4,", "--workers", 1, "--out", out, "--json"
    )
    assert json.loads(again.stdout.splitlines()[-1])["rows"] == json.loads((out / "table.json").read_text())["rows"]
    other = run("--data", "digits", "--epochs", 2, "--epsilons", 3, "--seeds", "4,", "--out", out)
    assert other.exit_code == 2 and "holds another comparison" in other.stderr
    together = run("--resume", out, "--epochs", 2)
    assert together.exit_code == 2 and "leave out all other settings" in " ".join(together.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which data?"),
        (["--data", "digits", "--methods", "dp-sdg"], "did you mean 'dp-sgd'?"),
        (["--data", "digits", "--methods", ","], "at least one of: methods"),
        (["--data", "digits"], "give --epsilons"),
        (["--data", "digits", "--epsilons", "1,many"], "--epsilons takes numbers separated by commas, got 'many'"),
        (["--data", "digits", "--epsilons", "1", "--seeds", "0"], "--seeds takes a number of seeds"),
        (["--data", "digits", "--epsilons", "1", "--seeds", "two"], "--seeds takes a number of seeds"),
        (["--data", "digits", "--epsilons", "1", "--seeds", "²"], "--seeds takes a number of seeds"),
        (["--data", "digits", "--epsilons", "1", "--dataset-size", "²"], "--dataset-size must be a whole number"),
        (["--data", "digits", "--epsilons", "1", "--vary", "lrr=1,2"], "did you mean 'lr'?"),
        (["--data", "digits", "--epsilons", "1", "--vary", "lr"], "--vary takes NAME=VALUE,VALUE"),
        (["--data", "digits", "--epsilons", "1", "--vary", "lr=[1]"], "--vary lr takes numbers, text, true and false"),
        (["--data", "digits", "--epsilons", "1", "--vary", "lr=1,None"], "true and false, got None"),
        (["--data", "digits", "--epsilons", "1", "--dataset-size", "many"], 'must be a whole number or "public"'),
        (["--data", "digits", "--epsilons", "1", "--model", "lenett"], "no model 'lenett'"),
        (["--data", "no-such-data", "--epsilons", "1"], "no-such-data"),
        (["--data", "digits", "--epsilons", "1", "--workers", "0"], "Invalid value for '--workers'"),
        (["--resume", "."], "no plan.json"),
    ],
)
def test_errors_are_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_interrupted_before_there_is_a_plan(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "_plan", interrupted)
    result = run("--data", "digits")
    assert result.exit_code == 130
    assert result.stderr.strip().splitlines()[-1] == "dphero: error: interrupted"


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("--data", "digits", "--epsilons", 1, "--out", tmp_path / "file" / "out")
    assert result.exit_code == 2 and "Not a directory" in result.stderr and "Traceback" not in result.stderr


def test_nothing_is_cut_short_in_a_narrow_terminal_and_brackets_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "train_run", lambda *order: {"kind": "failed", "error": "[/b]"})
    monkeypatch.setattr(sweep, "Pool", Here)
    monkeypatch.setenv("COLUMNS", "48")
    varied = ("--methods", "dp-hero-published", "--vary", "guidance=[red],isotropic")
    result = run("--data", "digits", "--epsilons", 1, "--seeds", 1, *varied, "--out", tmp_path / "out [old]")
    assert result.exit_code == 1 and "[/b]" in result.stdout, result.output
    assert "…" not in result.stdout and "[red]" in result.stdout and "[old]" in result.stdout.replace("\n", "")


def test_failing_runs_are_shown_with_their_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "train_run", lambda *order: {"kind": "failed", "error": "the reason"})
    monkeypatch.setattr(sweep, "Pool", Here)
    result = run("--data", "digits", "--epsilons", 1, "--seeds", 1, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "dp-sgd_eps1_seed0 failed: the reason" in result.stdout and "0, 1 failed" in result.stdout
    assert "--resume" in result.stdout and "2 failed" in result.stderr
