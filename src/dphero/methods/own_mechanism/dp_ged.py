"""DP-GED: gradients are encoded in a finite code book, get Student-t noise, and are denoised.

Nasr, Shokri and Houmansadr 2020, "Improving Deep Learning with Differential Privacy using Gradient Encoding and
Denoising" (arXiv 2007.11524). Per step::

    lot       Poisson
    clip      ḡ_i = g_i · min(1, C / ‖g_i‖)
    encode    c_i = ḡ_i, each coordinate cut (towards zero) to a multiple of a public unit, at most ``levels`` of them
    noise     Σ c_i + s C t,   t independent Student-t in every coordinate
    denoise   a fixed function of the noisy sum

Cutting towards zero keeps ‖c_i‖ ≤ C. The price is evaluated numerically, over the worst code word
(:mod:`dphero.accounting.events.student_t`).

The source leaves open what the unit is and how denoising works; its README names only flags. Chosen here: the unit is
a share of C/√d, d the number of parameters (public), since coordinates are of that size; and denoising is the score
function of the noise, the best estimate of a signal that is small against it, f(x) = x (ν + 3) / (ν + (x/s)²), which
is x itself on average for a small x, and takes away the heavy tails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from dphero._checks import one_of, positive, whole
from dphero.accounting import CalibrationError, Ledger, PoissonStudentT, price
from dphero.accounting.numerics.search import safe_value
from dphero.gradients.batch import GradientBatch
from dphero.mechanism.clipping import Flat, total
from dphero.methods.card import Card
from dphero.methods.method import Method, register
from dphero.methods.task import Task
from dphero.methods.trainer import Step, Trainer
from dphero.methods.trainers.noisy_trainer import NoisyTrainer, poisson

Denoise = Literal["score", "none"]

_LEAST, _MOST = 0.05, 1e4  # scales that are searched; the least one that can be priced
_MEMORY = 1 << 22  # numbers in the per-example gradients held at a time


class _EncodedTrainer(NoisyTrainer):
    accountants = ("rdp",)

    def __init__(self, card: Card, task: Task, method: DPGED) -> None:
        given = task.recipe.noise_multiplier
        if given is not None and given < _LEAST:
            raise ValueError(
                f"noise multiplier {given:g} is too small for 'dp-ged': below {_LEAST:g} its price, in the ten "
                "thousands, takes more time and memory than it is worth; give more noise"
            )
        super().__init__(card, task, poisson(task))
        self.method = method
        self.unit = method.unit / math.sqrt(self.size)  # over the clip norm
        self.chunk = min(self.chunk, max(1, _MEMORY // self.size))
        self.scale = self._scale() if given is None else given
        self.event = self._event(self.scale)

    def _event(self, scale: float) -> PoissonStudentT:
        return PoissonStudentT(self.task.sample_rate, scale, self.method.degrees, self.unit, self.method.levels)

    def _scale(self) -> float:
        """Return the least noise with which the whole training stays within (ε, δ)."""
        recipe = self.task.recipe
        assert recipe.epsilon is not None

        def cost(scale: float) -> float:
            ledger = Ledger()
            ledger.record(self._event(scale), self.steps)
            return price(ledger, recipe.delta, self.accountant).epsilon

        found = safe_value([cost], recipe.epsilon, 1.0, safest=_MOST, riskiest=_LEAST, tolerance=5e-4)
        if found is None:
            raise CalibrationError(
                f"epsilon {recipe.epsilon:g} at delta {recipe.delta:g} is out of reach for {self.steps} steps of "
                f"'dp-ged': even noise multiplier {_MOST:g} costs {cost(_MOST):.4g}; take fewer steps or allow more"
            )
        return found

    def take(self) -> Step:
        """Encode the gradients of a lot, release their noisy sum, denoise it, and take the optimizer's step."""
        rows, clip = self.rows(self.step), self.task.recipe.clip
        sums = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        loss, clipped = torch.zeros((), device=self.task.device), 0
        for _, batch, losses in self.gradients(rows):
            codes, shrunk = encode(batch, clip, self.unit * clip, self.method.levels)
            for name, code in codes.items():
                sums[name] += code
            loss, clipped = loss + losses.sum(), clipped + shrunk
        self._ledger.record(self.event)
        noise = student_t(self, self.method.degrees, torch.tensor([self.scale, clip]), *sums.values())
        scale, lot = self.scale * clip, self.task.recipe.lot
        released = {name: sums[name] + scale * noise[name] for name in self.parameters}
        if self.method.denoise == "score":
            released = {name: score(value, scale, self.method.degrees) for name, value in released.items()}
        self.hand_over({name: value / lot for name, value in released.items()})
        self.optimizer.step()
        return Step(loss=loss / max(len(rows), 1), clipped=clipped / len(rows) if len(rows) else None)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "scale": self.scale}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.scale = float(state["scale"])
        self.event = self._event(self.scale)


