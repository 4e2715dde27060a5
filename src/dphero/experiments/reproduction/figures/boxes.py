"""The paper's box plots: test accuracy at several ε, over several trainings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dphero.experiments.comparison.plan import Planned
from dphero.experiments.comparison.sweep import Outcome
from dphero.experiments.pictures import METHOD_COLOURS
from dphero.experiments.reproduction import drawing
from dphero.experiments.reproduction.report import PRICED, Report, prices, remark, shown
from dphero.experiments.reproduction.settings import (
    DELTAS,
    METHOD_TITLES,
    MNIST,
    PRIVATE,
    PUBLISHED,
    QUICK_SEEDS,
    SEEDS,
    UNSOUND,
    Setting,
    Size,
    Source,
    noise_for,
    planned,
)


@dataclass(frozen=True)
class _Shape:
    source: Source
    epsilons: tuple[float, ...]
    seeds: int
    lot: int
    steps: int
    lr: float


# L and η are not the paper's 10 to 400 and 0.1: large lots and small clip norms are what works at a given ε.
_SHAPES: Mapping[Size, _Shape] = {
    "tiny": _Shape(MNIST["tiny"], (3.0,), 2, 512, 4, 1.0),
    "quick": _Shape(MNIST["quick"], (1.0, 3.0, 8.0), QUICK_SEEDS, 600, 60, 2.0),
    "full": _Shape(
        MNIST["full"],
        (1.0, 1.2, 2.0, 2.32, 2.5, 3.0, 3.2, 4.0, 5.07, 6.78),
        seeds=SEEDS,
        lot=2000,
        steps=900,
        lr=2.0,
    ),
}


def plan(size: Size) -> list[Planned]:
    """Return all methods at every ε with every seed, all with the noise that truly costs ε for DP-SGD."""
    shape, found = _SHAPES[size], []
    rate = shape.lot / shape.source.records
    for epsilon in shape.epsilons:
        setting = Setting(noise_for(epsilon, DELTAS[0], rate, shape.steps), shape.lot, shape.lr)
        for method in PRIVATE:
            for seed in range(shape.seeds):
                found.append(
                    planned(
                        shape.source,
                        method,
                        setting,
                        iterations=shape.steps,
                        evaluate_every=shape.steps,
                        seed=seed,
                        target=epsilon,
                        clip=0.1,
                        momentum=0.9,
                    )
                )
    return found


def present(found: Sequence[Outcome], size: Size, directory: Path) -> Report:
    """Draw the boxes and return the table."""
    shape, points, rows, memory = _SHAPES[size], [], [], dict[Any, float]()
    groups: dict[tuple[float, str], list[Outcome]] = {}
    for outcome in found:
        if outcome.result is not None:
            assert outcome.planned.target is not None
            groups.setdefault((outcome.planned.target, outcome.planned.recipe.method), []).append(outcome)
    for (epsilon, method), runs in groups.items():
        accuracies = [100 * run.result["accuracy"] for run in runs if run.result]
        priced = [prices(run, memory) for run in runs]
        points += [
            {"ε asked": epsilon, "method": method, "remark": remark(method), "seed": run.planned.recipe.seed}
            | {"accuracy": accuracy, **each}
            for run, accuracy, each in zip(runs, accuracies, priced, strict=True)
        ]
        rows.append(
            {
                "ε asked": epsilon,
                "method": method,
                "remark": remark(method),
                "accuracy": statistics.fmean(accuracies),
                "standard deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                "seeds": len(accuracies),
                "σ": runs[0].planned.recipe.noise_multiplier,
                **{name: max(each[name] for each in priced) for name in priced[0]},
            }
        )
    source = shape.source
    words = (
        f"{source.model} on {source.title}, L = {shape.lot}, {shape.steps} iterations, η = {shape.lr:g}, momentum 0.9, "
        f"C = 0.1, {shape.seeds} seeds, {source.test:,} test images"
    )
    accuracies_by = {key: [100 * run.result["accuracy"] for run in runs if run.result] for key, runs in groups.items()}
    draw(accuracies_by, rows, size, words, directory)
    notes = [
        f"{size}: {words}.",
        "All methods have the σ with which Poisson-sampled DP-SGD truly costs the ε asked for.",
        f"'{PUBLISHED}' is {UNSOUND}: with that σ its true ε is another, far larger one.",
        PRICED,
    ]
    return Report(rows, points, notes)


def draw(
    groups: Mapping[tuple[float, str], Sequence[float]],
    rows: Sequence[Mapping[str, Any]],
    size: Size,
    words: str,
    directory: Path,
) -> None:
    """Draw, for each ε, a box for each method, with its runs as points."""
    epsilons = list(dict.fromkeys(epsilon for epsilon, _ in groups))
    figure, axes = drawing.grid(1, 1, width=max(6.5, 1.5 * len(epsilons) + 2), height=4.0)
    panel = axes[0][0]
    for place, epsilon in enumerate(epsilons):
        top = max(value for (other, _), values in groups.items() if other == epsilon for value in values)
        for number, method in enumerate(PRIVATE):
            values = groups.get((epsilon, method), ())
            if not values:
                continue
            x, colour = place + 0.26 * (number - 1), METHOD_COLOURS[method]
            box = panel.boxplot([values], positions=[x], widths=0.2, patch_artist=True, manage_ticks=False)
            for part in ("boxes", "whiskers", "caps", "medians"):
                for line in box[part]:
                    line.set_color(colour)
            box["boxes"][0].set_facecolor(f"{colour}33")
            panel.scatter([x] * len(values), values, color=colour, s=14, zorder=3, label=METHOD_TITLES[method])
            if method == PUBLISHED:
                row = next(row for row in rows if row["ε asked"] == epsilon and row["method"] == method)
                claim, true = (f"{kind} ε, δ {DELTAS[0]:.0e}" for kind in ("claimed", "true"))
                text = f"claims {shown(claim, row.get(claim))}\ntruly {shown(true, row[true])}"
                panel.annotate(  # above all boxes of this ε: it is wider than one
                    text, (place, top), (0, 6), textcoords="offset points", ha="center", fontsize=7, color=colour
                )
    panel.margins(y=0.2)
    panel.set_xticks(range(len(epsilons)), [f"{epsilon:g}" for epsilon in epsilons])
    panel.set_xlabel(f"ε that the noise truly costs DP-SGD and the sound DP-Hero, at δ = {DELTAS[0]:g}")
    panel.set_ylabel("test accuracy (%)")
    title = "Test accuracy at several ε (the paper's Figure 4)"
    drawing.finish(figure, directory / "epsilon-boxes", title, f"{size.upper()}: {words}.", columns=1)
