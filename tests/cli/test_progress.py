"""Progress as people see it on a terminal of 80 columns, and as a log keeps it."""

import io

from rich.console import Console

from dphero.cli import _progress
from dphero.cli._progress import ProgressDisplay

FIGURES = ["accuracy 88.20%", "ε 1.234", "loss 0.512", "clipped 93%", "signal/noise 0.31"]


def test_a_log_gets_the_first_and_the_last_count_with_all_figures(capsys):
    with ProgressDisplay("Preparing") as display:
        for step in range(1, 401):
            display.update("Training", step, 400, FIGURES)
        display.update("Training", 400, 400, ["accuracy 90.00%"])
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"Training 1/400  {'  '.join(FIGURES)}"
    assert last == "Training 400/400  accuracy 90.00%  took 0:00"


def test_a_log_gets_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(_progress, "_LINE_SECONDS", 0.0)
    with ProgressDisplay("Preparing") as display:
        for step in range(5):
            display.update("Training", step, 100)
    assert len(capsys.readouterr().err.splitlines()) == 5


def test_each_piece_of_work_has_its_own_clock(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("rich.console.monotonic", lambda: now[0])
    with ProgressDisplay("Preparing") as display:
        for what, seconds in (("Releasing", 30), ("Training", 5)):
            for step in range(3):
                display.update(what, step, 2)
                now[0] += seconds
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("took ")[2] for line in lines if "2/2" in line] == ["1:00", "0:10"]
    assert not [line for line in lines if "took" in line and "2/2" not in line], "what goes on is not over"


def test_work_without_a_count_leaves_nothing_behind(capsys):
    with ProgressDisplay("Preparing") as display:
        display.update("Looking")
    assert capsys.readouterr().err == ""


def test_a_bar_keeps_counter_and_first_figures_within_80_columns(monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(_progress, "console", lambda stderr: screen)
    with ProgressDisplay("Preparing") as display:
        for step in range(1, 12_001, 1000):
            display.update("Training", step, 12_000, FIGURES)
        display.update_part("run-1", 3, 10, ["starting"])
    lines = screen.file.getvalue().splitlines()
    (last,) = [line for line in lines if "Training" in line][-1:]
    assert "11,001/12,000" in last and "accuracy 88.20%  ε 1.234" in last and "signal" not in last
    assert last.rstrip().endswith("left") and max(map(len, lines)) <= 80 + len("\x1b[2K" * 4)
    assert any("  run-1" in line and "3/10" in line for line in lines)
