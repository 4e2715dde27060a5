"""The paper's convergence figures: test accuracy as training goes on, by σ, lot size and learning rate."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dphero.accounting import claimed_by_paper
from dphero.experiments.comparison.plan import Planned
from dphero.experiments.comparison.sweep import Outcome
from dphero.experiments.comparison.table import shown_price
from dphero.experiments.pictures import GREY, room_above
from dphero.experiments.reproduction import drawing
from dphero.experiments.reproduction.report import PRICED, Report, prices, remark
from dphero.experiments.reproduction.settings import (
    DELTAS,
    PRIVATE,
    PUBLISHED,
    SIGMAS,
    UNSOUND,
    Setting,
    Size,
    Source,
    planned,
)


class Look(NamedTuple):
    """Where several runs of one kind stood at one moment: their mean accuracy in percent, and sample deviation."""

    step: int
    epoch: float
    accuracy: float
    deviation: float

    @classmethod
    def of(cls, step: int, epoch: float, accuracies: Sequence[float]) -> Look:
        """Return it from the accuracy of each run."""
        deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        return cls(step, epoch, statistics.fmean(accuracies), deviation)


_CHANCE = 15.0  # percent; ten classes: below this a network has learnt nothing, or lost it


@dataclass(frozen=True)
class Shape:
    """Which runs there are at one size.

    Attributes:
        source: Data and network.
        iterations: Steps of a run.
        evaluate_every: Steps between looks at the accuracy.
        sigmas: Values of σ.
        lots: Values of L.
        rates: Values of η.
        seeds: Runs of each kind.
    """

    source: Source
    iterations: int
    evaluate_every: int
    sigmas: tuple[float, ...] = SIGMAS
    lots: tuple[int, ...] = (200,)
    rates: tuple[float, ...] = (0.1,)
    seeds: int = 1


@dataclass(frozen=True)
class Curves:
    """A figure of curves.

    Attributes:
        name: The item's.
        title: Above the picture.
        shapes: Its runs, by size.
        by: What each row of panels has in common besides σ: the lot, the learning rate, or nothing.
        axis: What is on the horizontal axis.
        mark: The iteration at which the paper's figure ends, if ours goes on.
    """

    name: str
    title: str
    shapes: Mapping[Size, Shape]
    by: Literal["lot", "lr"] | None = None
    axis: Literal["iteration", "epoch"] = "iteration"
    mark: int | None = None

    def plan(self, size: Size) -> list[Planned]:
        """Return SGD and the three private methods at every setting."""
        shape, found = self.shapes[size], []
        for lot, rate, seed in itertools.product(shape.lots, shape.rates, range(shape.seeds)):
            for sigma in (None, *shape.sigmas):
                for method in ("sgd",) if sigma is None else PRIVATE:
                    found.append(
                        planned(
                            shape.source,
                            method,
                            Setting(sigma, lot, rate),
                            iterations=shape.iterations,
                            evaluate_every=shape.evaluate_every,
                            seed=seed,
                        )
                    )
        return found

    def present(self, found: Sequence[Outcome], size: Size, directory: Path) -> Report:
        """Draw the panels and return the table."""
        shape = self.shapes[size]
        curves = _mean_curves(found)
        points = [{**_about(outcome), **line} for outcome in found for line in outcome.metrics]
        rows = _rows(found, curves)
        self.draw(curves, rows, shape, size, directory)
        table = [{name: value for name, value in row.items() if name != "setting"} for row in rows]
        return Report(table, points, self._notes(shape, size))

    def _notes(self, shape: Shape, size: Size) -> list[str]:
        return [
            f"{size}: {self._words(shape)}.",
            "accuracy, best, distance and unrest are in percent of test images. Distance from SGD is a run's mean "
            "absolute difference from the SGD run of the same seed, unrest its mean absolute change between two "
            "looks; both are means over runs.",
            f"'{PUBLISHED}' is {UNSOUND}: its claimed ε is the paper's formula, its true ε that of the weakest "
            "direction of its noise.",
            "One run of each kind: differences of a few points are chance."
            if shape.seeds == 1
            else f"Means of {shape.seeds} seeds; bands and ± are their sample standard deviation.",
            PRICED,
        ]

    def _words(self, shape: Shape) -> str:
        source = shape.source
        lots = ", ".join(map(str, shape.lots))
        epochs = ", ".join(f"{round(source.records / lot):,}" for lot in shape.lots)
        rates = ", ".join(f"{rate:g}" for rate in shape.rates)
        return (
            f"{source.model} on {source.title}, {shape.iterations:,} iterations (an epoch has {epochs}), "
            f"L = {lots}, η = {rates}, C = 1, {_count(shape.seeds)}, "
            f"{source.test:,} test images"
        )

    def _cells(self, shape: Shape) -> dict[tuple[int, int], Setting]:
        """Return the setting of each panel by its row and column: σ from left to right, what else varies downwards."""
        lot, rate, sigmas = shape.lots[0], shape.rates[0], shape.sigmas
        several = {"lot": [(each, rate) for each in shape.lots], "lr": [(lot, each) for each in shape.rates]}
        pairs = several[self.by] if self.by else [(lot, rate)]
        columns = min(3, len(sigmas))  # six beside each other are too small to read
        rows = math.ceil(len(sigmas) / columns)
        return {
            (rows * i + j // columns, j % columns): Setting(sigma, *pair)
            for i, pair in enumerate(pairs)
            for j, sigma in enumerate(sigmas)
        }

    def draw(
        self,
        curves: Mapping[tuple[Setting, str], list[Look]],
        rows: Sequence[Mapping[str, Any]],
        shape: Shape,
        size: Size,
        directory: Path,
    ) -> None:
        """Draw a panel for each setting: every method's mean curve, and a band of one deviation."""
        cells = self._cells(shape)
        count, columns = (1 + max(place[axis] for place in cells) for axis in (0, 1))
        figure, axes = drawing.grid(count, columns, sharex=True, sharey=True)
        for place in itertools.product(range(count), range(columns)):
            axes[place[0]][place[1]].set_visible(place in cells)
        for (i, j), setting in cells.items():
            panel = axes[i][j]
            for method in ("sgd", *PRIVATE):
                curve = curves.get((replace(setting, noise_multiplier=None) if method == "sgd" else setting, method))
                if curve:
                    x = [look.epoch if self.axis == "epoch" else look.step for look in curve]
                    drawing.line(
                        panel, method, x, [look.accuracy for look in curve], [look.deviation for look in curve]
                    )
            more = {"lot": f", L = {setting.lot}", "lr": f", η = {setting.lr:g}", None: ""}[self.by]
            panel.set_title(f"σ = {setting.noise_multiplier:g}{more}", fontsize=10)
            panel.text(0.5, 0.97, _priced(rows, setting), **_corner(panel))
            if self.mark is not None and self.mark < shape.iterations:
                panel.axvline(self.mark, ymax=0.9, color=GREY, linewidth=1, label="where the paper's figure ends")
            if i == count - 1:
                panel.set_xlabel(self.axis)
            if j == 0:
                panel.set_ylabel("test accuracy (%)")
        room_above(
            axes[0][0], [look.accuracy + look.deviation for curve in curves.values() for look in curve]
        )  # of all: the axes are shared
        note = f"{size.upper()}: {self._words(shape)}. ε at δ = {DELTAS[0]:g}."
        drawing.finish(figure, directory / self.name, self.title, note)


