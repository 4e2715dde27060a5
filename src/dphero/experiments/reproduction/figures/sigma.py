"""σ as the paper sees it in practice: a matrix, one entry for each direction of a layer and each iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dphero.experiments.comparison.plan import Planned
from dphero.experiments.comparison.sweep import Outcome
from dphero.experiments.reproduction import drawing
from dphero.experiments.reproduction.report import Report
from dphero.experiments.reproduction.settings import MNIST, UNSOUND, Setting, Size, planned
from dphero.experiments.runs.snapshots import kept_files, read_snapshot
from dphero.guidance.pca import noise_scales, spectrum

_SETTING = Setting(1.0, 200, 0.1)
_ITERATIONS: Mapping[Size, int] = {"tiny": 4, "quick": 150, "full": 3_000}
_LOOKS = 15
_RULES: Mapping[str, tuple[float, float]] = {  # exponent and floor
    f"Theorem 2: {UNSOUND}": (1.0, 0.0),
    "dphero's default (sound by its clipping)": (0.25, 0.1),
}


def plan(size: Size) -> list[Planned]:
    """Return one training that keeps its weights again and again."""
    source, steps = MNIST[size], _ITERATIONS[size]
    epoch = max(1, round(source.records / _SETTING.lot))
    looks = sorted({round(steps * place / _LOOKS) for place in range(_LOOKS + 1)})
    kept = tuple(min(look / epoch, steps / epoch) for look in looks)
    return [planned(source, "dp-hero", _SETTING, iterations=steps, evaluate_every=steps, seed=0, keep_epochs=kept)]


def present(found: Sequence[Outcome], size: Size, directory: Path) -> Report:
    """Draw σ by direction and iteration for each weight, and return how far it ranges."""
    kept = [read_snapshot(run.path, name) for run in found if run.result for name in kept_files(run.path)]
    named = {name: value for name, value in (kept[0].weights.items() if kept else ()) if value.dim() > 1}
    layers = sorted(named, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")])
    points = [
        {"layer": layer.removesuffix(".weight"), "rule": rule, "step": look.step, "direction": place}
        | {"σ / σ of DP-SGD": float(value)}
        for look in kept
        for layer in layers
        for rule, (exponent, floor) in _RULES.items()
        for place, value in enumerate(_scales(look.weights[layer], exponent, floor), 1)
    ]
    rows = [_row(points, layer.removesuffix(".weight"), rule) for layer in layers for rule in _RULES]
    source = MNIST[size]
    words = f"{source.model} on {source.title}, σ = 1, L = {_SETTING.lot}, {_ITERATIONS[size]:,} iterations, one seed"
    if points:
        draw(points, rows, f"{size.upper()}: {words}.", directory)
    notes = [
        f"{size}: {words}; sound DP-Hero was trained, and both rules were applied to its weights.",
        "σ of each principal direction, in units of DP-SGD's; its squares have mean 1 in each layer.",
        f"The rule of Theorem 2 with a clip to a ball is {UNSOUND}: see noise-spectra for its price.",
    ]
    return Report(rows, points, notes)


def _scales(weight: Any, exponent: float, floor: float) -> list[float]:
    values = noise_scales(spectrum(weight), exponent, floor).sort(descending=True).values
    return [float(value) for value in values]


def _row(points: Sequence[Mapping[str, Any]], layer: str, rule: str) -> dict[str, Any]:
    mine = [point for point in points if (point["layer"], point["rule"]) == (layer, rule)]
    steps = (mine[0]["step"], mine[-1]["step"])
    ends = [[point["σ / σ of DP-SGD"] for point in mine if point["step"] == step] for step in steps]
    return {
        "layer": layer,
        "rule": rule,
        "directions": len(ends[0]),
        "strongest, first": max(ends[0]),
        "weakest, first": min(ends[0]),
        "strongest, last": max(ends[1]),
        "weakest, last": min(ends[1]),
    }


def draw(points: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], note: str, directory: Path) -> None:
    """Draw a matrix for each rule and layer: directions downwards, iterations to the right."""
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    figure, axes = drawing.grid(len(_RULES), len(layers), width=2.6, height=2.5)
    steps = sorted({point["step"] for point in points})
    for line, rule in zip(axes, _RULES, strict=True):
        for panel, layer in zip(line, layers, strict=True):
            mine = [point for point in points if (point["layer"], point["rule"]) == (layer, rule)]
            columns = [[point["σ / σ of DP-SGD"] for point in mine if point["step"] == step] for step in steps]
            matrix = [list(values) for values in zip(*columns, strict=True)]
            drawn = panel.imshow(
                matrix, aspect="auto", norm="log", cmap="viridis", extent=(0, steps[-1], len(matrix), 0)
            )
            panel.set_title(f"layer {layer}", fontsize=9)
            panel.set_xlabel("iteration")
            panel.grid(False)
            shown = [value for values in matrix for value in values if value > 0]  # a scale of logarithms has no zero
            low, high = min(shown), max(shown)
            ticks = [low * (high / low) ** (place / 4) for place in range(5)]
            bar = figure.colorbar(drawn, ax=panel, ticks=ticks, format="{x:.3g}")
            bar.ax.minorticks_off()
        words = rule.replace(": ", ":\n").replace(" (", "\n(")
        line[0].set_ylabel(f"{words}\ndirection, most noise first", fontsize=8)
    title = "σ of every direction at every iteration (the paper's practical view of its parameters)"
    drawing.finish(figure, directory / "sigma-per-iteration", title, note)
