"""Find runs, comparisons and federated runs, and read what their files tell; what is damaged is skipped, and named."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from dphero.accounting.statement import UNSOUND_AS_PUBLISHED
from dphero.experiments.comparison.plan import load_plan
from dphero.experiments.comparison.table import Row, tabulate
from dphero.experiments.reproduction.items import ITEMS
from dphero.experiments.runs.files import read_json
from dphero.report.reading import values
from dphero.report.reading.drawn import Explained, Reproduced, read_explained, read_reproduced
from dphero.report.reading.runs import Run, looks_like_run, read_partition, read_run

_NOT_COMPARED = ("method", "epsilon", "noise_multiplier", "seed", "device", "cuda_graphs", "secure")
_DAMAGE = (ValueError, OSError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
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
    rows = _with_data([*_marked(tabulate([run.outcome for run in runs]), runs), *reader.old_rows])
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
        if items:
            return
        if os.path.lexists(source / "plan.json"):
            self._comparison(source)
        elif looks_like_run(source):
            self._run(source, self.alone)
        else:
            found = sorted(each for each in source.iterdir() if each.is_dir() and not each.name.startswith("."))
            inside = [each for each in found if looks_like_run(each) or os.path.lexists(each / "plan.json")]
            if not inside and not os.path.lexists(source / "explain.json"):
                what = "holds no run, no comparison and no federated run: there is no recipe.toml or plan.json in it"
                self.problems.append(Problem(str(source), what))
            for each in inside:
                self.add(each)

    def _comparison(self, source: Path) -> None:
        try:
            plan = load_plan(source, trust=True)  # nothing is imported: its names are only shown
            values.check_plan(plan, source / "plan.json")
        except _DAMAGE as error:
            self.problems.append(Problem(str(source / "plan.json"), _short(error, source)))
            for each in sorted((source / "runs").glob("*/recipe.toml")):
                self._run(each.parent, self.alone)
            return
        table = self._optional(source / "table.json", values.check_table) or {}
        if not (source / "runs").is_dir() and table:
            self._old_rows(table, source / "table.json")
            return
        errors = {name: str(error) for row in table.get("rows", []) for name, error in row.get("errors", {}).items()}
        for planned in plan:
            about: dict[str, Any] = {"target": planned.target, "setting": dict(planned.setting)}
            about["error"] = errors.get(planned.name)
            path = source / "runs" / planned.name
            if looks_like_run(path):
                self._run(path, self.compared, **about)
            else:  # not begun
                self.compared.append(Run(planned.name, path, planned.recipe, **about))

    def _old_rows(self, table: Mapping[str, Any], path: Path) -> None:
        """Take the rows of a table whose runs are gone."""
        names = {each.name for each in fields(Row)}
        try:
            for given in table["rows"]:
                kept = {name: value for name, value in given.items() if name in names} | {"runs": tuple(given["runs"])}
                if kept["epsilon"] is None and kept["seeds"]:
                    kept["epsilon"] = math.inf  # as JSON has it
                self.old_rows.append(Row(**kept))
        except _DAMAGE as error:
            self.problems.append(Problem(str(path), f"its rows cannot be read ({error!r})"))

    def _run(self, path: Path, to: list[Run], **about: Any) -> None:
        try:
            run = read_run(path)
        except _DAMAGE as error:
            self.problems.append(Problem(str(path), _short(error, path)))
            return
        audit = self._optional(path / "audit" / "audit.json", values.check_audit)
        partition = None
        if run.federation is not None:
            try:
                partition = read_partition(path / "partition.csv")
            except _DAMAGE as error:
                self.problems.append(Problem(str(path / "partition.csv"), _short(error, path)))
        to.append(replace(run, audit=audit, partition=partition, **about))

    def _drawn(self, path: Path, read_drawn: Callable[[Path], _Drawn], to: list[_Drawn]) -> None:
        try:
            to.append(read_drawn(path))
        except _DAMAGE as error:
            self.problems.append(Problem(str(path), _short(error, path.parent)))

    def _optional(self, path: Path, check: Callable[[Mapping[str, Any], Path], None]) -> dict[str, Any] | None:
        """Read a file of JSON that a run can do without."""
        if not os.path.lexists(path):
            return None
        try:
            found = read_json(path)
            check(found, path)
        except _DAMAGE as error:
            self.problems.append(Problem(str(path), _short(error, path.parent)))
            return None
        return found


def _marked(rows: Sequence[Row], runs: Sequence[Run]) -> list[Row]:
    """Mark rows of runs that are unsound as published though their method is not: by what else was released."""
    unsound = {run.name for run in runs if run.unsound}
    mark: dict[str, Any] = {"sound": False, "remark": UNSOUND_AS_PUBLISHED.upper()}
    return [replace(row, **mark) if row.sound and unsound & set(row.runs) else row for row in rows]


def _set_apart(runs: Sequence[Run]) -> list[Run]:
    """Give runs that no comparison knows the settings in which those of one method differ."""
    flat = [_settings(run) for run in runs]
    differing = []
    for name in sorted({name for each in flat for name in each} - set(_NOT_COMPARED)):
        by_method: dict[str, set[str]] = {}
        for run, each in zip(runs, flat, strict=True):
            by_method.setdefault(run.recipe.method, set()).add(repr(each.get(name)))
        if any(len(found) > 1 for found in by_method.values()):
            differing.append(name)
    return [
        replace(run, setting={name: each[name] for name in differing if each.get(name) is not None})
        for run, each in zip(runs, flat, strict=True)
    ]


def _with_data(rows: Sequence[Row]) -> list[Row]:
    """Let rows name their data set where there are several: accuracies on different ones are not to be compared."""
    if len({row.data for row in rows}) < 2:
        return list(rows)
    return [replace(row, setting={"data": Path(row.data).name or row.data, **row.setting}) for row in rows]


def _settings(run: Run) -> dict[str, Any]:
    """Return all settings of a run by name, those of its method and of its federation among them."""
    found = run.recipe.as_dict()
    options = found.pop("options", {})
    if run.federation is not None:
        found["federated"] = f"{run.federation['clients']} clients"
        found["shared"] = run.federation.get("shared")
    return {**found, **{f"options.{name}": value for name, value in options.items()}}


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
