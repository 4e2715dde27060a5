"""IPA-RF: every example is charged by its own gradients, and leaves when its budget is used up.

Feldman and Zrnic 2021, "Individual Privacy Accounting via a Rényi Filter" (arXiv 2008.11193). Fix an order α and a
budget ρ. At step t, example i costs the Rényi divergence at α of a sampled Gaussian whose shift is its own clipped
norm::

    ρ_t,i = D_α(q, σ C / ‖ḡ_t,i‖)            (without sampling α ‖ḡ_t,i‖² / (2 σ² C²))

whether or not it was drawn. If its sum would pass ρ it takes no part from this step on. Then the whole run is
(α, ρ)-Rényi private for everybody, although examples with small gradients may take part far longer than the worst
case allows.

What an example has spent, and who is still there, is as private as the data: it stays in this object and in its
(secret) checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dphero.accounting import CalibrationError, IndividualFilter
from dphero.accounting.events.filters import WHOLE_ORDERS, filter_size
from dphero.accounting.numerics.sampled_rdp import gaussian_log_moments, poisson_divergence
from dphero.accounting.renyi import filter_price
from dphero.gradients.batch import GradientBatch
from dphero.methods.card import Card
from dphero.methods.method import Method, register
from dphero.methods.task import Task
from dphero.methods.trainer import Step, Trainer
from dphero.methods.trainers.noisy_trainer import NoisyTrainer, poisson

_ROUNDING = 1 + 1e-9  # so that a sum of equal costs does not miss its own total by a rounding error


def costs(sample_rate: float, order: int, shifts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what a step costs examples whose clipped norms, over the noise's deviation, are ``shifts``."""
    return poisson_divergence(sample_rate, gaussian_log_moments(order, shifts))


@dataclass(frozen=True)
class Plan:
    """Filter and noise, fixed before the first step from public numbers alone."""

    order: int
    size: float
    noise_multiplier: float

    @classmethod
    def for_epsilon(cls, epsilon: float, delta: float, sample_rate: float, full_steps: float) -> Plan:
        """Return the order with the least noise at which ``full_steps`` steps of full norm are worth (ε, δ).

        Raises:
            CalibrationError: If no order leaves anything to spend.
        """
        plans = []
        for order in WHOLE_ORDERS:
            size = filter_size(epsilon, delta, order)
            if size > 0:
                plans.append(cls(order, size, _least_noise(sample_rate, order, size / full_steps / _ROUNDING)))
        if not plans:
            raise CalibrationError(
                f"epsilon {epsilon:g} at delta {delta:g} is out of reach of a Rényi filter: allow more"
            )
        return min(plans, key=lambda plan: plan.noise_multiplier)

    @classmethod
    def for_noise(cls, noise_multiplier: float, delta: float, sample_rate: float, full_steps: float) -> Plan:
        """Return the filter that ``full_steps`` steps of full norm fill, at the order where it is worth the least ε."""
        plans = []
        for order in WHOLE_ORDERS:
            cost = float(costs(sample_rate, order, np.array(1 / noise_multiplier)))
            if math.isfinite(cost):
                plans.append(cls(order, full_steps * cost * _ROUNDING, noise_multiplier))
        return min(plans, key=lambda plan: filter_price(plan.size, delta, plan.order))


def _least_noise(sample_rate: float, order: int, allowed: float) -> float:
    """Return the least σ at which a step of full norm costs at most ``allowed``, by bisection."""
    low, high = 1e-3, 1e6
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        if float(costs(sample_rate, order, np.array(1 / middle))) <= allowed:
            high = middle
        else:
            low = middle
    return high