@torch.no_grad()
def encode(batch: GradientBatch, clip: float, unit: float, levels: int) -> tuple[dict[str, Tensor], int]:
    """Return the sum of the examples' code words, and how many gradients were clipped.

    Each example's word has norm at most ``clip`` and coordinates k·unit with whole |k| ≤ levels. A gradient that is not
    finite has the word zero.
    """
    weights = Flat(clip).weights(batch.square_norms)
    finite = total(batch.square_norms).isfinite()
    weight = torch.where(finite, next(iter(weights.values())), 0.0)
    slack = 1 + max(piece.rounding for piece in batch.pieces.values())  # as the core's clipping leaves room
    sums = {}
    for name, piece in batch.pieces.items():
        gradients = piece.instantiate()
        shape = (-1, *[1] * (gradients.dim() - 1))
        steps = (gradients * (weight / (unit * slack)).view(shape)).nan_to_num_(0.0, 0.0, 0.0)
        sums[name] = steps.trunc_().clamp_(-levels, levels).sum(0).mul_(unit)
    return sums, int((weight[finite] < 1).sum())


def student_t(trainer: NoisyTrainer, degrees: int, *values: Tensor) -> dict[str, Tensor]:
    """Return standard Student-t noise for every parameter: z / √(χ²/ν), made of ν + 1 Gaussians a coordinate.

    It is bound to ``values``, and to ν.
    """
    shape = (degrees + 1, trainer.size)
    parameters = trainer.parameters
    normals = torch.empty(shape, device=trainer.task.device)
    trainer.draw([normals], 1.0, torch.tensor(degrees), *values)
    flat = normals[0] / normals[1:].square().mean(0).sqrt()
    parts = flat.split([parameter.numel() for parameter in parameters.values()])
    return {name: part.view_as(parameter) for (name, parameter), part in zip(parameters.items(), parts, strict=True)}


def score(noisy: Tensor, scale: float, degrees: int) -> Tensor:
    """Return x (ν + 3) / (ν + (x/s)²)."""
    return noisy * (degrees + 3) / (degrees + (noisy / scale).square())


@register
@dataclass(frozen=True)
class DPGED(Method):
    """Encoded gradients, Student-t noise, denoising. ``--noise-multiplier`` is the noise's scale over the clip norm.

    Attributes:
        degrees: ν, the degrees of freedom of the noise.
        unit: Distance of neighbouring code values, as a share of C/√d.
        levels: Number of positive code values.
        denoise: ``score``, or ``none``.
    """

    card: ClassVar[Card] = Card(
        name="dp-ged",
        title="Gradient encoding with Student-t noise, and denoising",
        protects="one training example",
        relation="add or remove",
        sampling="Poisson",
        paper="Nasr, Shokri and Houmansadr 2020, Improving Deep Learning with DP using Gradient Encoding and Denoising",
        priced="Rényi divergences of Student-t noise, evaluated numerically over the worst code word",
        flaws=(
            "abstract and README publish different figures (MNIST 96.1 % at ε 3.2, 96 % at 2.5); not replicated so far",
            "the published CIFAR-10 setting clips averages of two examples, which doubles what one of them can change",
            "for the same variance Student-t noise costs more than Gaussian noise: its Fisher information is larger",
        ),
    )
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    degrees: int = 9
    unit: float = 0.25
    levels: int = 64
    denoise: Denoise = "score"

    def __post_init__(self) -> None:
        if whole("degrees", self.degrees) < 3:
            raise ValueError(f"degrees must be at least 3, for the noise to have a variance, got {self.degrees}")
        if positive("unit", self.unit) > 1:
            raise ValueError(f"unit must be at most 1, the size of a typical coordinate, got {self.unit:g}")
        whole("levels", self.levels)
        one_of("denoise", self.denoise, get_args(Denoise))

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        return _EncodedTrainer(self.card, self.settled(task), self)
