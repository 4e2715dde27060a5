"""A process that trains the runs it is handed, one after another: ``python -m dphero.experiments.comparison.worker``.

It reads one order a line, ``{"run": DIRECTORY, "recipe": {...}}``, and answers with one message a line:
``{"kind": "progress", ...}`` while it trains, then ``done``, ``stopped`` or ``failed`` (with ``error``, and ``tired``
if the process ends with it). What anything else prints goes to the run's ``log.txt``. SIGTERM stops it gently; so does
the end of its orders, which is what it sees when whoever started it was killed.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from dphero import data as datasets
from dphero._files import open_for_append
from dphero.data import BUILT_INS, Data
from dphero.experiments.defaults import anchored
from dphero.experiments.runs.files import to_json
from dphero.experiments.runs.rundir import Busy, RunDirectory
from dphero.experiments.runs.training import Progress, train
from dphero.experiments.stopping import Interrupted
from dphero.methods import recipe as recipes
from dphero.methods.recipe import Recipe

_REPORT_SECONDS = 0.2
_PATIENCE_SECONDS = 60.0  # for a worker of a comparison that was killed: it saves first


def train_run(
    path: str, recipe: Mapping[str, Any], report: Callable[[Progress], None] = lambda progress: None
) -> dict[str, Any]:
    """Train a run, or go on with it, and return what became of it; an error is an answer, too.

    Args:
        path: Its directory.
        recipe: Its recipe, as plain values.
        report: Called after every step.
    """
    try:
        directory = _directory(Path(path), recipes.merge(recipe))
        _wait_until_free(directory)
        train(directory, report=report, data=_shared(directory.recipe))
    except Interrupted:
        return {"kind": "stopped"}
    except Exception as error:
        traceback.print_exc()
        own = isinstance(error, ValueError | OSError)  # their messages are meant for users
        message = " ".join(str(error).split())
        message = message if own and message else f"{type(error).__name__}: {message}"
        return {"kind": "failed", "error": message, "tired": not own}
    return {"kind": "done"}


def _directory(path: Path, recipe: Recipe) -> RunDirectory:
    """Open the run's directory, or make it."""
    if not (path / "recipe.toml").exists():
        return RunDirectory.create(path, recipe)
    directory = RunDirectory.open(path, trust=True)  # the recipe must be the one that was ordered
    if directory.recipe not in (recipe, anchored(recipe)):
        raise ValueError(f"{path} holds a run of another recipe than the plan's: move it away, or give another --out")
    return directory


def _shared(recipe: Recipe) -> Data | None:
    """Return a built-in data set, loaded for all runs of this process at once; other data may change between runs."""
    if recipe.data not in BUILT_INS or recipe.channels is not None:
        return None
    return _built_in(recipe.data, datasets.directory())


@lru_cache(maxsize=1)
def _built_in(name: str, cache: Path) -> Data:
    return datasets.load(name)


def _wait_until_free(directory: RunDirectory) -> None:
    """Give a process that still saves the same run the time for it."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            with directory.locked():
                return
        except Busy:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


class _Orders:
    """Orders from standard input, read by a thread, so that their end is noticed in the middle of a training."""

    def __init__(self) -> None:
        self._queue: queue.Queue[bytes | None] = queue.Queue()
        self._open = 0  # orders that were read and not yet answered
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with open(0, "rb", buffering=0, closefd=False) as lines:  # sys.stdin's lock would trip an exit meanwhile
            for line in lines:
                self._open += 1
                self._queue.put(line)
        self._queue.put(None)
        if self._open:
            os.kill(os.getpid(), signal.SIGTERM)  # the training saves, and stops

    def next(self) -> dict[str, Any] | None:
        """Wait for the next order; ``None`` is the end."""
        line = self._queue.get()
        return None if line is None else json.loads(line)

    def answered(self) -> None:
        """The order was carried out."""
        self._open -= 1


def _serve(answers: TextIO) -> None:
    orders = _Orders()
    while (order := orders.next()) is not None:
        Path(order["run"]).mkdir(parents=True, exist_ok=True)
        with open(open_for_append(Path(order["run"]) / "log.txt"), "ab") as log:
            _redirect(log.fileno())
        last = 0.0

        def report(progress: Progress) -> None:
            nonlocal last
            if time.monotonic() - last > _REPORT_SECONDS:
                last = time.monotonic()
                _say(answers, {"kind": "progress", **asdict(progress)})

        answer = train_run(order["run"], order["recipe"], report)
        sys.stdout.flush()
        sys.stderr.flush()
        orders.answered()
        _say(answers, answer)
        if answer["kind"] == "stopped" or answer.get("tired"):
            break  # the next run begins in a fresh process: this one may be short of memory, or worse


def _say(answers: TextIO, message: Mapping[str, Any]) -> None:
    with suppress(BrokenPipeError):  # nobody listens any more: the end of the orders stops us
        print(to_json(dict(message)), file=answers, flush=True)


def _redirect(descriptor: int) -> None:
    """Send what is printed, by Python or by libraries below it, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (1, 2):
        os.dup2(descriptor, number)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a print must not be taken for an answer
    _serve(channel)
