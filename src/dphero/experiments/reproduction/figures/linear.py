"""The paper's example of a linear classifier: what noise of equal size and different shape does to its outputs.

The paper looks at a binary classifier W with noise N, inputs x, and the change of the correlation with the labels,
(W + N)ᵀx · Nᵀx + Nᵀx · Wᵀx, and concludes that W ⊥ N is best. For noise N(0, Σ) everything has a closed form. With
q(x) = xᵀΣx the change is 2 WᵀxNᵀx + (Nᵀx)², so

    mean = q(x),    variance = 4 (Wᵀx)² q(x) + 2 q(x)²,    Pr[the prediction stays right] = Φ(y Wᵀx / √q(x)).

W does not enter the mean at all: noise is harmless where the *data* has little energy, not where W has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.special import ndtr
from torch import Tensor

from dphero import data as datasets
from dphero.accounting import Gaussian, Ledger, claimed_by_paper, price
from dphero.data import Split
from dphero.experiments.comparison.plan import Planned
from dphero.experiments.comparison.sweep import Outcome
from dphero.experiments.pictures import FURTHER, METHOD_COLOURS, VERDICT_COLOURS
from dphero.experiments.reproduction import drawing
from dphero.experiments.reproduction.report import Report
from dphero.experiments.reproduction.settings import DELTAS, UNSOUND, Size
from dphero.guidance.pca import noise_scales

_CLASSES = (3, 8)
_LEVELS = tuple(10 ** (exponent / 8) for exponent in range(-12, 9))  # ‖noise‖ / ‖W‖
_REFERENCE = 1.0  # the level of the table


def plan(size: Size) -> list[Planned]:
    """Nothing is trained in runs."""
    return []


def train_classifier(inputs: Tensor, signs: Tensor, steps: int = 200) -> Tensor:
    """Return W of a logistic regression, by gradient descent with momentum at the largest safe rate."""
    largest = float(torch.linalg.matrix_norm(inputs.T @ inputs / len(inputs), 2))
    weight, velocity = torch.zeros_like(inputs[0]), torch.zeros_like(inputs[0])
    for _ in range(steps):
        slope = -(signs * torch.sigmoid(-signs * (inputs @ weight))) @ inputs / len(inputs)
        velocity = 0.9 * velocity + slope
        weight = weight - velocity / largest
    return weight


def energies(inputs: Tensor, weight: Tensor) -> dict[str, tuple[Tensor, float]]:
    """Return, for noise of total variance m in each shape, q(x) = xᵀΣx of every input, and the weakest direction.

    The weakest direction is the smallest standard deviation over all directions, where 1 is that of isotropic noise.
    """
    size = len(weight)
    along = (inputs @ (weight / weight.norm())).square()
    across = inputs.square().sum(1) - along
    basis = torch.linalg.eigh(inputs.T @ inputs / len(inputs))[1]  # weakest directions of the data first
    half = size // 2
    spectrum = torch.zeros(size, dtype=torch.float64)
    spectrum[0] = float(weight.square().sum())  # of WᵀW, which has rank one
    sound = noise_scales(spectrum, 0.25, 0.1)
    return {
        "isotropic": (along + across, 1.0),
        "recipe on WᵀW": (size * along, 0.0),
        "orthogonal to W": (across * size / (size - 1), 0.0),
        "sound shape on WᵀW": (float(sound[0]) ** 2 * along + float(sound[1]) ** 2 * across, float(sound.min())),
        "data's weak half": ((inputs @ basis[:, :half]).square().sum(1) * size / half, 0.0),
        "data's strong half": ((inputs @ basis[:, half:]).square().sum(1) * size / (size - half), 0.0),
    }


_COLOURS = (
    METHOD_COLOURS["dp-sgd"],
    VERDICT_COLOURS["unsound"],
    FURTHER[0],
    METHOD_COLOURS["dp-hero"],
    FURTHER[1],
    FURTHER[3],
)
_REMARKS: Mapping[str, str] = {
    "isotropic": "DP-SGD; also the recipe on WWᵀ, which is a single number here",
    "recipe on WᵀW": f"{UNSOUND}: all noise along W, none elsewhere",
    "orthogonal to W": "what the paper's analysis asks for; no privacy along W",
    "sound shape on WᵀW": "dphero's rule, clipped by its own ellipsoid",
    "data's weak half": "needs the private data, and protects nothing in the other half",
    "data's strong half": "needs the private data, and protects nothing in the other half",
}


def present(found: Sequence[Outcome], size: Size, directory: Path) -> Report:
    """Compute everything, exactly."""
    name = "digits" if size == "tiny" else "mnist"
    data = datasets.load(name)
    inputs, signs = _binary(data.train)
    weight = train_classifier(inputs, signs)
    tests, test_signs = _binary(data.test)
    scores = test_signs * (tests @ weight)
    shapes = energies(tests, weight)
    unit = float(weight.norm()) / math.sqrt(len(weight))  # at level 1 the noise is as long as W
    plain = shapes["isotropic"][0].mean()
    points, rows = [], []
    for shape, (energy, weakest) in shapes.items():
        for level in _LEVELS:
            points.append({"shape": shape, "remark": _REMARKS[shape], "noise / weight": level}
                          | {"accuracy": _accuracy(scores, energy * (level * unit) ** 2)})  # fmt: skip
        noisy = energy * (_REFERENCE * unit) ** 2
        spread = (4 * scores.square() * noisy + 2 * noisy.square()).mean().sqrt()
        plain_noisy = shapes["isotropic"][0] * (_REFERENCE * unit) ** 2
        plain_spread = (4 * scores.square() * plain_noisy + 2 * plain_noisy.square()).mean().sqrt()
        rows.append(
            {
                "noise": shape,
                "remark": _REMARKS[shape],
                "mean change / isotropic": float(energy.mean() / plain),
                "spread / isotropic": float(spread / plain_spread),
                "accuracy (%)": 100 * _accuracy(scores, noisy),
                "weakest direction": weakest,
                "claimed ε": claimed_by_paper([1.0], DELTAS[0]).epsilon,
                "true ε": _epsilon(1.0 if shape == "sound shape on WᵀW" else weakest),
            }
        )
    accuracy = float((scores > 0).double().mean())
    words = (
        f"{_CLASSES[0]} against {_CLASSES[1]} of {data.name}, {len(weight)} weights, {100 * accuracy:.1f} % right "
        f"without noise, {len(tests):,} test images"
    )
    draw(points, rows, accuracy, f"{size.upper()}: {words}. ε of one release at σ = 1, δ = {DELTAS[0]:g}.", directory)
    notes = [
        f"{size}: {words}.",
        f"All noise has the same total variance; mean, spread and accuracy at noise as long as W (‖N‖ = "
        f"{_REFERENCE:g} ‖W‖).",
        f"ε is that of one release of everybody's clipped sum at σ = 1 and δ = {DELTAS[0]:g}; ∞ where a direction has "
        "no noise. The claimed ε is the paper's formula, which does not look at the shape.",
    ]
    return Report(rows, points, notes)


def _binary(split: Split) -> tuple[Tensor, Tensor]:
    """The images of two classes as rows, and +1 or −1."""
    chosen = (split.labels == _CLASSES[0]) | (split.labels == _CLASSES[1])
    signs = torch.where(split.labels[chosen] == _CLASSES[0], 1.0, -1.0).double()
    return split.images[chosen].flatten(1).double(), signs


def _accuracy(scores: Tensor, energy: Tensor) -> float:
    """The mean of Φ(y Wᵀx / √q(x))."""
    return float(ndtr((scores / energy.sqrt().clamp_min(1e-300)).numpy()).mean())


def _epsilon(noise_multiplier: float) -> float:
    if noise_multiplier == 0:
        return math.inf
    ledger = Ledger()
    ledger.record(Gaussian(noise_multiplier))
    return price(ledger, DELTAS[0], "pld").epsilon


def draw(
    points: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], accuracy: float, note: str, directory: Path
) -> None:
    """Draw the change of the output for each shape of noise, and the accuracy by its length."""
    figure, axes = drawing.grid(1, 2, width=5.4, height=4.0)
    left, right = axes[0]
    colours = dict(zip((row["noise"] for row in rows), _COLOURS, strict=True))
    labels = {row["noise"]: row["noise"] + (f": {UNSOUND}" if UNSOUND in row["remark"] else "") for row in rows}
    for place, row in enumerate(reversed(rows)):
        value = row["mean change / isotropic"]
        left.barh(place, value, color=colours[row["noise"]])
        epsilon = "∞" if math.isinf(row["true ε"]) else f"{row['true ε']:.2f}"
        left.annotate(f" ×{value:.3g}, ε {epsilon}", (value, place), va="center", fontsize=8)
    left.set_yticks(range(len(rows)), [labels[row["noise"]].replace(": ", ":\n") for row in reversed(rows)], fontsize=8)
    left.set_xscale("log")
    left.grid(False, axis="y")
    left.margins(x=0.35)
    left.set_xlabel("mean change of the output, relative to isotropic noise")
    left.set_title("what the paper wants small, and the true ε", fontsize=10)
    for shape, colour in colours.items():
        mine = [point for point in points if point["shape"] == shape]
        hides = shape == "orthogonal to W"  # lies on that of isotropic noise
        style = ":" if UNSOUND in labels[shape] else "--" if hides else "-"
        right.plot(
            [point["noise / weight"] for point in mine],
            [100 * point["accuracy"] for point in mine],
            color=colour,
            linestyle=style,
            label=labels[shape],
        )
    right.axhline(100 * accuracy, color="black", linestyle="--", linewidth=1, label="without noise")
    right.set_xscale("log")
    right.set_xlabel("length of the noise / length of W")
    right.set_ylabel("expected test accuracy (%)")
    right.set_title("what it does to predictions", fontsize=10)
    title = "Which noise a linear classifier bears best (the paper's linear layer analysis)"
    drawing.finish(figure, directory / "linear-analysis", title, note)
