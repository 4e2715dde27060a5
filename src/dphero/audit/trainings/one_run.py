"""The one-run audit: m canaries, each in or out by a fair coin, and one training (Steinke, Nasr and Jagielski 2023).

*Gradient canaries* (white box): the attacker chose each canary's gradient, and sees every released gradient. *Input
canaries* (black box): random images with random labels; the attacker sees the final model alone. Both say how much of
the promised ε an attacker of that kind can use up, at the cost of one training; the first comes closer to it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero.audit.bounds.claims import Claim, claim_of_ledger
from dphero.audit.bounds.one_run_bounds import Bound, curve_bound, curve_refuted, pair_bound
from dphero.audit.bounds.statistics import guessing_bound
from dphero.audit.engine_release import Settings
from dphero.audit.trainings.training import Absent, Train, losses
from dphero.engine import PrivacyEngine

__all__ = ["CanaryTraining", "GradientCanaries", "InputCanaries", "OneRun", "Scored", "audit_one_run", "room"]

_IGNORED = -100  # the label without a loss, in PyTorch's cross-entropy: the gradient of its record is zero


@dataclass(frozen=True, eq=False)
class OneRun:
    """What one training gave away.

    Attributes:
        name: What was audited.
        claimed_epsilon: ε as it was printed, at
        delta: δ.
        audited_epsilon: A lower bound on it; it assumes nothing about the mechanism.
        confidence: The probability with which each bound holds, by itself.
        canaries: m.
        guesses: How many coins were guessed, in the test that gave the bound, and
        correct: how many of them rightly.
        scores: What the attacker made of each canary.
        included: Whether it was in.
        bounds: Larger lower bounds, each with what it assumes.
        verdict_epsilon: The bound without assumptions that the verdict rests on: it leaves room for the test of the
            curve.
        curve_refuted: Whether the trade-off curve of the claim is refuted; that assumes nothing about the mechanism.
        noise_multiplier: σ that the claim is about, where there is one.
    """

    name: str
    claimed_epsilon: float
    delta: float
    audited_epsilon: float
    confidence: float
    canaries: int
    guesses: int
    correct: int
    scores: NDArray[np.float64] = field(repr=False)
    included: NDArray[np.bool_] = field(repr=False)
    bounds: tuple[Bound, ...] = ()
    verdict_epsilon: float = 0.0
    curve_refuted: bool = False
    noise_multiplier: float | None = None

    @property
    def refuted(self) -> bool:
        """Whether the claim is refuted: its ε or its curve. Where it is true, with probability ≤ 1 − confidence."""
        return self.curve_refuted or self.verdict_epsilon > self.claimed_epsilon

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as plain values."""
        names = (
            "noise_multiplier",
            "claimed_epsilon",
            "audited_epsilon",
            "confidence",
            "delta",
            "refuted",
            "canaries",
            "guesses",
            "correct",
        )
        values = {name: getattr(self, name) for name in names}
        if math.isinf(self.claimed_epsilon):
            values["claimed_epsilon"] = None
        return {"mechanism": self.name, **values, "bounds": [each.as_dict() for each in self.bounds]}


@dataclass(frozen=True, eq=False)
class Scored:
    """What an attacker made of one training.

    Attributes:
        scores: Of each canary; larger should mean "in".
        epsilon: The claimed ε, given δ.
        claim: The whole claim, given δ, where there is one.
        normal: Whether scores are normal but for what sampling adds: sums of released noise along directions.
        noise_multiplier: σ, where the attacker knows it.
    """

    scores: NDArray[np.float64]
    epsilon: Callable[[float], float]
    claim: Callable[[float], Claim] | None = None
    normal: bool = False
    noise_multiplier: float | None = None


class CanaryTraining(Protocol):
    """A training with some of its canaries, that scores them all; larger should mean "in"."""

    canaries: int

    def __call__(self, included: NDArray[np.bool_], seed: int, /) -> Scored:
        """Train once."""


