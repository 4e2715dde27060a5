"""SAS-DP: noisy gradients, step sizes found by a private line search, and noise that falls as training needs it.

Chen and Lee 2020, "Stochastic Adaptive Line Search for Differentially Private Optimization" (arXiv 2008.07978). The
paper's code is not public; what follows is built from its abstract::

    gradient   ĝ = (Σ_lot clip_C(g_i) + σ C z) / B
    search     for s = s_max, β s_max, β² s_max, …: accept the first s with
               Σ_lot' [ℓ̄_i(θ) − ℓ̄_i(θ − s ĝ)] − c s B ‖ĝ‖² + Lap(2F/ε₂) ≥ Lap(F/ε₁)          ℓ̄ = loss cut to [0, F]
    noise      σ ← σ / (1 + γ) if ĝ points away from the gradient before it

**Privacy of the search.** One example moves every query by at most F, the threshold's noise is drawn once, and the
search ends at the first success: the sparse vector technique, (ε₁ + ε₂)-differentially private however many trials
failed (Lyu, Su and Li 2017). It looks at a Poisson lot *of its own*: with the gradient's lot the two prices, each
amplified by sampling, would not add up. **Privacy of the run.** σ depends on earlier outputs, so the run is covered by
a Rényi filter (:class:`~dphero.Budget`) whose order and size are fixed before it begins.

Where the source is silent, chosen here: ‖ĝ‖² in the Armijo condition has the known energy of the noise subtracted
(else no step would ever pass); if no trial passes, the smallest step size is taken; a search is made every few steps,
and its step size kept until the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dphero._checks import positive, whole
from dphero.accounting import Budget, CalibrationError, LineSearchStep, Price, Statement
from dphero.accounting.events.filters import filter_size
from dphero.accounting.events.line_search import poisson_pure_rdp
from dphero.accounting.numerics.curves import poisson_gaussian_rdp
from dphero.accounting.numerics.search import safe_value
from dphero.accounting.renyi import filter_price
from dphero.mechanism.clipping import Flat
from dphero.methods.card import Card
from dphero.methods.method import Method, register
from dphero.methods.task import Task
from dphero.methods.trainer import Step, Trainer
from dphero.methods.trainers.noisy_trainer import NoisyTrainer, poisson


class _SearchTrainer(NoisyTrainer):
    accountants = ("filter",)

    def __init__(self, card: Card, task: Task, method: SASDP) -> None:
        super().__init__(card, task, poisson(task))
        recipe = task.recipe
        if recipe.momentum or recipe.optimizer != "sgd":
            raise ValueError(
                f"method {card.name!r} searches its step along the noisy gradient itself: use --optimizer sgd and "
                f"--momentum 0, not {recipe.optimizer} with momentum {recipe.momentum:g}"
            )
        self.method = method
        self.searches = -(-self.steps // method.search_every)
        if recipe.epsilon is not None:
            self.budget = Budget(recipe.epsilon, recipe.delta, "filter")
            self.noise_multiplier = method.first_noise * self._calibrated_noise()
        else:
            assert recipe.noise_multiplier is not None
            self.noise_multiplier = recipe.noise_multiplier
            self.budget = self._budget_for(recipe.noise_multiplier)
        self.search_epsilon = self._calibrated_search()
        self.step_size = recipe.lr
        self.before: list[Tensor] | None = None

    # -- what it costs ------------------------------------------------------------------------------------

    @property
    def filter_size(self) -> float:
        """The divergence that all releases together may have, at the filter's order."""
        return filter_size(self.budget.epsilon, self.budget.delta, self.budget.filter_order)

    def _calibrated_noise(self) -> float:
        """Return the least σ at which all planned gradients stay within their share of the filter."""
        rate, orders = self.task.sample_rate, (self.budget.filter_order,)
        allowed = (1 - self.method.search_share) * self.filter_size / self.steps

        def cost(noise_multiplier: float) -> float:
            return float(poisson_gaussian_rdp(rate, noise_multiplier, orders)[0])

        found = safe_value([cost], allowed, 1.0, safest=1e6, riskiest=0.01, tolerance=1e-6) if allowed > 0 else None
        if found is None:
            raise CalibrationError(
                f"epsilon {self.budget.epsilon:g} at delta {self.budget.delta:g} is out of reach of a Rényi filter "
                f"over {self.steps} steps: take fewer steps or allow more"
            )
        return found

    def _calibrated_search(self) -> float:
        """Return the largest ε of a search at which all of them stay within their share of the filter."""
        rate, orders = self.task.sample_rate, (self.budget.filter_order,)
        allowed = self.method.search_share * self.filter_size / self.searches

        def cost(epsilon: float) -> float:
            return float(poisson_pure_rdp(rate, epsilon, orders)[0])

        found = safe_value([cost], allowed, 0.1, safest=1e-9, riskiest=50.0, tolerance=1e-6)
        assert found is not None, "a search at ε = 1e-9 costs next to nothing"
        return found

    def _budget_for(self, noise_multiplier: float) -> Budget:
        """Return the filter that the planned steps at constant noise fill, at the order where it is worth the least."""
        delta, rate, prices = self.task.recipe.delta, self.task.sample_rate, dict[float, float]()
        for order in map(float, range(2, 65)):
            gradients = self.steps * float(poisson_gaussian_rdp(rate, noise_multiplier, (order,))[0])
            prices[order] = filter_price(gradients / (1 - self.method.search_share) * (1 + 1e-9), delta, order)
        best = min(prices, key=lambda order: prices[order])
        if not 0 < prices[best] < math.inf:
            raise ValueError(
                f"noise_multiplier {noise_multiplier:g} gives a filter of ε = {prices[best]:g}: choose one whose price "
                "is positive and finite, or give --epsilon"
            )
        return Budget(prices[best], delta, "filter", filter_order=best)

    def price(self, delta: float, *, coarse: bool = False) -> Price:
        """Return what the whole filter is worth: the guarantee, since the noise follows the outputs (0 at first)."""
        spent = self.budget.spent(self._ledger)
        if not self._ledger.steps:
            return spent
        epsilon = filter_price(self.filter_size, delta, self.budget.filter_order)
        return Price(epsilon, delta, "filter", spent.relation, is_bound=True)

    def statement(self, delta: float) -> Statement:
        """Return what is protected, at the size of the filter."""
        return replace(super().statement(delta), price=self.price(delta))

    def compared_prices(self, delta: float) -> Mapping[str, Price]:
        """Return what was taken from the filter so far."""
        return {"spent from the filter": self.budget.spent(self._ledger)}

    # -- a step -------------------------------------------------------------------------------------------

    def take(self) -> Step:
        """Release a gradient, look for a step size if it is time, and step."""
        clip, searching = self.task.recipe.clip, self.step % self.method.search_every == 0
        event = LineSearchStep(self.task.sample_rate, self.noise_multiplier, self.search_epsilon if searching else 0.0)
        self.budget.check(self._ledger, event)
        sums, loss, clipped = self.clipped_sum(self.rows(2 * self.step), Flat(clip))
        std = self.noise_multiplier * clip
        self.release(sums, std, event)
        found = self.signal_to_noise(std)
        if searching:
            self.step_size = self._search(self.rows(2 * self.step + 1), std)
        self._follow_direction()
        for group in self.optimizer.param_groups:
            group["lr"] = self.step_size
        self.optimizer.step()
        return Step(loss=loss, clipped=clipped, signal_to_noise=found)

    @torch.no_grad()
    def _search(self, rows: Tensor, std: float) -> float:
        """Return the first step size that passes the noisy Armijo test; the event that covers it is on record."""
        method, lot = self.method, self.task.recipe.lot
        parameters: list[Tensor] = list(self.parameters.values())
        start = [parameter.clone() for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters]
        energy = torch.stack(torch._foreach_norm(gradients)).square().sum().item()  # type: ignore[arg-type]
        energy = max(energy - self.size * (std / lot) ** 2, 0.0)
        half = self.search_epsilon / 2
        losses = self._losses(rows)
        before = self._clipped_loss(losses)
        noise = self._laplace(method.trials + 1, losses)
        threshold = noise[0] * method.loss_clip / half
        size = method.largest * self.task.recipe.lr
        try:
            for trial in range(method.trials):
                size = method.largest * self.task.recipe.lr * method.shrink**trial
                torch._foreach_copy_(parameters, start)
                torch._foreach_add_(parameters, gradients, alpha=-size)  # type: ignore[arg-type]
                query = before - self._clipped_loss(self._losses(rows)) - method.decrease * size * lot * energy
                if query + noise[trial + 1] * 2 * method.loss_clip / half >= threshold:
                    break
        finally:
            torch._foreach_copy_(parameters, start)
        return size

    def _losses(self, rows: Tensor) -> Tensor:
        """Return the losses of rows."""
        inputs, labels = self.task.train.tensors
        found = [torch.zeros(0, device=self.task.device)]
        self.module.eval()
        for part in rows.split(self.chunk) if len(rows) else ():
            index = part.to(self.task.device)
            found.append(F.cross_entropy(self.module(inputs[index]), labels[index], reduction="none"))
        self.module.train()
        return torch.cat(found)

    def _clipped_loss(self, losses: Tensor) -> float:
        """Return the sum of losses, each cut to [0, F]; an example moves it by at most F."""
        bound = self.method.loss_clip
        return losses.nan_to_num(bound, bound, 0.0).clamp(0, bound).sum(dtype=torch.float64).item()

    def _laplace(self, count: int, losses: Tensor) -> list[float]:
        """Return standard Laplace noise: the difference of two exponentials, each half of two squared Gaussians.

        It is bound to the losses that the search begins with, to the gradient that it follows, and to all settings of
        the search: two searches under one noise would tell how their queries compare.
        """
        method, lot, lr = self.method, self.task.recipe.lot, self.task.recipe.lr
        settings = [self.search_epsilon, method.loss_clip, method.largest, method.shrink, method.decrease, lr, lot]
        normals = torch.empty(4, count, dtype=torch.float64)
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        self.draw([normals], 1.0, torch.tensor([*settings, count], dtype=torch.float64), losses, *gradients)
        first, second, third, fourth = normals.square().unbind(0)
        return ((first + second - third - fourth) / 2).tolist()

    @torch.no_grad()
    def _follow_direction(self) -> None:
        """Lower the noise of later steps if this gradient points away from the last one: released things only."""
        now = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if self.before is not None:
            product = torch.stack([(a * b).sum() for a, b in zip(now, self.before, strict=True)]).sum()
            norms = [torch.stack(torch._foreach_norm(each)).square().sum().sqrt() for each in (now, self.before)]
            if (product / (norms[0] * norms[1])).item() < self.method.direction:
                self.noise_multiplier /= 1 + self.method.raise_by
        self.before = now

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "noise_multiplier": self.noise_multiplier,
            "step_size": self.step_size,
            "before": self.before,
            "search_epsilon": self.search_epsilon,
            "filter": [self.budget.epsilon, self.budget.delta, self.budget.filter_order],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.noise_multiplier, self.step_size = float(state["noise_multiplier"]), float(state["step_size"])
        self.search_epsilon = float(state["search_epsilon"])
        if "filter" in state:  # what was fixed before the first release is what holds; older states do not tell
            epsilon, delta, order = state["filter"]
            self.budget = Budget(epsilon, delta, "filter", filter_order=order)
        before = state["before"]
        self.before = None if before is None else [tensor.to(self.task.device) for tensor in before]


