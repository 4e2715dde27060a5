"""What the paper varies, how large a reproduction is, and how its runs are planned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from dphero.accounting import calibrate_noise_multiplier
from dphero.experiments.comparison.plan import Planned
from dphero.methods import METHODS
from dphero.methods.recipe import Recipe

SIGMAS = (0.5, 1.0, 3.0, 5.0, 7.0, 10.0)
LOTS = (10, 50, 200, 400)
RATES = (0.1, 0.2)
DELTAS = (1e-5, 1e-6)
SEEDS, QUICK_SEEDS = 5, 3  # of each kind at full length, and in a quick reproduction
CLIP = 1.0  # the paper does not say; its Algorithm 1 has no C in the noise, which is C = 1

Size = Literal["tiny", "quick", "full"]
"""``full`` is as long as the paper's, ``quick`` a matter of minutes, ``tiny`` tries the machinery on small digits."""

PUBLISHED = "dp-hero-published"
UNSOUND = "UNSOUND AS PUBLISHED"
PRIVATE = ("dp-sgd", "dp-hero", PUBLISHED)
METHOD_TITLES: Mapping[str, str] = {
    "sgd": "SGD (not private)",
    "dp-sgd": "DP-SGD",
    "dp-hero": "DP-Hero, sound (ellipsoid)",
    PUBLISHED: f"DP-Hero as printed: {UNSOUND}",
}


@dataclass(frozen=True)
class Source:
    """Data and the network that is trained on it.

    Attributes:
        data: Its name in a recipe.
        title: Its name in pictures.
        model: The network.
        records: How many training examples there are: a public number.
        test: How many test images are looked at.
    """

    data: str
    title: str
    model: str
    records: int
    test: int


_REDUCED = "dphero.experiments.reproduction.reduced"
_DIGITS = Source("digits", "small digits", "digits", 1437, 360)
MNIST: Mapping[Size, Source] = {
    "tiny": _DIGITS,
    "quick": Source(f"{_REDUCED}:mnist", "MNIST", "lenet", 60_000, 2_000),
    "full": Source("mnist", "MNIST", "lenet", 60_000, 10_000),
}
CIFAR: Mapping[Size, Source] = {
    "tiny": _DIGITS,
    "quick": Source(f"{_REDUCED}:cifar10", "CIFAR-10", "cifar-cnn", 50_000, 1_000),
    "full": Source("cifar10", "CIFAR-10", "cifar-cnn", 50_000, 10_000),
}


@dataclass(frozen=True)
class Setting:
    """One combination of what the paper varies.

    Attributes:
        noise_multiplier: σ; ``None`` without privacy.
        lot: L, the expected number of examples in a step.
        lr: η.
    """

    noise_multiplier: float | None
    lot: int
    lr: float

    def as_dict(self) -> dict[str, Any]:
        """Return what is set, under the names of a recipe."""
        return {name: value for name, value in vars(self).items() if value is not None}


def planned(
    source: Source,
    method: str,
    setting: Setting,
    *,
    iterations: int,
    evaluate_every: int,
    seed: int,
    target: float | None = None,
    **more: Any,
) -> Planned:
    """Return one run of so many iterations.

    Args:
        source: Data and network.
        method: How to train.
        setting: σ, L and η.
        iterations: How many steps.
        evaluate_every: Steps between looks at the test accuracy.
        seed: Of the run.
        target: The ε at which it is compared, if it is.
        more: Further fields of the recipe.
    """
    recipe = Recipe(
        data=source.data,
        model=source.model,
        method=method,
        noise_multiplier=setting.noise_multiplier,
        delta=DELTAS[0],
        lot=setting.lot,
        epochs=iterations / max(1, round(source.records / setting.lot)),
        lr=setting.lr,
        dataset_size="public",
        evaluate_every=evaluate_every,
        seed=seed,
        **({"clip": CLIP} | more),
    )
    parts = [method if METHODS[method].card.sound else f"{method}_{UNSOUND.replace(' ', '-')}"]
    if target is not None:
        parts.append(f"eps{target:g}")
    elif setting.noise_multiplier is not None:
        parts.append(f"sigma{setting.noise_multiplier:g}")
    parts += [f"lot{setting.lot}", f"lr{setting.lr:g}", f"seed{seed}"]
    return Planned("_".join(parts), recipe, target, setting.as_dict())


@cache
def noise_for(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Return the noise multiplier with which Poisson-sampled Gaussian steps cost ε, rounded up to four decimals.

    Rounded, so that a plan is the same on every machine.
    """
    return math.ceil(1e4 * calibrate_noise_multiplier(epsilon, delta, sample_rate, steps)) / 1e4