def audit_one_run(
    train: CanaryTraining, *, name: str, delta: float = 1e-5, confidence: float = 0.95, seed: int = 0
) -> OneRun:
    """Toss the coins, train once, guess the coins, and bound ε by the number of right guesses.

    The verdict rests on two tests that assume nothing about the mechanism and share the error probability: of the
    claimed ε, and of the claimed trade-off curve.

    Args:
        train: The training; must not look at the coins except to include canaries.
        name: For the report.
        delta: δ.
        confidence: Of the bound.
        seed: Decides the coins and the training.
    """
    included = np.random.default_rng([seed, 1]).random(train.canaries) < 0.5
    made = train(included, seed)
    scores, error = made.scores, 1 - confidence
    epsilon, guesses, correct = guessing_bound(scores, included, delta=delta, confidence=confidence)
    claim = None if made.claim is None else made.claim(delta)
    verdict, refuted = epsilon, False
    bounds: list[Bound | None] = []
    if claim is not None and math.isfinite(claim.epsilon):
        verdict, _, _ = guessing_bound(scores, included, delta=delta, confidence=1 - error / 2)
        refuted = curve_refuted(claim, scores, included, error / 2)
        bounds = [curve_bound(claim, scores, included, confidence)]
        if made.normal:
            bounds.append(pair_bound(scores, included, delta, confidence))
    return OneRun(
        name, made.epsilon(delta), delta, epsilon, confidence, train.canaries, guesses, correct, scores, included,
        tuple(each for each in bounds if each is not None), verdict, refuted, made.noise_multiplier,
    )  # fmt: skip


