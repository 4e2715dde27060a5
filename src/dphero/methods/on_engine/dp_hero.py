"""DP-Hero: noise shaped by what the model has learned, sound as the ellipsoid, and as it was published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from dphero.accounting import Price, calibrate_noise_multiplier, claimed_by_paper
from dphero.guidance import PCA
from dphero.methods.card import Card
from dphero.methods.method import Method, register
from dphero.methods.task import Task
from dphero.methods.trainer import Trainer
from dphero.methods.trainers.engine_trainer import PrivateTrainer

_PAPER = "DP-Hero (arXiv 2409.03344), Revisiting Privacy-Utility Trade-off for DP Training with Pre-existing Knowledge"


@register
@dataclass(frozen=True)
class DPHero(Method):
    """Clips with the noise's own ellipsoid, so that any shape of noise costs what DP-SGD costs.

    Attributes:
        exponent: p: the noise along a principal direction grows with the p-th power of its eigenvalue.
        floor: Added to every (normalised) eigenvalue before.
        refresh_every: Steps between two looks at the weights.
        scope: ``layer`` normalises each layer alone; in ``model`` all layers share one noise budget.
    """

    card: ClassVar[Card] = Card(
        name="dp-hero",
        title="DP-Hero, sound: ellipsoid clipping with the weights' principal directions",
        protects="one training example",
        relation="add or remove",
        sampling="Poisson",
        paper=_PAPER,
        priced="PLD of the Poisson-sampled Gaussian (the shape of the noise is free)",
    )

    exponent: float = 0.25
    floor: float = 0.1
    refresh_every: int = 10
    scope: Literal["layer", "model"] = "layer"

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        return PrivateTrainer(self.card, task, options={"guidance": self.guidance()})

    def guidance(self) -> PCA:
        """Return the principal directions of the weights."""
        return PCA(exponent=self.exponent, floor=self.floor, refresh_every=self.refresh_every, scope=self.scope)


class _PublishedTrainer(PrivateTrainer):
    def compared_prices(self, delta: float) -> Mapping[str, Price]:
        """Return what the paper's Theorem 4 would say."""
        return {"claimed by the paper": claimed_by_paper([self.engine.noise_multiplier], delta)}


@register
@dataclass(frozen=True)
class DPHeroPublished(Method):
    """The recipe as printed: a plain clip, shaped noise of DP-SGD's total variance. Runs for study only.

    No noise multiplier meets a target ε for sure. With a target, the recipe gets the multiplier with which DP-SGD
    meets it, which is what its authors believe to be enough; the price in the statement is the true one.

    Attributes:
        exponent: p = 1 is Theorem 2's rule, p = 2 Algorithm 2's, p = −1 that of the text.
        floor: 0 as printed; a weight that is rank deficient then leaves a direction without noise, ε = ∞.
        refresh_every: 1 as printed.
    """

    card: ClassVar[Card] = Card(
        name="dp-hero-published",
        title="DP-Hero as published: UNSOUND",
        protects="one training example",
        relation="add or remove",
        sampling="Poisson",
        paper=_PAPER,
        priced="Rényi filter at the noise of the weakest direction",
        flaws=(
            "UNSOUND AS PUBLISHED: the noise is far weaker along some directions than the recipe claims",
            "the paper composes steps by their maximum instead of their sum",
        ),
        sound=False,
    )

    exponent: float = 1.0
    floor: float = 0.0
    refresh_every: int = 1

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        recipe = task.recipe
        if recipe.epsilon is not None:
            sigma = calibrate_noise_multiplier(recipe.epsilon, recipe.delta, task.sample_rate, task.steps)
            task = replace(task, recipe=recipe.with_(epsilon=None, noise_multiplier=sigma))
        options = {"guidance": self.guidance(), "mechanism": "published", "unsound": True}
        return _PublishedTrainer(self.card, task, options=options)

    def guidance(self) -> PCA:
        """Return the principal directions of the weights; those that a weight lacks get no noise."""
        return PCA(exponent=self.exponent, floor=self.floor, refresh_every=self.refresh_every, bare=self.floor == 0)
