"""Show the screens that a new user meets, at 80 columns and in a pipe, by today's code and by an older one.

    .venv/bin/python benchmarks/screens.py --before ../dphero-before > benchmarks/results/screens.md

The older code is a checkout (``git worktree add --detach ../dphero-before 8fd3a28``). All trainings are of seconds, on
small digits.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 80
LONGEST = 34  # lines of a screen that are kept

NETWORKS = """
from torch import nn

def wrong():
    return nn.Linear(64, 10)

def norm(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, classes))
"""

WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None
from dphero.cli import app
app(["compare", "--data", "digits", "--epsilons", "3", "--seeds", "1", "--epochs", "1"], prog_name="dphero")
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
        terminal: Whether it is also shown on a terminal: where that differs from a pipe.
        python: Whether the command is code.
        timed: Whether the processor time is told.
    """

    title: str
    command: Sequence[str]
    terminal: bool = False
    python: bool = False
    timed: bool = False


TABLE_FILE = str(ROOT / "benchmarks" / "results" / "reproduction" / "iterations.json")
SMALL = ("--data", "digits", "--epochs", "1", "--epsilon", "3")
PRICE = ("epsilon", "--noise-multiplier", "1", "--dataset-size", "60000", "--lot", "256", "--epochs", "2")
PRICE += ("--delta", "1e-5")
COMPARE = ("compare", "--data", "digits", "--methods", "dp-sgd,dp-hero", "--epsilons", "3", "--seeds", "1")
COMPARE += ("--epochs", "1", "--workers", "1", "--out", "compared")

SCREENS = (
    Screen("`reproduce` printed 15 columns", (TABLE.format(path=TABLE_FILE),), python=True),
    Screen("`compare` showed elapsed time before the word “left”", COMPARE),
    Screen(
        "without a terminal the bar lost its step counter; the result panel left out ε, δ, model, lot, lr and clip",
        ("train", "--data", "digits", "--epochs", "2", "--epsilon", "3", "--seed", "0", "--out", "trained"),
        terminal=True,
    ),
    Screen("`methods` printed 180 lines", ("methods",)),
    Screen("`epsilon` did not take data-set size, lot and epochs", PRICE),
    Screen("its JSON did not say whether ε is a bound", (*PRICE, "--json")),
    Screen("`--model` with a wrong signature was a traceback", ("train", *SMALL, "--model", "networks:wrong")),
    Screen("BatchNorm's message lost its line break", ("train", *SMALL, "--model", "networks:norm")),
    Screen("`--mechanism published` pointed to an API call", ("train", *SMALL, "--mechanism", "published")),
    Screen(
        "a missing extra (matplotlib: named rightly before, too)",
        (WITHOUT_MATPLOTLIB,),
        python=True,
    ),
    Screen("`train` without arguments took 2.7 s of processor time to ask", ("train",), timed=True),
    Screen(
        "`dir(dphero)` hid `PrivacyEngine`",
        ("import dphero; print([name for name in dir(dphero) if not name.startswith('_')])",),
        python=True,
    ),
)


def show(screen: Screen, source: Path, folder: Path, *, terminal: bool) -> str:
    """Run a command with the code under ``source``, and return what a person sees of it."""
    command = [sys.executable, *(("-c",) if screen.python else ("-m", "dphero.cli")), *screen.command]
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "NO_COLOR")}
    environment |= {"PYTHONPATH": f"{source / 'src'}:{folder}", "COLUMNS": str(COLUMNS), "TERM": "xterm"}
    if terminal:
        text = _on_terminal(command, folder, environment)
    else:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": 120, "check": False}
        text = subprocess.run(command, cwd=folder, env=environment, text=True, **merged).stdout
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        if screen.timed:
            text += f"({now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime:.1f} s of processor time)\n"
    text = text.replace(str(source), "…").replace(str(folder) + "/", "").replace(str(Path.home()), "~")
    lines = [line.rstrip() for line in text.splitlines()]
    if len(lines) > LONGEST:
        lines = [*lines[: LONGEST - 6], f"… {len(lines) - LONGEST + 1} lines …", *lines[-5:]]
    return "\n".join(line if len(line) <= 240 else f"{line[:240]} …" for line in lines)


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
    parser = argparse.ArgumentParser(description="Show every screen, before and after.")
    parser.add_argument("--before", type=Path, required=True, help="A checkout of the older code.")
    before = parser.parse_args().before.resolve()
    revision = subprocess.check_output(["git", "-C", str(before), "rev-parse", "--short", "HEAD"], text=True).strip()
    print(f"# Screens, before and after\n\nWritten by `benchmarks/screens.py`, at {COLUMNS} columns. ", end="")
    print(f"*Before* is commit {revision}. In a pipe unless *on a terminal* is said; long screens are cut.")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        folders = {"Before": (before, Path(first)), "After": (ROOT, Path(second))}
        for _, folder in folders.values():
            (folder / "networks.py").write_text(NETWORKS)
        for screen in SCREENS:
            words = " ".join(screen.command)
            print(f"\n## {screen.title[0].upper()}{screen.title[1:]}\n")
            print("`iterations` of the committed results" if "iterations.json" in words else _prompt(screen))
            for when, (source, folder) in folders.items():
                for terminal in (False, True) if screen.terminal else (False,):
                    for name in ("compared", "trained") if screen.command[0] in ("compare", "train") else ():
                        subprocess.run(["rm", "-rf", str(folder / name)], check=True)
                    print(f"\n{when}{', on a terminal' if terminal else ''}:\n\n```text")
                    print(show(screen, source, folder, terminal=terminal), end="\n```\n", flush=True)


def _prompt(screen: Screen) -> str:
    if not screen.python:
        return f"`dphero {' '.join(screen.command)}`"
    return "`dphero compare`, without matplotlib" if "matplotlib" in screen.command[0] else "In Python"


if __name__ == "__main__":
    main()
