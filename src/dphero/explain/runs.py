"""The runs that are explained: their networks at each kept epoch, and who is compared with whom.

Runs that differ in nothing but their seed are one *group*; how much its members differ is the spread of seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from dphero import models
from dphero.experiments.comparison.plan import load_plan
from dphero.experiments.runs.prediction import Predictor
from dphero.experiments.runs.rundir import RunDirectory
from dphero.experiments.runs.snapshots import Snapshot, kept_files, read_snapshot, step_of
from dphero.methods import METHODS, make

LAST = "last"
"""Stands for the end of a training, whichever epoch that is."""

_NO_DIFFERENCE = ("seed", "data", "device", "cuda_graphs", "keep_epochs", "evaluate_every", "physical_batch", "secure")


@dataclass(eq=False)
class ExplainedRun:
    """A finished run.

    Attributes:
        path: Its directory.
        name: What reports call it, unique among the runs explained together.
        group: What it shares with runs that differ in their seed alone; set by :func:`open_runs`.
        predictor: Its model with the final weights.
        snapshots: Name of the file by epoch.
    """

    path: Path
    name: str
    directory: RunDirectory
    predictor: Predictor
    result: dict[str, Any]
    snapshots: dict[float, str]
    group: str = ""
    _accuracy: dict[int, float] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The method's name."""
        return self.directory.recipe.method

    @property
    def sound(self) -> bool:
        """Whether its price is a proven bound."""
        return METHODS[self.method].card.sound

    @property
    def is_private(self) -> bool:
        """Whether it protects anything at all."""
        return METHODS[self.method].card.protects != "nothing"

    @property
    def steps(self) -> int:
        """Steps taken in all."""
        return int(self.result["steps"])

    @property
    def epochs(self) -> list[float]:
        """The kept epochs, earliest first."""
        return sorted(self.snapshots)

    def epoch_of(self, step: int) -> float:
        """Return how many passes over the data so many steps are."""
        return _epoch(step, self.directory.recipe.epochs, self.steps)

    def network(self, epoch: float | str = LAST) -> nn.Module:
        """Return the network of an epoch, in evaluation mode; always the same object, with other weights."""
        model = self.predictor.model
        if epoch == LAST:
            self.directory.load_model(model)
        else:
            self._load(model, self.snapshot(epoch))
        return model.eval()

    def snapshot(self, epoch: float | str) -> Snapshot:
        """Return what was kept of an epoch.

        Raises:
            ValueError: If it is damaged.
        """
        name = self.snapshots[float(epoch)]
        return read_snapshot(self.path, name, self.directory.read(name))

    def random_network(self, seed: int) -> nn.Module:
        """Return the same network with random weights, which no data has shaped."""
        recipe, predictor = self.directory.recipe, self.predictor
        model = models.build(recipe.model, predictor.shape, len(predictor.classes), seed=seed)
        return make(recipe.method, recipe.options).network(model).eval()

    def accuracy(self, epoch: float | str = LAST) -> float | None:
        """Return the test accuracy that the run noted at that epoch, if it did."""
        if epoch == LAST:
            return float(self.result["accuracy"])
        if not self._accuracy:
            self._accuracy = {line["step"]: line["accuracy"] for line in self.directory.metrics}
        return self._accuracy.get(step_of(self.snapshots[float(epoch)]))

    def _load(self, model: nn.Module, snapshot: Snapshot) -> None:
        try:
            model.load_state_dict(dict(snapshot.weights))
        except RuntimeError as error:
            name = self.snapshots[self.epoch_of(snapshot.step)]
            raise ValueError(
                f"the weights in {self.path / name} are not those of the run's network: {str(error).splitlines()[0]}"
            ) from error


def open_runs(paths: Sequence[str | PathLike[str]], *, trust: bool = False) -> list[ExplainedRun]:
    """Open runs, or all finished runs of comparisons, and group them.

    Args:
        paths: Directories of runs or of comparisons.
        trust: Whether code that their recipes name may be imported and run.

    Raises:
        ValueError: If one is no run, is not finished or damaged, or they do not take the same images.
    """
    directories = [run for path in paths for run in _runs_in(Path(path), trust)]
    if not directories:
        raise ValueError("which runs? Give the directory of at least one finished run")
    names = _names(directories)
    found = [_open(path, name, trust) for path, name in zip(directories, names, strict=True)]
    first = found[0].predictor
    for run in found[1:]:
        if run.predictor.shape != first.shape or run.predictor.classes != first.classes:
            raise ValueError(
                f"{found[0].path} and {run.path} do not take the same images (shapes {first.shape} and "
                f"{run.predictor.shape}, or other classes): explain them apart"
            )
    _group(found)
    return sorted(found, key=lambda run: (run.is_private, not run.sound))  # without privacy first, unsound last


def _runs_in(path: Path, trust: bool) -> list[Path]:
    """Return the run, or the runs of a comparison that are finished."""
    if not (path / "plan.json").exists():
        return [path]
    runs = [path / "runs" / planned.name for planned in load_plan(path, trust=trust)]
    finished = [run for run in runs if (run / "result.json").exists()]
    if not finished:
        raise ValueError(f"{path} holds no finished run: go on with dphero compare --resume {path}")
    return finished


def _names(paths: Sequence[Path]) -> list[str]:
    """Name runs by their directories, with as many parts as it takes to tell them apart."""
    resolved = [path.resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        twice = next(path for path in paths if resolved.count(path.resolve()) > 1)
        raise ValueError(f"{twice} is given twice: a run agrees with itself, name each once")
    for parts in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-parts:]) for path in resolved]
        if len(set(names)) == len(names):
            break
    return names


def _open(path: Path, name: str, trust: bool) -> ExplainedRun:
    directory = RunDirectory.open(path, trust=trust)
    predictor = Predictor(path, trust=trust)
    result = directory.result
    if result is None:
        raise ValueError(f"{path} is not finished: dphero train --resume {path}")
    epochs, steps = directory.recipe.epochs, int(result["steps"])
    snapshots = {_epoch(step_of(each), epochs, steps): each for each in kept_files(path)}
    return ExplainedRun(path, name, directory, predictor, result, snapshots)


def _epoch(step: int, epochs: float, steps: int) -> float:
    """The epoch of a step, from how many an epoch takes, which is a whole number."""
    return round(step / max(1, round(steps / epochs)), 3)


def _group(runs: Sequence[ExplainedRun]) -> None:
    """Name each run's group: by its method, and by what sets it apart from other groups of that method."""
    settings = [_deciding(run) for run in runs]
    for run, mine in zip(runs, settings, strict=True):
        alike = [other for other in settings if other["method"] == mine["method"]]
        varied = sorted({name for other in alike for name in {*mine, *other} if mine.get(name) != other.get(name)})
        shown = ", ".join(f"{name} {mine.get(name, '–')}" for name in varied)
        unsound = "" if run.sound else " (UNSOUND)"
        run.group = f"{run.method}{f' [{shown}]' if shown else ''}{unsound}"


def _deciding(run: ExplainedRun) -> dict[str, Any]:
    values = {name: value for name, value in run.directory.recipe.as_dict().items() if name not in _NO_DIFFERENCE}
    options = values.pop("options", {})
    return {**values, **options}