class _IndividualTrainer(NoisyTrainer):
    accountants = ("rdp",)

    def __init__(self, card: Card, task: Task, full_norm_share: float) -> None:
        super().__init__(card, task, poisson(task))
        recipe, rate, full_steps = task.recipe, task.sample_rate, math.ceil(full_norm_share * self.steps)
        if recipe.epsilon is not None:
            self.plan = Plan.for_epsilon(recipe.epsilon, recipe.delta, rate, full_steps)
        else:
            assert recipe.noise_multiplier is not None
            self.plan = Plan.for_noise(recipe.noise_multiplier, recipe.delta, rate, full_steps)
        self._spent = torch.zeros(len(task.train), dtype=torch.float64)
        self._active = torch.ones(len(task.train), dtype=torch.bool)

    def take(self) -> Step:
        """Charge everybody who is left, sum over those drawn. If nobody is left there is a step too: that is secret."""
        plan, clip = self.plan, self.task.recipe.clip
        drawn = torch.zeros(len(self._active), dtype=torch.bool)
        drawn[self.rows(self.step)] = True
        sums: dict[str, Tensor] = {}
        loss, count, clipped = torch.zeros((), device=self.task.device), 0, 0
        for rows, batch, losses in self.gradients(self._active.nonzero().squeeze(1)):
            norms = _norms(batch)
            finite = norms.isfinite()
            norms = torch.where(finite, norms, 0.0)  # a gradient that is not a number counts, and costs, nothing
            keep = (self._charge(rows, norms) & drawn[rows]).to(finite.device) & finite
            if keep.any():
                weights = (clip / norms[keep]).clamp(max=1.0)
                _add(sums, batch, keep, weights)
                loss = loss + losses[keep].sum()
                count, clipped = count + len(weights), clipped + int((weights < 1).sum())
        std = plan.noise_multiplier * clip
        # the first step's event stands for all of them: the filter bounds their sum
        self.release(sums, std, None if self._ledger.steps else IndividualFilter(plan.order, plan.size))
        found = self.signal_to_noise(std)
        self.optimizer.step()
        return Step(loss=loss / max(count, 1), clipped=clipped / count if count else None, signal_to_noise=found)

    def _charge(self, rows: Tensor, norms: Tensor) -> Tensor:
        """Charge examples for a step by their norms; return which of them may take part in it."""
        plan = self.plan
        shares = (norms.double().cpu() / self.task.recipe.clip).clamp(max=1.0)  # ‖ḡ_i‖ / C
        shifts = shares / plan.noise_multiplier
        cost = torch.from_numpy(costs(self.task.sample_rate, int(plan.order), shifts.numpy()))
        fits = self._spent[rows] + cost <= plan.size
        self._spent[rows] += torch.where(fits, cost, 0.0)
        self._active[rows[~fits]] = False
        return fits

    def state(self) -> dict[str, Any]:
        plan = {"order": self.plan.order, "size": self.plan.size, "noise_multiplier": self.plan.noise_multiplier}
        return {**super().state(), "plan": plan, "spent": self._spent, "active": self._active}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.plan = Plan(**state["plan"])
        self._spent, self._active = state["spent"].clone(), state["active"].clone()


def _norms(batch: GradientBatch) -> Tensor:
    """Return ‖g_i‖, enlarged by what rounding may have hidden (as the core's clipping does)."""
    slack = 1 + max(piece.rounding for piece in batch.pieces.values())
    return torch.stack(list(batch.square_norms.values())).sum(0).clamp(min=0).sqrt() * slack


def _add(sums: dict[str, Tensor], batch: GradientBatch, keep: Tensor, weights: Tensor) -> None:
    every = bool(keep.all())
    for name, piece in batch.pieces.items():
        part = (piece if every else piece.take(keep)).weighted_sum(weights)
        sums[name] = sums[name].add_(part) if name in sums else part


@register
@dataclass(frozen=True)
class IPARF(Method):
    """Noisy gradient descent under an individual Rényi filter.

    The filter needs the norm of every example's gradient at every step. So a step costs a pass over all data however
    small the lot is, and by default it takes all of it in (lot = N): few steps, each with everybody. With a smaller lot
    the norms of the others are computed too, and cost the same time. The defaults for MNIST are 200 such steps, a
    matter for a GPU.

    Examples whose budget is used up drop out; the paper's other choice, scaling the last gradient down to what is left,
    is not offered.

    Attributes:
        full_norm_share: The noise is such that an example whose gradients all have the clip norm can take part in this
            share of the steps. 1 is plain noisy gradient descent, in which nobody ever leaves; below 1 there is
            less noise, and large gradients leave early.
    """

    card: ClassVar[Card] = Card(
        name="ipa-rf",
        title="Individual accounting by a Rényi filter",
        protects="one training example",
        relation="add or remove",
        sampling="everybody at every step, or Poisson",
        paper="Feldman and Zrnic 2021, Individual Privacy Accounting via a Rényi Filter",
        priced="the size of the filter at an order fixed in advance",
        flaws=(
            "what each example has spent must stay secret; publishing it is not covered",
            "with a clip norm so small that most gradients are clipped there is next to nothing to gain",
            "an implementation that looks at norms only now and then, or only of drawn examples, is not covered",
        ),
    )
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "digits": {"lot": 1437, "epochs": 40, "lr": 4.0},
        "mnist": {"lot": 60000, "epochs": 200, "lr": 16.0},
        "fashion-mnist": {"lot": 60000, "epochs": 200, "lr": 16.0},
        "cifar10": {"lot": 50000, "epochs": 60, "lr": 8.0},
    }

    full_norm_share: float = 0.8

    def __post_init__(self) -> None:
        if not isinstance(self.full_norm_share, int | float) or not 0 < self.full_norm_share <= 1:
            raise ValueError(f"full_norm_share must be above 0 and at most 1, got {self.full_norm_share!r}")

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        return _IndividualTrainer(self.card, self.settled(task), float(self.full_norm_share))
