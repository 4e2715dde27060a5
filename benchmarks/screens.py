"""Show the screens that a new user meets, at 80 columns and in a pipe, by today's code and by an older one.

    .venv/bin/python benchmarks/screens.py > benchmarks/results/screens.md

All trainings are of seconds, on small digits.
"""

from __future__ import annotations

import os
import pty
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _before import COMMIT, ROOT, older_code

COLUMNS = 80
LONGEST = 34  # lines of a screen that are kept

NETWORKS = """
from torch import nn

def wrong():
    return nn.Linear(64, 10)

def norm(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, classes))
"""

NEEDS_MORE = """
import no_such_package

def data():
    return no_such_package.load()
"""

WITHOUT_SKLEARN = """
import sys
sys.modules["sklearn"] = None
from dphero.cli import app
app(["train", "--data", "digits", "--epochs", "1", "--epsilon", "3"], prog_name="dphero")
"""

TABLE = """
import json
from pathlib import Path
try:
    from dphero.cli.runs.reproduce import _show
    from dphero.experiments.reproduction.report import Report
    from dphero.experiments.reproduction.running import Reproduced
except ImportError:
    from dphero.cli.reproduce import _show
    from dphero.experiments.paper.report import Report
    from dphero.experiments.paper.running import Reproduced
kept = json.loads(Path({path!r}).read_text())
_show(Reproduced("iterations", "quick", Report(kept["rows"], [], kept["notes"]), (Path("iterations.md"),), {{}}))
"""


@dataclass(frozen=True)
class Screen:
    """One screen.

    Attributes:
        title: What was wrong with it.
        command: Arguments of ``dphero``; or, with ``python``, code.
        prompt: What is typed, where that is not the command.
        python: Whether the command is code.
        timed: Whether the processor time is told.
        leaves: A folder of which it is told what the command has left in it.
    """

    title: str
    command: Sequence[str]
    prompt: str = ""
    python: bool = False
    timed: bool = False
    leaves: str = ""


TABLE_FILE = str(ROOT / "benchmarks" / "results" / "reproduction" / "iterations.json")
SMALL = ("--data", "digits", "--epochs", "1", "--epsilon", "3")
PRICE = ("epsilon", "--noise-multiplier", "1", "--dataset-size", "60000", "--lot", "256", "--epochs", "2")
PRICE += ("--delta", "1e-5")
COMPARE = ("compare", "--data", "digits", "--methods", "dp-sgd,dp-hero", "--epsilons", "3", "--seeds", "1")
COMPARE += ("--epochs", "1", "--workers", "1", "--out", "compared")

SCREENS = (
    Screen(
        "`reproduce` printed 15 columns",
        (TABLE.format(path=TABLE_FILE),),
        prompt="`iterations` of the committed results",
        python=True,
    ),
    Screen("`compare` showed elapsed time before the word “left”", COMPARE),
    Screen(
        "without a terminal the bar lost its step counter; the result panel left out ε, δ, model, lot, lr and clip",
        ("train", "--data", "digits", "--epochs", "2", "--epsilon", "3", "--seed", "0", "--out", "trained"),
    ),
    Screen(
        "`audit RUN` set claims at σ = 1 beside the run's ε without a word, and had no conclusion",
        ("audit", "trained", "--quick"),
    ),
    Screen("`methods` printed 180 lines", ("methods",)),
    Screen("`epsilon` did not take data-set size, lot and epochs", PRICE),
    Screen("its JSON did not say whether ε is a bound", (*PRICE, "--json")),
    Screen("`--model` with a wrong signature was a traceback", ("train", *SMALL, "--model", "networks:wrong")),
    Screen("BatchNorm's message lost its line break", ("train", *SMALL, "--model", "networks:norm")),
    Screen("`--mechanism published` pointed to an API call", ("train", *SMALL, "--mechanism", "published")),
    Screen(
        "a missing extra left a run folder behind",
        (WITHOUT_SKLEARN,),
        prompt="`dphero train --data digits --epochs 1 --epsilon 3`, without scikit-learn",
        python=True,
        leaves="runs",
    ),
    Screen(
        "for a missing package of somebody else, too, an extra of dphero was named",
        ("train", "--data", "needs_more:data", "--epochs", "1", "--epsilon", "3"),
    ),
    Screen("`train` without arguments took seconds of processor time to ask", ("train",), timed=True),
    Screen(
        "small runs used all cores, which wait for each other",
        ("train", "--data", "digits", "--epochs", "40", "--epsilon", "3", "--seed", "0", "--json", "--out", "longer"),
        timed=True,
    ),
    Screen(
        "`dir(dphero)` hid `PrivacyEngine`",
        ("import dphero; print([name for name in dir(dphero) if not name.startswith('_')])",),
        prompt="In Python",
        python=True,
    ),
)


