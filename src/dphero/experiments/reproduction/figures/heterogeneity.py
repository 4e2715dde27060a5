"""How uneven the noise may be: the exponent and the scope of DP-Hero's rule, at equal honest ε."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dphero.experiments.comparison.plan import Planned
from dphero.experiments.comparison.sweep import Outcome
from dphero.experiments.pictures import FURTHER, GREY, METHOD_COLOURS
from dphero.experiments.reproduction import drawing
from dphero.experiments.reproduction.report import PRICED, Report, prices
from dphero.experiments.reproduction.settings import (
    DELTAS,
    MNIST,
    QUICK_SEEDS,
    SEEDS,
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
    exponents: tuple[float, ...]
    seeds: int
    lot: int
    steps: int
    lr: float


SHAPES: Mapping[Size, _Shape] = {
    "tiny": _Shape(MNIST["tiny"], (3.0,), (0.25,), 2, 512, 4, 1.0),
    "quick": _Shape(MNIST["quick"], (3.0,), (-1.0, 0.25, 1.0), QUICK_SEEDS, 600, 60, 2.0),
    "full": _Shape(MNIST["full"], (3.0,), (-1.0, 0.25, 1.0), SEEDS, 2000, 900, 2.0),
}
_SCOPES = {"layer": METHOD_COLOURS["dp-hero"], "model": FURTHER[0]}
_ISOTROPIC = "isotropic"


def plan(size: Size) -> list[Planned]:
    """Return isotropic noise, and every exponent in either scope, at every ε with every seed: all of one price."""
    shape, found = SHAPES[size], []
    for epsilon in shape.epsilons:
        noise = noise_for(epsilon, DELTAS[0], shape.lot / shape.source.records, shape.steps)
        for scope, exponent in ((_ISOTROPIC, 0.0), *((s, p) for s in _SCOPES for p in shape.exponents)):
            for seed in range(shape.seeds):
                found.append(_planned(shape, epsilon, noise, scope, exponent, seed))
    return found


def _planned(shape: _Shape, epsilon: float, noise: float, scope: str, exponent: float, seed: int) -> Planned:
    more = {} if scope == _ISOTROPIC else {"options": {"exponent": exponent, "scope": scope}}
    made = planned(
        shape.source,
        "dp-sgd" if scope == _ISOTROPIC else "dp-hero",
        Setting(noise, shape.lot, shape.lr),
        iterations=shape.steps,
        evaluate_every=shape.steps,
        seed=seed,
        target=epsilon,
        clip=0.1,
        momentum=0.9,
        **more,
    )
    name = made.name if scope == _ISOTROPIC else f"{made.name}_{scope}_p{exponent:g}"
    return Planned(name, made.recipe, epsilon, {"scope": scope, "exponent": exponent})


def present(found: Sequence[Outcome], size: Size, directory: Path) -> Report:
    """Draw accuracy against the exponent and return the table."""
    shape, rows, memory = SHAPES[size], [], dict[Any, float]()
    groups: dict[tuple[float, str, float], list[Outcome]] = {}
    for outcome in found:
        if outcome.result is not None:
            assert outcome.planned.target is not None
            setting = outcome.planned.setting
            groups.setdefault((outcome.planned.target, setting["scope"], setting["exponent"]), []).append(outcome)
    for (epsilon, scope, exponent), runs in groups.items():
        accuracies = [100 * run.result["accuracy"] for run in runs if run.result]
        rows.append(
            {
                "ε asked": epsilon,
                "scope": scope,
                "exponent": exponent,
                "accuracy": statistics.fmean(accuracies),
                "standard deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                "seeds": len(accuracies),
                "σ": runs[0].planned.recipe.noise_multiplier,
                **{name: value for name, value in prices(runs[0], memory).items() if "true" in name},
            }
        )
    points = [
        {"ε asked": epsilon, "scope": scope, "exponent": exponent, "seed": run.planned.recipe.seed}
        | {"accuracy": 100 * run.result["accuracy"]}
        for (epsilon, scope, exponent), runs in groups.items()
        for run in runs
        if run.result
    ]
    source = shape.source
    words = (
        f"{source.model} on {source.title}, L = {shape.lot}, {shape.steps} iterations, η = {shape.lr:g}, momentum 0.9, "
        f"C = 0.1, {shape.seeds} seeds, {source.test:,} test images"
    )
    draw(rows, shape, size, words, directory)
    notes = [
        f"{size}: {words}.",
        "Sound DP-Hero, v ∝ (λ / mean λ + 0.1)^p: each layer normalised alone, or all layers together (the paper's "
        "'whole model'). All rows have one noise multiplier for one ε, and cost the same.",
        "The learning rate is that of isotropic noise: it was not searched for each exponent.",
        PRICED,
    ]
    return Report(rows, points, notes)


def draw(rows: Sequence[Mapping[str, Any]], shape: _Shape, size: Size, words: str, directory: Path) -> None:
    """Draw accuracy against the exponent, a line for each scope, beside the band of isotropic noise."""
    figure, axes = drawing.grid(1, len(shape.epsilons), width=4.6, height=3.4)
    for panel, epsilon in zip(axes[0], shape.epsilons, strict=True):
        here = [row for row in rows if row["ε asked"] == epsilon]
        for row in (row for row in here if row["scope"] == _ISOTROPIC):
            spread = row["standard deviation"] or 0.0
            panel.axhspan(row["accuracy"] - spread, row["accuracy"] + spread, color=GREY, alpha=0.25, linewidth=0)
            panel.axhline(row["accuracy"], color=GREY, label="isotropic noise (DP-SGD), ± its spread")
        for place, (scope, colour) in enumerate(_SCOPES.items()):
            mine = sorted((row for row in here if row["scope"] == scope), key=lambda row: row["exponent"])
            panel.errorbar(
                [row["exponent"] + 0.02 * place for row in mine],  # side by side: both bars are seen
                [row["accuracy"] for row in mine],
                [row["standard deviation"] or 0.0 for row in mine],
                color=colour,
                marker="o",
                markersize=4,
                capsize=3,
                label=f"sound DP-Hero, normalised by {scope}",
            )
        panel.set_title(f"ε = {epsilon:g}", fontsize=10)
        panel.set_xlabel("exponent p of the eigenvalues")
    axes[0][0].set_ylabel("test accuracy (%)")
    title = "How uneven the noise is, and what it does to accuracy (exponent and scope)"
    drawing.finish(figure, directory / "heterogeneity", title, f"{size.upper()}: {words}.", columns=1)