def _count(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def _corner(panel: Any) -> dict[str, Any]:
    return {"transform": panel.transAxes, "ha": "center", "va": "top", "fontsize": 7, "color": "#555555"}


def _priced(rows: Sequence[Mapping[str, Any]], setting: Setting) -> str:
    """What the sound noise costs, and what the published recipe claims and truly costs."""
    found = {row["method"]: row for row in rows if row["setting"] == setting}
    true = f"true ε, δ {DELTAS[0]:.0e}"
    parts = []
    if sound := found.get("dp-hero") or found.get("dp-sgd"):
        parts.append(f"sound: ε {_short(sound.get(true))}")
    if unsound := found.get(PUBLISHED):
        assert setting.noise_multiplier is not None
        claim = claimed_by_paper([setting.noise_multiplier], DELTAS[0]).epsilon
        parts.append(f"as printed: claims {_short(claim)}, truly {_short(unsound.get(true))}")
    return " | ".join(parts)


def _short(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.0e}" if 1e4 < value < float("inf") else shown_price(value)


def _about(outcome: Outcome) -> dict[str, Any]:
    recipe = outcome.planned.recipe
    return {"method": recipe.method, "remark": remark(recipe.method), **outcome.planned.setting, "seed": recipe.seed}


def _setting(outcome: Outcome) -> Setting:
    recipe = outcome.planned.recipe
    return Setting(recipe.noise_multiplier, recipe.lot, recipe.lr)


def _mean_curves(found: Sequence[Outcome]) -> dict[tuple[Setting, str], list[Look]]:
    """Return the mean over seeds, and how far seeds lie apart, for each setting and method."""
    groups: dict[tuple[Setting, str], dict[int, list[tuple[float, float]]]] = {}
    for outcome in found:
        curve = groups.setdefault((_setting(outcome), outcome.planned.recipe.method), {})
        for line in outcome.metrics:
            curve.setdefault(line["step"], []).append((line["epoch"], 100 * line["accuracy"]))
    return {
        key: [Look.of(step, values[0][0], [each for _, each in values]) for step, values in sorted(curve.items())]
        for key, curve in groups.items()
    }


def _rows(found: Sequence[Outcome], curves: Mapping[tuple[Setting, str], list[Look]]) -> list[dict[str, Any]]:
    rows, memory = [], dict[Any, float]()
    for (setting, method), curve in curves.items():
        if not curve:
            continue
        runs = [o for o in found if _setting(o) == setting and o.planned.recipe.method == method and o.result]
        reference = replace(setting, noise_multiplier=None)
        plain = {o.planned.recipe.seed: _accuracies(o) for o in found if _setting(o) == reference}
        accuracies = [look.accuracy for look in curve]
        best = max(accuracies)
        rows.append(
            {
                "setting": setting,
                "σ": setting.noise_multiplier,
                "L": setting.lot,
                "η": setting.lr,
                "method": method,
                "remark": remark(method),
                "steps": curve[-1].step,
                "accuracy": accuracies[-1],
                "standard deviation": curve[-1].deviation if len(runs) > 1 else None,
                "seeds": len(runs),
                "best": best,
                "best at step": curve[accuracies.index(best)].step,
                "collapsed": _collapsed([_accuracies(run) for run in runs]),
                **_of_each_run("distance from SGD", [_distance(run, plain) for run in runs]),
                **_of_each_run("unrest", [_unrest(_accuracies(run)) for run in runs]),
                **({} if method == "sgd" or not runs else _worst([prices(run, memory) for run in runs])),
            }
        )
    return rows


def _accuracies(outcome: Outcome) -> list[float]:
    return [100 * line["accuracy"] for line in outcome.metrics]


def _distance(run: Outcome, plain: Mapping[int | None, Sequence[float]]) -> float | None:
    """How far a run lies from SGD's with the same seed, on the average over its looks."""
    pairs = zip(_accuracies(run), plain.get(run.planned.recipe.seed, ()), strict=False)
    return _mean([abs(mine - theirs) for mine, theirs in pairs])


def _unrest(accuracies: Sequence[float]) -> float | None:
    return _mean([abs(later - earlier) for earlier, later in itertools.pairwise(accuracies)])


def _collapsed(several: Sequence[Sequence[float]]) -> str:
    """How many runs had learnt something, and lost it."""
    count = sum(1 for accuracies in several if max(accuracies) > 2 * _CHANCE and accuracies[-1] < _CHANCE)
    return f"{count} of {len(several)}" if count else ""


def _of_each_run(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean over runs, and how far they lie apart: a mean curve is smoother than any run."""
    known = [value for value in values if value is not None]
    return {name: _mean(known), f"{name}: ±": statistics.stdev(known) if len(known) > 1 else None}


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _worst(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: max(each[name] for each in several) for name in several[0]}