@register
@dataclass(frozen=True)
class SASDP(Method):
    """Noisy gradient descent with a private line search, under a Rényi filter.

    With ``--epsilon`` the filter has that size, and training ends when it is used up. With ``--noise-multiplier`` the
    filter is what the planned steps would cost at that noise; if the noise falls meanwhile, training ends earlier.

    Attributes:
        search_share: The share of the filter that all searches together may take; ε₁ = ε₂ of one search follow.
        search_every: Steps from one search to the next.
        loss_clip: F, the bound of one example's loss in the search.
        largest: The first step size tried, over the recipe's learning rate.
        shrink: β, from one trial to the next.
        trials: The most trials in a search.
        decrease: c of the Armijo condition.
        direction: The cosine of two consecutive noisy gradients below which the noise falls.
        raise_by: γ.
        first_noise: The first noise multiplier, over the one that all planned steps could have.
    """

    card: ClassVar[Card] = Card(
        name="sas-dp",
        title="Private line search and falling noise",
        protects="one training example",
        relation="add or remove",
        sampling="Poisson, lots of their own for gradient and search",
        paper="Chen and Lee 2020, Stochastic Adaptive Line Search for Differentially Private Optimization",
        priced="a Rényi filter of fixed order and size over all gradients and searches",
        flaws=(
            "no public code: rebuilt from the abstract, with settings of our own",
            "published accuracies lie below plain DP-SGD of the same year",
            "losses that are cut off bias the search",
        ),
    )
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "*": {"momentum": 0.0},
        "digits": {"lr": 3.0},
        "mnist": {"lr": 8.0},
        "fashion-mnist": {"lr": 16.0},
        "cifar10": {"lr": 16.0},
    }

    search_share: float = 0.1
    search_every: int = 10
    loss_clip: float = 3.0
    largest: float = 4.0
    shrink: float = 0.5
    trials: int = 5
    decrease: float = 0.1
    direction: float = 0.0
    raise_by: float = 0.002
    first_noise: float = 1.1

    def __post_init__(self) -> None:
        for name in ("loss_clip", "largest", "decrease", "first_noise"):
            positive(name, getattr(self, name))
        whole("search_every", self.search_every)
        whole("trials", self.trials)
        for name in ("search_share", "shrink"):
            if positive(name, getattr(self, name)) >= 1:
                raise ValueError(f"{name} must be above 0 and below 1, got {getattr(self, name):g}")
        if not -1 <= self.direction <= 1:
            raise ValueError(f"direction is a cosine between -1 and 1, got {self.direction:g}")
        if self.raise_by < 0 or not math.isfinite(self.raise_by):
            raise ValueError(f"raise_by must be at least 0, got {self.raise_by:g}")

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        return _SearchTrainer(self.card, self.settled(task), self)
