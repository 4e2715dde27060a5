"""DP-MP: shuffled epochs, priced as such, with noise that decays from epoch to epoch.

Yu, Liu, Pu, Gursoy and Truex 2019, "Differentially Private Model Publishing for Deep Learning" (arXiv 1904.02200). A
permutation splits every epoch into disjoint batches, so an example is in one of them, and the epoch e costs what one
release costs, ρ_e = 1/(2σ_e²); epochs add. No gain from sampling is claimed: under this price a run pays far more than
the same run on Poisson lots, which is why its published ε = 6.78 must not be read beside theirs.

Neighbours: one example's contribution becomes zero. The number of records is public, else batches would shift.

Schedules of the noise: :mod:`dphero.methods.own_mechanism.noise_schedules`.

``validation`` needs accuracies on examples that are not trained on, drawn at random, once: data may be sorted by class.
They are private too, so the count of right answers gets noise. The held-out examples are one more disjoint batch of
the epoch: at the epoch's own noise multiplier the check costs nothing beyond it. But the noise now depends on earlier
outputs, and what holds is a budget ρ fixed in advance: training ends before an epoch that does not fit in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from torch import Tensor

from dphero._checks import one_of, positive, whole
from dphero.accounting import (
    BudgetExhausted,
    Event,
    Ledger,
    Price,
    ShuffledFilter,
    ShuffledGaussian,
    price,
)
from dphero.mechanism.clipping import PerLayer
from dphero.mechanism.parameters import describe
from dphero.methods.card import Card
from dphero.methods.method import Method, register
from dphero.methods.own_mechanism.noise_schedules import DECAYS, Schedule, relative_noise, within
from dphero.methods.task import Task
from dphero.methods.trainer import Step, Trainer
from dphero.methods.trainers.base_trainer import key_of
from dphero.methods.trainers.noisy_trainer import NoisyTrainer, lot_key
from dphero.sampling import ShuffleSampler

_RISE = 0.01  # accuracy that has risen less has stopped rising


class _ShuffledTrainer(NoisyTrainer):
    """Trains in shuffled epochs whose noise is known in advance."""

    accountants: ClassVar[tuple[str, ...]] = ("pld", "rdp", "zcdp", "gdp")

    def __init__(self, card: Card, task: Task, method: DPMP, held_out: int = 0) -> None:
        recipe = task.recipe
        if task.records != len(task.train):
            raise ValueError(
                f"method {card.name!r} shuffles the data, so its number of records itself must be public: give "
                f"--dataset-size public, not {task.records}"
            )
        size = len(task.train) - held_out
        super().__init__(card, task, ShuffleSampler(size, min(recipe.lot, size), lot_key(task)))
        self.method = method
        self.lots_per_epoch = self.sampler.lots_per_epoch
        self.steps = max(1, round(recipe.epochs * self.lots_per_epoch))
        self.epochs = -(-self.steps // self.lots_per_epoch)
        layers = {name: block.layer for name, block in describe(self.module, self.parameters).items()}
        parts = layers if method.per_tensor else dict.fromkeys(layers, "all")
        self.parts = len(set(parts.values()))
        # PerLayer cuts each part to C: its bound on the whole is C √(number of parts)
        self.clipping = PerLayer(recipe.clip * math.sqrt(self.parts), parts)
        self.noise_multipliers: list[float] = []
        self.plan()

    def plan(self) -> None:
        """Fix σ of every epoch, from public numbers."""
        recipe, method = self.task.recipe, self.method
        shape = relative_noise(method.schedule, method.rate, method.period, self.epochs)
        first = recipe.noise_multiplier
        if first is None:
            assert recipe.epsilon is not None

            def cost(sigma: float) -> float:
                return self._price([sigma * part for part in shape], recipe.delta).epsilon

            first = within(recipe.epsilon, cost, safest=1e6, riskiest=1e-2, what="a first noise multiplier of")
        self.noise_multipliers = [first * part for part in shape]

    def _price(self, noise_multipliers: list[float], delta: float) -> Price:
        ledger = Ledger()
        for epoch, sigma in enumerate(noise_multipliers):
            ledger.record(ShuffledGaussian(sigma / math.sqrt(self.parts), epoch))
        return price(ledger, delta, self.accountant)

    def take(self) -> Step:
        """Release the noisy sum of the next batch of the epoch, and take the optimizer's step."""
        epoch = self.step // self.lots_per_epoch
        sigma = self.noise_of(epoch)
        sums, loss, clipped = self.clipped_sum(self.rows(self.step), self.clipping)
        std = sigma * self.task.recipe.clip
        self.release(sums, std, self.event(sigma, epoch))
        found = self.signal_to_noise(std)
        self.optimizer.step()
        return Step(loss=loss, clipped=clipped, signal_to_noise=found)

    def noise_of(self, epoch: int) -> float:
        """Return σ of an epoch; raise if it does not fit in."""
        return self.noise_multipliers[epoch]

    def event(self, sigma: float, epoch: int) -> Event | None:
        """Return what a release costs: parts of norm C each, with noise σ C, are one of norm C √parts."""
        return ShuffledGaussian(sigma / math.sqrt(self.parts), epoch)

    def compared_prices(self, delta: float) -> Mapping[str, Price]:
        """Return the zCDP price, as the paper converts it, and what the published code would count."""
        found = {"zCDP": price(self._ledger, delta, "zcdp")}
        if self.parts > 1:
            ledger = Ledger()
            for event, count in self._ledger:
                assert isinstance(event, ShuffledGaussian)
                ledger.record(replace(event, noise_multiplier=event.noise_multiplier * math.sqrt(self.parts)), count)
            warning = "the published code charges one of the tensors that it noises apart; not a privacy guarantee"
            claimed = replace(price(ledger, delta, "zcdp"), is_bound=False, warning=warning)
            found["as the published code counts"] = claimed
        return found

    def state(self) -> dict[str, Any]:
        return {**super().state(), "noise_multipliers": self.noise_multipliers}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.noise_multipliers = list(state["noise_multipliers"])