@dataclass(eq=False)
class InputCanaries:
    """Black box: random images with random labels among the data; the score is minus the final loss.

    Args:
        train: Any training.
        images: The data.
        labels: Their labels.
        canaries: m.
        classes: Number of classes.
        seed: Decides the canaries (not the coins).
        absent: What stands for a canary that is "out".
    """

    train: Train
    images: Tensor
    labels: Tensor
    canaries: int
    classes: int
    seed: int = 0
    absent: Absent = "nothing"

    def __call__(self, included: NDArray[np.bool_], seed: int, /) -> Scored:
        """Train once."""
        generator = torch.Generator().manual_seed(self.seed)
        images = torch.randn(self.canaries, *self.images.shape[1:], generator=generator).sign().to(self.images)
        labels = torch.randint(self.classes, (self.canaries,), generator=generator).to(self.labels)
        inside = torch.from_numpy(included).to(images.device)
        planted, classes = self._planted(images, labels, inside, generator)
        trained = self.train(torch.cat([self.images, planted]), torch.cat([self.labels, classes]), seed)
        scores = -losses(trained.model, images, labels)
        return Scored(scores.cpu().numpy(), trained.epsilon, trained.claim)

    def _planted(
        self, images: Tensor, labels: Tensor, inside: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the records that are added to the data: the canaries that are in, and what stands for the others."""
        if self.absent == "nothing":
            return images[inside], labels[inside]
        if self.absent == "blank":
            blank = (~inside).view(-1, *[1] * (images.dim() - 1))
            return images.masked_fill(blank, 0.0), labels.masked_fill(~inside, _IGNORED)
        others = labels + torch.randint(1, self.classes, labels.shape, generator=generator).to(labels)
        return images, torch.where(inside, labels, others % self.classes)


def _plain(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@dataclass(eq=False)
class GradientCanaries:
    """White box: canaries with orthogonal gradients in one linear layer, scored by every released gradient.

    Canary j plants C · 100 u vᵀ, from its own pair of the vectors of two orthonormal bases. The attacker knows the
    other records: v are directions in which they move the layer least. The score is the sum over steps of
    ⟨A⁻² g̃_t, u vᵀ⟩, A being the geometry of the step's noise: all of it is public but g̃, which was released.

    Args:
        settings: How the engine is made.
        model: The model.
        images: The data: what the model takes.
        labels: Their labels.
        canaries: m; at most :func:`room`.
        sample_rate: q, also of the canaries.
        steps: Length of the training.
        optimizer: Makes the optimizer of a module; default plain SGD.
        physical_batch: The most examples per forward pass; default whole lots.
        report: Called with the number of steps taken.
    """

    settings: Settings
    model: nn.Module
    images: Tensor
    labels: Tensor
    canaries: int
    sample_rate: float
    steps: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _plain
    physical_batch: int | None = None
    report: Callable[[int], None] = lambda done: None

    def __call__(self, included: NDArray[np.bool_], seed: int, /) -> Scored:
        """Train once."""
        module = _Ported(copy.deepcopy(self.model))
        rows, columns = self._directions(module, seed)
        inside = torch.from_numpy(included).to(rows.device)
        settings, engine, optimizer = self.settings, PrivacyEngine(), self.optimizer(module)
        _, _, loader = engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=self._records(rows[inside], columns[inside], settings.max_grad_norm),
            noise_multiplier=settings.noise_multiplier,
            max_grad_norm=settings.max_grad_norm,
            mechanism=settings.mechanism,
            guidance=copy.deepcopy(settings.guidance),
            clipping=settings.clipping,
            sample_rate=self.sample_rate,
            expected_batch_size=self.sample_rate * (len(self.images) + self.canaries / 2),
            physical_batch_size=self.physical_batch,
            secure=settings.secure,
            seed=None if settings.secure else seed,
            unsound=settings.mechanism == "published",
            loss_reduction="sum",
        )
        scores = torch.zeros(self.canaries, dtype=torch.float64, device=rows.device)
        while engine.steps < self.steps:
            for images, labels, ordinary, planted, readout in loader:
                geometry, before = engine._attached.mechanism.noise_geometry[module.weight_name], engine.steps
                outputs, ports = module(images, planted)
                entropy = F.cross_entropy(outputs, labels, reduction="none") * ordinary
                (entropy + (ports * readout).sum(1)).sum().backward()
                if engine.steps == before:  # a lot may come in several physical batches
                    continue
                assert module.layer.weight.grad is not None
                seen = geometry.whiten(geometry.whiten(module.layer.weight.grad.double()))
                scores += ((rows.double() @ seen) * columns.double()).sum(1)
                optimizer.step()
                optimizer.zero_grad()
                self.report(engine.steps)
                if engine.steps == self.steps:
                    break
        ledger, sound = engine.ledger.copy(), settings.mechanism != "published"  # whose price is no curve
        claim = (lambda delta: claim_of_ledger(ledger, delta)) if sound else None
        sigma = settings.noise_multiplier
        return Scored(scores.cpu().numpy(), lambda delta: engine.price(delta).epsilon, claim, True, sigma)

    def _directions(self, module: _Ported, seed: int) -> tuple[Tensor, Tensor]:
        """Return u and v of each canary: u from a random basis, v from that of the layer's inputs, no pair twice."""
        outputs, inputs = module.layer.weight.shape
        if self.canaries > outputs * inputs:
            raise ValueError(
                f"{self.canaries} canaries do not fit into the largest linear layer, which has {outputs * inputs} "
                "weights: take fewer"
            )
        generator = torch.Generator().manual_seed(seed)
        rows = torch.linalg.qr(torch.randn(outputs, outputs, generator=generator))[0].to(self.images)
        columns = torch.linalg.eigh(self._moments(module))[1].mT.to(rows)  # what the records move least comes first
        each = torch.arange(self.canaries, device=rows.device)
        return rows[each % outputs], columns[each // outputs]

    @torch.no_grad()
    def _moments(self, module: _Ported) -> Tensor:
        """Return Σ a aᵀ over the inputs a that the layer gets of the records, at the initial weights."""
        total = torch.zeros(module.layer.in_features, module.layer.in_features, dtype=torch.float64)
        total = total.to(self.images.device)

        def look(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            inputs = arguments[0].detach().reshape(-1, total.shape[0]).double()
            total.add_(inputs.mT @ inputs)

        hook = module.layer.register_forward_pre_hook(look)
        for part in self.images.split(500):
            module.model(part)
        hook.remove()
        return total

    def _records(self, rows: Tensor, columns: Tensor, clip_norm: float) -> TensorDataset:
        """Return the data, then the canaries: images that count for nothing, inputs and read-outs that do."""
        data, more = len(self.images), len(rows)
        blank = torch.rand(more, *self.images.shape[1:], generator=torch.Generator().manual_seed(0)).to(self.images)
        return TensorDataset(
            torch.cat([self.images, blank]),
            torch.cat([self.labels, self.labels.new_zeros(more)]),
            torch.cat([rows.new_ones(data), rows.new_zeros(more)]),
            torch.cat([columns.new_zeros(data, columns.shape[1]), 100 * columns]),
            torch.cat([rows.new_zeros(data, rows.shape[1]), clip_norm * rows]),
        )


def room(model: nn.Module) -> int:
    """Return how many gradient canaries fit into a model: the weights of its largest linear layer; 0 without one."""
    return max((layer.weight.numel() for layer in _linear(model).values()), default=0)


def _linear(model: nn.Module) -> dict[str, nn.Linear]:
    layers = {path: layer for path, layer in model.named_modules() if type(layer) is nn.Linear}
    return {path: layer for path, layer in layers.items() if layer.weight.requires_grad}


class _Ported(nn.Module):
    """A model and, beside it, its largest linear layer on an input of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        linear = _linear(model)
        if not linear:
            raise ValueError("the model has no linear layer that is trained: gradient canaries have no place in it")
        self._path = max(linear, key=lambda path: linear[path].weight.numel())
        self.weight_name = f"model.{self._path}.weight" if self._path else "model.weight"

    @property
    def layer(self) -> nn.Linear:
        """The layer that carries the canaries."""
        found = self.model.get_submodule(self._path)
        assert isinstance(found, nn.Linear)
        return found

    def forward(self, images: Tensor, planted: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(images), self.layer(planted)
