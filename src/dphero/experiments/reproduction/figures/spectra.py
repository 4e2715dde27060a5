"""The shape of the noise: the scale along every principal direction of a layer, and what the weakest one costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dphero import models
from dphero.accounting import AdaptiveGaussian, Ledger, PoissonGaussian, claimed_by_paper, price
from dphero.experiments.comparison.plan import Planned
from dphero.experiments.comparison.sweep import Outcome
from dphero.experiments.pictures import FURTHER, GREY, METHOD_COLOURS, VERDICT_COLOURS
from dphero.experiments.reproduction import drawing
from dphero.experiments.reproduction.report import Report
from dphero.experiments.reproduction.settings import (
    DELTAS,
    METHOD_TITLES,
    MNIST,
    PUBLISHED,
    UNSOUND,
    Setting,
    Size,
    Source,
    planned,
)
from dphero.experiments.runs.rundir import RunDirectory
from dphero.guidance.pca import noise_scales, spectrum

_RULES: Mapping[str, tuple[float, float]] = {  # exponent and floor
    f"Theorem 2, ∝ eigenvalue: {UNSOUND}": (1.0, 0.0),
    f"Algorithm 2, ∝ its square: {UNSOUND}": (2.0, 0.0),
    f"the text, ∝ its inverse: {UNSOUND}": (-1.0, 0.0),
    "dphero's default (sound by its clipping)": (0.25, 0.1),
}
_COLOURS = (VERDICT_COLOURS["unsound"], FURTHER[0], FURTHER[1], METHOD_COLOURS["dp-hero"])
_PRICE_COLOURS = (GREY, METHOD_COLOURS["dp-sgd"], VERDICT_COLOURS["unsound"], FURTHER[3], FURTHER[4])
_STYLES = (":", ":", ":", "-")
_ITERATIONS: Mapping[Size, int] = {"tiny": 4, "quick": 150, "full": 3_000}
_LOT, _SIGMA = 200, 1.0
_STEPS: Mapping[Size, tuple[int, ...]] = {  # at which it is priced
    "tiny": (1, 10),
    "quick": (1, 10, 100, 1_000, 10_000),
    "full": (1, 10, 100, 1_000, 10_000, 100_000),
}
_SHAPES = {"lenet": (1, 28, 28), "cifar-cnn": (3, 32, 32), "digits": (1, 8, 8)}


def plan(size: Size) -> list[Planned]:
    """Return short trainings whose weights are looked at."""
    setting = Setting(_SIGMA, _LOT, 0.1)
    steps = _ITERATIONS[size]
    return [
        planned(
            MNIST[size],
            method,
            Setting(None, _LOT, 0.1) if method == "sgd" else setting,
            iterations=steps,
            evaluate_every=steps,
            seed=0,
        )
        for method in ("sgd", "dp-hero", PUBLISHED)
    ]


def present(found: Sequence[Outcome], size: Size, directory: Path) -> Report:
    """Take the spectra of all layers before and after training, and price their weakest directions."""
    source = MNIST[size]
    names = (source.model,) if size == "tiny" else (source.model, "cifar-cnn")
    rows: list[dict[str, Any]] = []
    scales: dict[tuple[str, str, str, str], Tensor] = {}
    for model, state, module in _networks(names, found):
        for layer, weight in _weights(module):
            values = spectrum(weight)
            shape = f"{len(values)}×{weight.numel() // len(values)}"
            for rule, (exponent, floor) in _RULES.items():
                scale = noise_scales(values, exponent, floor).sort(descending=True).values
                scales[model, state, f"{layer} {shape}", rule] = scale
                rows.append({"model": model, "state": state, "layer": layer, "shape": shape, "rule": rule}
                            | {"weakest": float(scale[-1]), "strongest": float(scale[0])})  # fmt: skip
    points = [
        {"model": model, "state": state, "layer": layer, "rule": rule, "direction": place, "noise / σC": float(value)}
        for (model, state), layer in _weakest_layers(scales).items()
        for rule in _RULES
        for place, value in enumerate(scales[model, state, layer, rule], 1)
    ]
    prices = _prices(scales, source, _STEPS[size])
    draw(scales, prices, size, source, directory)
    notes = [
        f"{size}: weights at their random start, and after {_ITERATIONS[size]} iterations at σ = {_SIGMA:g}, L = "
        f"{_LOT}, η = 0.1 ({source.model} on {source.title}).",
        "Noise along each principal direction of WWᵀ, in units of DP-SGD's noise; squares have mean 1 in each layer.",
        f"With a clip to a ball the privacy is that of the weakest direction of all layers: the printed rules are "
        f"{UNSOUND}. Clipped by the noise's own ellipsoid, any shape costs what DP-SGD costs.",
        *(
            f"{line['curve']}: ε {line['epsilon']:.4g} after {line['steps']:,} steps at δ = {DELTAS[0]:g}."
            for line in prices
            if line["steps"] in (1, _STEPS[size][-1])
        ),
        "Prices of the printed rule are what a Rényi filter of fixed order charges, which at such sizes is loose; the "
        "exact price of the first step alone is a lower bound for all that follow.",
    ]
    return Report(rows, [*points, *prices], notes)


def _networks(names: Sequence[str], found: Sequence[Outcome]) -> Iterator[tuple[str, str, nn.Module]]:
    for name in names:
        yield name, "random start", models.build(name, _SHAPES[name], 10)
    for outcome in found:
        if outcome.result is not None:
            recipe = outcome.planned.recipe
            module = models.build(recipe.model, _SHAPES[recipe.model], 10)
            RunDirectory(outcome.path, recipe).load_model(module)
            yield recipe.model, f"after {METHOD_TITLES[recipe.method]}", module


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            yield name.removesuffix(".weight"), parameter


def _weakest_layers(scales: Mapping[tuple[str, str, str, str], Tensor]) -> dict[tuple[str, str], str]:
    """Return, for each network in each state, the layer with the weakest direction by Theorem 2."""
    found: dict[tuple[str, str], str] = {}
    least: dict[tuple[str, str], float] = {}
    for (model, state, layer, rule), scale in scales.items():
        weakest = float(scale[-1])
        if rule == next(iter(_RULES)) and weakest < least.get((model, state), float("inf")):
            found[model, state], least[model, state] = layer, weakest
    return found


def _prices(
    scales: Mapping[tuple[str, str, str, str], Tensor], source: Source, several: Sequence[int]
) -> list[dict[str, Any]]:
    """What σ = 1 costs as training goes on: by the paper's formula, truly, and for the recipe's weakest direction."""
    rate = _LOT / source.records
    theorem = next(iter(_RULES))
    found = []
    for steps in several:
        claim = claimed_by_paper([_SIGMA], DELTAS[0]).epsilon
        found.append({"curve": "the paper's claim", "steps": steps, "epsilon": claim})
        sound = Ledger()
        sound.record(PoissonGaussian(rate, _SIGMA), steps)
        found.append({"curve": "DP-SGD and sound DP-Hero", "steps": steps})
        found[-1]["epsilon"] = price(sound, DELTAS[0], "pld").epsilon
        for model in dict.fromkeys(model for model, *_ in scales):
            weakest = min(
                float(scale[-1])
                for (name, state, _, rule), scale in scales.items()
                if (name, state, rule) == (model, "random start", theorem)
            )
            ledger = Ledger()
            ledger.record(AdaptiveGaussian(rate, _SIGMA * weakest), steps)
            curve = f"Theorem 2 on {model} at its start: {UNSOUND}"
            found.append({"curve": curve, "steps": steps, "epsilon": price(ledger, DELTAS[0], "filter").epsilon})
            if steps == 1 and weakest > 0.01:  # below that the exact distribution is too wide to compute
                once = Ledger()
                once.record(PoissonGaussian(rate, _SIGMA * weakest))
                exact = price(once, DELTAS[0], "pld").epsilon
                found.append({"curve": f"{curve}, one step, exactly", "steps": 1, "epsilon": exact})
    return found


def draw(
    scales: Mapping[tuple[str, str, str, str], Tensor],
    prices: Sequence[Mapping[str, Any]],
    size: Size,
    source: Source,
    directory: Path,
) -> None:
    """Draw the noise by direction in the weakest layer of each network and state, and the prices."""
    layers = _weakest_layers(scales)
    figure, axes = drawing.grid(2, 3, width=4.6, height=3.3)
    for panel, ((model, state), layer) in zip(axes.flat[:5], layers.items(), strict=False):
        for rule, colour, style in zip(_RULES, _COLOURS, _STYLES, strict=True):
            values = scales[model, state, layer, rule].clamp_min(1e-13)
            panel.plot(range(1, len(values) + 1), values, color=colour, linestyle=style, label=rule)
        panel.axhline(1, color=METHOD_COLOURS["dp-sgd"], linewidth=1, label="isotropic (DP-SGD)")
        panel.set_yscale("log")
        panel.set_title(f"{model}, layer {layer},\n{state}", fontsize=8)
        panel.set_xlabel("principal direction, most noise first")
        panel.set_ylabel("noise std / (σC)")
    for panel in axes.flat[len(layers) : 5]:
        panel.set_visible(False)
    last = axes.flat[5]
    for number, curve in enumerate(dict.fromkeys(line["curve"] for line in prices)):
        mine = [line for line in prices if line["curve"] == curve and line["epsilon"] < float("inf")]
        if mine:
            last.plot(
                [line["steps"] for line in mine],
                [line["epsilon"] for line in mine],
                marker="o",
                markersize=3,
                color=_PRICE_COLOURS[number % len(_PRICE_COLOURS)],
                linestyle=":" if UNSOUND in curve else "-",
                label=f"price: {curve}",
            )
    last.set_xscale("log")
    last.set_yscale("log")
    last.set_xlabel(f"steps at σ = {_SIGMA:g}, L = {_LOT}")
    last.set_ylabel(f"ε at δ = {DELTAS[0]:g}")
    last.set_title("what it costs", fontsize=10)
    title = "The shape of the noise, and what its weakest direction costs (the paper's Theorem 2)"
    note = (
        f"{size.upper()}: for each network the layer with the weakest direction; trained ones after "
        f"{_ITERATIONS[size]} iterations on {source.title}."
    )
    drawing.finish(figure, directory / "noise-spectra", title, note)