class _ValidatedTrainer(_ShuffledTrainer):
    """Lowers the noise when noisy validation accuracy has stopped rising, within a budget ρ fixed in advance."""

    accountants = ("rdp", "zcdp")

    def __init__(self, card: Card, task: Task, method: DPMP) -> None:
        self.held_out = max(1, round(method.validation_share * len(task.train)))
        super().__init__(card, task, method, self.held_out)
        # who is held out depends on the number of records alone, which is public; it need not even be secret
        random = np.random.Generator(np.random.Philox(key=key_of(task.recipe.seed, "held out")))
        self.order = torch.from_numpy(random.permutation(len(task.train)))  # those held out are the last

    def rows(self, lot: int) -> Tensor:
        """Return the rows of the examples of a lot, none of which is held out."""
        return self.order[super().rows(lot)]

    def plan(self) -> None:
        """Fix the budget and the first noise multiplier."""
        recipe, start = self.task.recipe, self.method.first_noise
        if recipe.noise_multiplier is not None:
            self.sigma = recipe.noise_multiplier
            self.rho = self.epochs * self._rho_of(self.sigma / start) * (1 + 1e-9)
        else:
            assert recipe.epsilon is not None

            def cost(rho: float) -> float:
                ledger = Ledger()
                ledger.record(ShuffledFilter(rho))
                return price(ledger, recipe.delta, self.accountant).epsilon

            self.rho = within(recipe.epsilon, cost, safest=1e-12, riskiest=1e4, what="a budget ρ of")
            self.sigma = start * math.sqrt(self.epochs * self.parts / (2 * self.rho))
        self.spent = 0.0
        self.accuracies: list[float] = []

    def _rho_of(self, sigma: float) -> float:
        return self.parts / (2 * sigma**2)

    def noise_of(self, epoch: int) -> float:
        """Return σ, at the first batch of an epoch after taking the epoch from the budget.

        Raises:
            BudgetExhausted: If the epoch does not fit in; nothing is released then.
        """
        if self.step % self.lots_per_epoch == 0:
            cost = self._rho_of(self.sigma)
            if self.spent + cost > self.rho:
                raise BudgetExhausted(
                    f"the budget of rho {self.rho:.4g} is used up: {epoch} epochs took {self.spent:.4g}, and one more "
                    f"at noise multiplier {self.sigma:.4g} would take {cost:.4g}"
                )
            self.spent += cost
        return self.sigma

    def event(self, sigma: float, epoch: int) -> Event | None:
        """Return the whole budget, once: the noise of single epochs was chosen from earlier outputs."""
        return None if self._ledger.steps else ShuffledFilter(self.rho)

    def take(self) -> Step:
        """Take a step; check the accuracy after the last batch of an epoch."""
        step = super().take()
        if (self.step + 1) % self.lots_per_epoch == 0:
            self._check()
        return step

    def _check(self) -> None:
        """Release a noisy accuracy, and lower the noise of later epochs if it has stopped rising."""
        noise = torch.empty((), dtype=torch.float64)
        # an example moves the count by at most 1: this multiplier makes the check cost what a batch costs
        count = self._count()
        self.draw([noise], self.sigma / math.sqrt(self.parts), torch.tensor(count))
        self.accuracies.append((count + noise.item()) / self.held_out)
        checks, past = self.method.checks, self.accuracies
        if len(past) >= 2 * checks and len(past) % checks == 0:
            rise = sum(past[-checks:]) - sum(past[-2 * checks : -checks])
            if rise / checks < _RISE:
                self.sigma *= self.method.rate

    @torch.no_grad()
    def _count(self) -> int:
        """Return how many of the held-out examples are classified rightly: private, not to be shown without noise."""
        rows = self.order[-self.held_out :].to(self.task.device)
        inputs, labels = (tensor[rows] for tensor in self.task.train.tensors)
        self.module.eval()
        right = sum(
            int((self.module(part).argmax(1) == label).sum())
            for part, label in zip(inputs.split(self.chunk), labels.split(self.chunk), strict=True)
        )
        self.module.train()
        return right

    def compared_prices(self, delta: float) -> Mapping[str, Price]:
        """Return the zCDP price, as the paper converts it."""
        return {"zCDP": price(self._ledger, delta, "zcdp")}

    def state(self) -> dict[str, Any]:
        own = {"rho": self.rho, "spent": self.spent, "sigma": self.sigma, "accuracies": self.accuracies}
        return {**super().state(), **own, "order": self.order}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.rho, self.spent, self.sigma = float(state["rho"]), float(state["spent"]), float(state["sigma"])
        self.accuracies = list(state["accuracies"])
        # older runs go on with the rows as they are: others would be in two batches of one epoch
        self.order = state["order"].cpu() if "order" in state else torch.arange(len(self.order))


