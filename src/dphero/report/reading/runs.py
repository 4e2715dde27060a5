"""One run, as its files tell it; raises where they are damaged."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dphero._files import DamagedFile, read_bytes
from dphero.accounting import Ledger
from dphero.accounting.statement import UNSOUND_AS_PUBLISHED
from dphero.experiments.comparison.plan import Planned
from dphero.experiments.comparison.sweep import Outcome
from dphero.experiments.runs.files import parse_json
from dphero.experiments.runs.rundir import RunDirectory
from dphero.methods import METHODS
from dphero.methods.recipe import Recipe
from dphero.report.reading import values


@dataclass(frozen=True)
class Partition:
    """Who holds what in a simulated federation: examples of each class, a row for each client."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Run:
    """What the files of one run tell.

    Attributes:
        name: As the page calls it; no other run has the same.
        path: Its directory.
        recipe: What it does.
        result: The outcome; ``None`` while it is not finished.
        metrics: The evaluations so far.
        ledger: What was released so far; ``None`` if there is none yet.
        statement: What was promised, as text; empty while the run is not finished.
        environment: Versions and machine.
        federation: The federation's settings, of a federated run.
        partition: Who holds what, of a simulated one.
        audit: What an audit found, if there was one.
        target: The ε at which a comparison sets it, where its recipe cannot ask for one.
        setting: What was varied, beyond method, ε and seed.
        error: Why it failed, if a comparison says so.
    """

    name: str
    path: Path
    recipe: Recipe
    result: Mapping[str, Any] | None = None
    metrics: Sequence[Mapping[str, Any]] = ()
    ledger: Ledger | None = None
    statement: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    federation: Mapping[str, Any] | None = None
    partition: Partition | None = None
    audit: Mapping[str, Any] | None = None
    target: float | None = None
    setting: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def outcome(self) -> Outcome:
        """The run as tables of comparisons take it."""
        planned = Planned(self.name, self.recipe, self.target, self.setting)
        return Outcome(planned, self.path, self.result, self.error)

    @property
    def unsound(self) -> bool:
        """Whether its method, its statement, or the data that its clients shared are unsound as published."""
        if not METHODS[self.recipe.method].card.sound or (self.result or {}).get("sound") is False:
            return True
        shared = str((self.federation or {}).get("shared"))
        return shared.endswith("-published") or UNSOUND_AS_PUBLISHED in self.statement.partition("\n")[0].lower()

    def _repr_html_(self) -> str:
        """The run in a notebook."""
        from dphero.report.summary import run_card

        return run_card(self)


def looks_like_run(path: Path) -> bool:
    """Whether a directory is meant to be a run's."""
    return os.path.lexists(path / "recipe.toml")


def read_run(path: Path) -> Run:
    """Read the files of a run.

    Raises:
        ValueError: If what makes a run is damaged.
        OSError: If it cannot be read.
    """
    directory = RunDirectory.open(path, trust=True)  # nothing is imported: its names are only shown
    if directory.recipe.method not in METHODS:
        raise ValueError(f"its method {directory.recipe.method!r} is not known to this dphero")
    result, metrics = directory.result, directory.metrics
    environment = _object(directory, "environment.json") or {}
    federation = _object(directory, "federation.json")
    if result is not None:
        values.check_result(result, path / "result.json")
    values.check_metrics(metrics, path / "metrics.jsonl")
    values.check_environment(environment, path / "environment.json")
    if federation is not None:
        values.check_federation(federation, result, path / "federation.json")
    ledger = directory.ledger if os.path.lexists(path / "ledger.json") else None
    statement = _contents(directory, "statement.txt").decode(errors="replace")
    return Run(path.name, path, directory.recipe, result, metrics, ledger, statement, environment, federation)


def _object(directory: RunDirectory, name: str) -> dict[str, Any] | None:
    contents = _contents(directory, name)
    return parse_json(contents, directory.path / name) if contents else None


def _contents(directory: RunDirectory, name: str) -> bytes:
    return directory.read(name) if os.path.lexists(directory.path / name) else b""


def read_partition(path: Path) -> Partition | None:
    """Read who holds what in a simulated federation, if the file is there.

    Raises:
        ValueError: If it is damaged.
        OSError: If it cannot be read.
    """
    if not os.path.lexists(path):
        return None
    try:
        lines = list(csv.reader(io.StringIO(read_bytes(path, follow=False).decode())))
        classes = tuple(lines[0][1:])
        clients = tuple(line[0] for line in lines[1:])
        counts = tuple(tuple(int(value) for value in line[1:]) for line in lines[1:])
    except (IndexError, UnicodeError, ValueError, csv.Error) as error:
        raise DamagedFile(path, error) from error
    if any(len(row) != len(classes) for row in counts):
        raise DamagedFile(path, "its lines are not all of one length")
    return Partition(clients, classes, counts)
