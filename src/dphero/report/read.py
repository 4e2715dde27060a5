"""Find runs, comparisons and federated runs, and read what their files tell; what is damaged is skipped, and named."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from dphero._files import DamagedFile, read_bytes
from dphero.accounting import Ledger
from dphero.experiments.comparison.plan import Planned, load_plan
from dphero.experiments.comparison.sweep import Outcome
from dphero.experiments.comparison.table import Row, tabulate
from dphero.experiments.reproduction.items import ITEMS
from dphero.experiments.runs.files import parse_json, read_json
from dphero.experiments.runs.rundir import RunDirectory
from dphero.methods import METHODS
from dphero.methods.recipe import Recipe
from dphero.report.drawn import Explained, Reproduced, read_explained, read_reproduced

_RESULT = (
    "accuracy", "epsilon", "delta", "steps", "is_bound", "accountant", "other_prices", "noise_multiplier", "seconds",
)  # fmt: skip
_NOT_COMPARED = ("method", "epsilon", "noise_multiplier", "seed", "device", "cuda_graphs", "secure", "options")
_Drawn = TypeVar("_Drawn", Explained, Reproduced)
_REPRODUCED = tuple(f"{name}.json" for name in ITEMS)


@dataclass(frozen=True)
class Problem:
    """Something that could not be read.

    Attributes:
        place: The directory or file.
        what: What is wrong with it.
    """

    place: str
    what: str


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

    def _repr_html_(self) -> str:
        """The run in a notebook."""
        from dphero.report.summary import run_card

        return run_card(self)


@dataclass(frozen=True, eq=False)
class Material:
    """All that a report is made of.

    Attributes:
        sources: What was asked for.
        runs: The runs that could be read.
        rows: One for all seeds of a setting.
        problems: What could not be read.
        explained: Heat maps.
        reproduced: The paper's table and figures, anew.
    """

    sources: tuple[Path, ...]
    runs: tuple[Run, ...]
    rows: tuple[Row, ...]
    problems: tuple[Problem, ...]
    explained: tuple[Explained, ...] = ()
    reproduced: tuple[Reproduced, ...] = ()

    def runs_of(self, row: Row) -> list[Run]:
        """The runs that a row sums up; those of an old table are gone."""
        names = set(row.runs)
        return [run for run in self.runs if run.name in names]


def read(paths: Iterable[str | PathLike[str]]) -> Material:
    """Read directories of runs, of comparisons and of federated runs, or folders of such.

    Raises:
        ValueError: If a path does not exist, or nothing of the kind is in any of them.
    """
    sources = tuple(Path(path) for path in paths)
    if not sources:
        raise ValueError("there is nothing to report: name the directory of a run, a comparison or a federated run")
    reader = _Reader()
    for source in sources:
        if not source.is_dir() and not (source.is_file() and source.name in _REPRODUCED):
            what = "is no directory" if source.exists() else "does not exist"
            raise ValueError(f"{source} {what}: name the directory of a run, a comparison or a federated run")
        reader.add(source)
    runs = _named_apart(_set_apart(reader.alone) + reader.compared)
    rows = _with_data([*tabulate([run.outcome for run in runs]), *reader.old_rows])
    problems = reader.problems + [Problem(*each) for explained in reader.explained for each in explained.problems]
    drawn = tuple(reader.explained), tuple(reader.reproduced)
    return Material(sources, tuple(runs), tuple(rows), tuple(problems), *drawn)


class _Reader:
    """Gathers runs and problems."""

    def __init__(self) -> None:
        self.alone: list[Run] = []
        self.compared: list[Run] = []
        self.old_rows: list[Row] = []
        self.problems: list[Problem] = []
        self.explained: list[Explained] = []
        self.reproduced: list[Reproduced] = []

    def add(self, source: Path) -> None:
        for path in (source / "explain.json", source / "explain" / "explain.json"):
            if os.path.lexists(path):
                self._drawn(path, read_explained, self.explained)
        items = [source] if source.is_file() else [source / name for name in _REPRODUCED]
        items = [path for path in items if os.path.lexists(path)]
        for path in items:
            self._drawn(path, read_reproduced, self.reproduced)
        if items or os.path.lexists(source / "explain.json"):
            return
        if os.path.lexists(source / "plan.json"):
            self._comparison(source)
        elif _looks_like_run(source):
            self._run(source, self.alone)
        else:
            found = sorted(each for each in source.iterdir() if each.is_dir() and not each.name.startswith("."))
            inside = [each for each in found if _looks_like_run(each) or os.path.lexists(each / "plan.json")]
            if not inside:
                what = "holds no run, no comparison and no federated run: there is no recipe.toml or plan.json in it"
                self.problems.append(Problem(str(source), what))
            for each in inside:
                self.add(each)

    def _comparison(self, source: Path) -> None:
        try:
            plan = load_plan(source, trust=True)  # nothing is imported: its names are only shown
        except (ValueError, OSError) as error:
            self.problems.append(Problem(str(source / "plan.json"), _short(error, source)))
            for each in sorted((source / "runs").glob("*/recipe.toml")):
                self._run(each.parent, self.alone)
            return
        table = self._optional(source / "table.json") or {}
        if not (source / "runs").is_dir() and table:
            self._old_rows(table, source / "table.json")
            return
        errors = {
            name: str(error)
            for row in table.get("rows", [])
            if isinstance(row, dict) and isinstance(row.get("errors"), dict)
            for name, error in row["errors"].items()
        }
        for planned in plan:
            about: dict[str, Any] = {"target": planned.target, "setting": dict(planned.setting)}
            about["error"] = errors.get(planned.name)
            path = source / "runs" / planned.name
            if _looks_like_run(path):
                self._run(path, self.compared, **about)
            else:  # not begun
                self.compared.append(Run(planned.name, path, planned.recipe, **about))

    def _old_rows(self, table: Mapping[str, Any], path: Path) -> None:
        """Take the rows of a table whose runs are gone."""
        names = {each.name for each in fields(Row)}
        try:
            for values in table["rows"]:
                kept = {name: value for name, value in values.items() if name in names}
                kept |= {"runs": tuple(values["runs"])}
                self.old_rows.append(Row(**kept))
        except (KeyError, TypeError, AttributeError) as error:
            self.problems.append(Problem(str(path), f"its rows cannot be read ({error!r})"))

    def _run(self, path: Path, to: list[Run], **about: Any) -> None:
        try:
            run = _read_run(path)
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
            self.problems.append(Problem(str(path), _short(error, path)))
            return
        audit = self._optional(path / "audit" / "audit.json")
        partition = None
        if run.federation is not None:
            try:
                partition = _partition(path / "partition.csv")
            except (ValueError, OSError) as error:
                self.problems.append(Problem(str(path / "partition.csv"), _short(error, path)))
        to.append(replace(run, audit=audit, partition=partition, **about))

    def _drawn(self, path: Path, read_drawn: Callable[[Path], _Drawn], to: list[_Drawn]) -> None:
        try:
            to.append(read_drawn(path))
        except (ValueError, OSError) as error:
            self.problems.append(Problem(str(path), _short(error, path.parent)))

    def _optional(self, path: Path) -> dict[str, Any] | None:
        """Read a file of JSON that a run can do without."""
        if not os.path.lexists(path):
            return None
        try:
            return read_json(path)
        except (ValueError, OSError) as error:
            self.problems.append(Problem(str(path), _short(error, path.parent)))
            return None


def _looks_like_run(path: Path) -> bool:
    return os.path.lexists(path / "recipe.toml")


def _read_run(path: Path) -> Run:
    """Read the files of a run; raise if what makes a run is damaged."""
    directory = RunDirectory.open(path, trust=True)  # nothing is imported: its names are only shown
    if directory.recipe.method not in METHODS:
        raise ValueError(f"its method {directory.recipe.method!r} is not known to this dphero")
    result = directory.result
    if result is not None and (missing := [name for name in _RESULT if name not in result]):
        raise DamagedFile(path / "result.json", f"it lacks {', '.join(missing)}")
    texts = {name: _text(directory, name) for name in ("statement.txt", "environment.json", "federation.json")}
    environment = parse_json(texts["environment.json"], path / "environment.json") if texts["environment.json"] else {}
    federation = parse_json(texts["federation.json"], path / "federation.json") if texts["federation.json"] else None
    ledger = directory.ledger if os.path.lexists(path / "ledger.json") else None
    metrics = directory.metrics
    if any(not isinstance(line.get("accuracy"), int | float) for line in metrics):
        raise DamagedFile(path / "metrics.jsonl", "an evaluation has no accuracy")
    statement = texts["statement.txt"].decode(errors="replace")
    return Run(path.name, path, directory.recipe, result, metrics, ledger, statement, environment, federation)


def _text(directory: RunDirectory, name: str) -> bytes:
    return directory.read(name) if os.path.lexists(directory.path / name) else b""


def _partition(path: Path) -> Partition | None:
    if not os.path.lexists(path):
        return None
    lines = list(csv.reader(io.StringIO(read_bytes(path, follow=False).decode())))
    try:
        classes = tuple(lines[0][1:])
        clients = tuple(line[0] for line in lines[1:])
        counts = tuple(tuple(int(value) for value in line[1:]) for line in lines[1:])
    except (IndexError, ValueError) as error:
        raise DamagedFile(path, error) from error
    if any(len(row) != len(classes) for row in counts):
        raise DamagedFile(path, "its lines are not all of one length")
    return Partition(clients, classes, counts)


def _set_apart(runs: Sequence[Run]) -> list[Run]:
    """Give runs that no comparison knows the settings in which those of one method differ."""
    flat = [{**run.recipe.as_dict(), "federated": _federated(run)} for run in runs]
    differing = []
    for name in sorted({name for values in flat for name in values} - set(_NOT_COMPARED)):
        by_method: dict[str, set[str]] = {}
        for run, values in zip(runs, flat, strict=True):
            by_method.setdefault(run.recipe.method, set()).add(repr(values.get(name)))
        if any(len(found) > 1 for found in by_method.values()):
            differing.append(name)
    return [
        replace(run, setting={name: values[name] for name in differing if values.get(name) is not None})
        for run, values in zip(runs, flat, strict=True)
    ]


def _with_data(rows: Sequence[Row]) -> list[Row]:
    """Let rows name their data set where there are several: accuracies on different ones are not to be compared."""
    if len({row.data for row in rows}) < 2:
        return list(rows)
    return [replace(row, setting={"data": Path(row.data).name or row.data, **row.setting}) for row in rows]


def _federated(run: Run) -> str | None:
    return None if run.federation is None else f"{run.federation.get('clients')} clients"


def _named_apart(runs: Sequence[Run]) -> list[Run]:
    """Call runs of one name by their paths, and those that are there twice by a number too."""
    names = [run.name for run in runs]
    taken: dict[str, int] = {}
    found = []
    for run in runs:
        name = run.name if names.count(run.name) == 1 else str(run.path)
        taken[name] = taken.get(name, 0) + 1
        found.append(replace(run, name=name if taken[name] == 1 else f"{name} ({taken[name]})"))
    return found


def _short(error: BaseException, path: Path) -> str:
    """What is wrong, without repeating where."""
    text = str(error) if isinstance(error, ValueError | OSError) else repr(error)
    return text.replace(f"{path}/", "")