@register
@dataclass(frozen=True)
class DPMP(Method):
    """Shuffled epochs with decaying noise. ``--noise-multiplier`` is σ₀.

    The published pipeline also projects the images on private principal components, a release of its own (σ = 16, so
    ρ = 1/512) that its ε leaves out; it is not part of this method.

    Attributes:
        schedule: How σ decays; see the module.
        decay: k; the published number for the schedule unless given.
        period: Epochs between two steps of ``step``.
        per_tensor: Clip each layer to C and noise it by σ C apart, as the published code does. Each layer is then
            charged; the published ε counts one of them.
        validation_share: Share of the examples held out for ``validation``, at random; they are not trained on.
        checks: ``validation`` compares the mean accuracy of so many epochs with that of as many before.
        first_noise: σ₀ of ``validation``, over the noise at which all planned epochs would fit in.
    """

    card: ClassVar[Card] = Card(
        name="dp-mp",
        title="Shuffled epochs with decaying noise",
        protects="one training example",
        relation="zero out (the number of records is public)",
        sampling="shuffled epochs, no gain from sampling",
        paper="Yu, Liu, Pu, Gursoy and Truex 2019, Differentially Private Model Publishing for Deep Learning",
        priced="one release per epoch; epochs add, as Gaussian releases do (zCDP as in the paper beside it)",
        flaws=(
            "the published ε = 6.78 has no gain from sampling: the same noise on Poisson lots would cost 0.44",
            "the published code noises two tensors and a PCA and charges one tensor: truly 10.05 instead of 6.78",
            "its batches come from an endless queue, not from an exact split of each epoch",
        ),
    )
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "digits": {"lot": 512, "epochs": 40},
        "mnist": {"lot": 4096, "epochs": 30, "lr": 2.0},
        "fashion-mnist": {"lot": 4096, "epochs": 30, "lr": 2.0},
        "cifar10": {"lot": 8192, "epochs": 20, "lr": 4.0},
    }

    schedule: Schedule = "exponential"
    decay: float | None = None
    period: int = 10
    per_tensor: bool = False
    validation_share: float = 0.05
    checks: int = 2
    first_noise: float = 1.25

    def __post_init__(self) -> None:
        one_of("schedule", self.schedule, get_args(Schedule))
        if self.decay is not None:
            positive("decay", self.decay)
            if self.schedule in ("step", "validation") and self.decay > 1:
                raise ValueError(f"decay of schedule {self.schedule!r} is a factor of at most 1, got {self.decay:g}")
        whole("period", self.period)
        whole("checks", self.checks)
        positive("first_noise", self.first_noise)
        if positive("validation_share", self.validation_share) >= 1:
            raise ValueError(f"validation_share must be below 1, got {self.validation_share:g}")

    @property
    def rate(self) -> float:
        """The decay that holds."""
        return DECAYS[self.schedule] if self.decay is None else self.decay

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        kind = _ValidatedTrainer if self.schedule == "validation" else _ShuffledTrainer
        return kind(self.card, self.settled(task), self)
