"""The close relatives of DP-Hero: AdaCliP and GeoClip shape the noise, quantile clipping moves the clip norm.

All three run on the same mechanism and cost what DP-SGD costs with the same noise multiplier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dphero._checks import positive, whole
from dphero.guidance import History
from dphero.methods.card import Card
from dphero.methods.method import Method, register
from dphero.methods.task import Task
from dphero.methods.trainer import Trainer
from dphero.methods.trainers.engine_trainer import PrivateTrainer


def _require_free(task: Task, card: Card, field: str) -> None:
    """Refuse a recipe that makes the very choice that the method is."""
    value = getattr(task.recipe, field)
    if value is not None:
        raise ValueError(
            f"method {card.name!r} is a choice of {field} already: leave out --{field} {value}, or take "
            f"--method dp-sgd --{field} {value}"
        )


@register
@dataclass(frozen=True)
class AdaCliP(Method):
    """Each coordinate gets noise in proportion to the square root of its gradients' standard deviation.

    b_j ∝ √s_j, where s_j² is a running estimate of the variance of coordinate j, from past noisy gradients less their
    known noise. The paper also shifts gradients by their running mean before clipping; here they are clipped around 0.

    Attributes:
        refresh_every: Steps between two looks at the estimates; 1 in the paper.
        floor: What every coordinate gets beside its variance, relative to the mean: the paper clamps instead.
    """

    card: ClassVar[Card] = Card(
        name="adaclip",
        title="AdaCliP: a scale for each coordinate, from past noisy gradients",
        protects="one training example",
        relation="add or remove",
        sampling="Poisson",
        paper="Pichapati et al. 2019 (arXiv 1908.07643), AdaCliP: Adaptive Clipping for Private SGD",
        priced="PLD of the Poisson-sampled Gaussian (the shape of the noise is free)",
        flaws=("without the paper's shift by the mean gradient",),
    )

    refresh_every: int = 1
    floor: float = 0.01

    def __post_init__(self) -> None:
        whole("refresh_every", self.refresh_every)
        positive("floor", self.floor)

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        _require_free(task, self.card, "guidance")
        guidance = History.adaclip(refresh_every=self.refresh_every, floor=self.floor)
        return PrivateTrainer(self.card, task, options={"guidance": guidance})


@register
@dataclass(frozen=True)
class GeoClip(Method):
    """The noise follows the fourth root of the gradients' covariance, as estimated from past noisy gradients.

    A ∝ Σ^(1/4): full within small blocks, along the feature axis of large ones. As AdaCliP, without the shift.

    Attributes:
        refresh_every: Steps between two looks at the estimates; each costs an eigendecomposition.
        floor: What every direction gets beside its eigenvalue, relative to the mean: the paper clamps instead.
    """

    card: ClassVar[Card] = Card(
        name="geoclip",
        title="GeoClip: the covariance of past noisy gradients shapes the noise",
        protects="one training example",
        relation="add or remove",
        sampling="Poisson",
        paper="Gilani et al. 2025 (arXiv 2506.06549), GeoClip: Geometry-Aware Clipping for Differentially Private SGD",
        priced="PLD of the Poisson-sampled Gaussian (the shape of the noise is free)",
        flaws=(
            "its script estimates the covariance from each example's own noisy gradient, which would have to be "
            "charged at the noise of one example; here, as in the paper's text, from the noisy sum of a lot",
            "without the paper's shift by the mean gradient, and block by block",
        ),
    )

    refresh_every: int = 10
    floor: float = 0.01

    def __post_init__(self) -> None:
        whole("refresh_every", self.refresh_every)
        positive("floor", self.floor)

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        _require_free(task, self.card, "guidance")
        guidance = History.geoclip(refresh_every=self.refresh_every, floor=self.floor)
        return PrivateTrainer(self.card, task, options={"guidance": guidance})


@register
@dataclass(frozen=True)
class QuantileClip(Method):
    """The clip norm follows the median of the gradients' norms, through a noisy count in every step.

    b̃ = (Σ (1[‖g_i‖ ≤ C_t] − ½) + σ_b z) / B + ½ with σ_b = B / 20, then C_{t+1} = C_t exp(−0.2 (b̃ − ½)). The recipe's
    clip norm is C_0. Gradient and count together cost what one release at multiplier σ costs: the gradient gets
    the multiplier (σ⁻² − (2 σ_b)⁻²)^(−1/2).
    """

    card: ClassVar[Card] = Card(
        name="quantile-clip",
        title="DP-SGD with a clip norm that follows the median norm, privately",
        protects="one training example",
        relation="add or remove",
        sampling="Poisson",
        paper="Andrew, Thakkar, McMahan and Ramaswamy 2019 (arXiv 1905.03871), with Adaptive Clipping",
        priced="PLD of the Poisson-sampled Gaussian; the count is paid for by more noise on the gradient",
        flaws=(
            "the rate, the quantile and the noise of the count are the published ones and fixed",
            "once most examples are learned their norms fall towards 0, the median and the bound with them, and "
            "learning stops, at any learning rate: on MNIST it ends below a clip norm that was tuned and is kept",
        ),
    )

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        _require_free(task, self.card, "clipping")
        return PrivateTrainer(self.card, task, options={"guidance": "isotropic", "clipping": "adaptive"})