def show(screen: Screen, source: Path, folder: Path, *, terminal: bool) -> list[str]:
    """Run a command with the code under ``source``, and return the lines that a person sees of it."""
    for name in _written(screen):
        shutil.rmtree(folder / name, ignore_errors=True)
    command = [sys.executable, *(("-c",) if screen.python else ("-m", "dphero.cli")), *screen.command]
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "NO_COLOR")}
    environment |= {"PYTHONPATH": f"{source / 'src'}:{folder}", "COLUMNS": str(COLUMNS), "TERM": "xterm"}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if terminal:
        text = _on_terminal(command, folder, environment)
    else:
        merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": 600, "check": False}
        text = subprocess.run(command, cwd=folder, env=environment, text=True, **merged).stdout
    text = text.rstrip("\n") + "\n"
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    if screen.timed:
        text += f"({now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime:.1f} s of processor time)\n"
    if screen.leaves:
        left = sorted(each.name for each in (folder / screen.leaves).glob("*"))
        text += f"(left behind in {screen.leaves}: {', '.join(left) or 'nothing'})\n"
    text = text.replace(str(source), "…").replace(str(folder) + "/", "").replace(str(Path.home()), "~")
    text = re.sub(r'"[^"]*/site-packages/[^"]*"', '"…"', text)
    return [line.rstrip() for line in text.splitlines()]


def _written(screen: Screen) -> list[str]:
    """Return the folders that a command writes."""
    command = screen.command
    return [command[command.index("--out") + 1]] if "--out" in command else [screen.leaves] if screen.leaves else []


def _on_terminal(command: Sequence[str], folder: Path, environment: dict[str, str]) -> str:
    """Run on a pseudo-terminal; of a line that is drawn again and again, the last but one drawing is kept."""
    leader, follower = pty.openpty()
    streams = {"stdin": follower, "stdout": follower, "stderr": follower}
    process = subprocess.Popen(command, cwd=folder, env={**environment, "LINES": "60"}, **streams)
    os.close(follower)
    seen = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    process.wait()
    os.close(leader)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode(errors="replace")).replace("\r\n", "\n")
    shown = []
    for line in plain.split("\n"):
        drawings = [text.rstrip() for text in line.split("\r") if text.strip()]
        shown += list(dict.fromkeys(drawings))[-2:]
    return "\n".join(dict.fromkeys(shown))


def main() -> None:
    """Print all screens as Markdown."""
    print(f"# Screens, before and after\n\nWritten by `benchmarks/screens.py`, at {COLUMNS} columns. ", end="")
    print(f"*Before* is commit {COMMIT}. In a pipe unless *on a terminal* is said; long screens are cut.")
    print("\nOn a terminal: what differs from the pipe.")
    with older_code() as before, tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        folders = {"Before": (before, Path(first)), "After": (ROOT, Path(second))}
        for _, folder in folders.values():
            (folder / "networks.py").write_text(NETWORKS)
            (folder / "needs_more.py").write_text(NEEDS_MORE)
        for screen in SCREENS:
            print(f"\n## {screen.title[0].upper()}{screen.title[1:]}\n")
            print(screen.prompt or f"`dphero {' '.join(screen.command)}`")
            for when, (source, folder) in folders.items():
                _print(when, screen, source, folder)


def _print(when: str, screen: Screen, source: Path, folder: Path) -> None:
    """Print a screen in a pipe, and what a terminal shows otherwise."""
    piped = show(screen, source, folder, terminal=False)
    _print_lines(f"{when}:", piped)
    known = {_timeless(line) for line in piped}
    others = [line for line in show(screen, source, folder, terminal=True) if _timeless(line) not in known]
    if others:
        _print_lines(f"{when}, on a terminal:", others)
    else:
        print("\nOn a terminal: the same.")


def _print_lines(heading: str, lines: list[str]) -> None:
    """Print lines, the middle of many left out."""
    if len(lines) > LONGEST:
        lines = [*lines[: LONGEST - 6], f"… {len(lines) - LONGEST + 1} lines …", *lines[-5:]]
    text = "\n".join(line if len(line) <= 240 else f"{line[:240]} …" for line in lines)
    print(f"\n{heading}\n\n```text\n{text}\n```", flush=True)


def _timeless(line: str) -> str:
    """A line without what is different each time: clocks, and names of folders."""
    return re.sub(r"\s+", " ", re.sub(r"\d+:\d\d(:\d\d)?|\d+(\.\d+)? s\b|-\d{6}\b", "", line))


if __name__ == "__main__":
    main()
