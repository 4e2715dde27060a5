"""Gaussian noise on whole data sets, Poisson lots and shuffled epochs; and no noise at all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray

from dphero import _checks as checks
from dphero.accounting.events.base import POISSON, Event, Relation
from dphero.accounting.numerics.curves import poisson_gaussian_pld, poisson_gaussian_rdp


@dataclass(frozen=True)
class NoNoise(Event, kind="no_noise"):
    """A release without noise: ordinary training. Guarantee: none, ε = ∞ at every δ."""

    title: ClassVar[str] = "Exact gradients, without noise"
    sampling: ClassVar[str] = "How examples were chosen does not matter: nothing is protected."

    def mu_squared(self) -> float | None:
        return math.inf


@dataclass(frozen=True)
class Gaussian(Event, kind="gaussian"):
    """A Gaussian release over the whole data set: no sampling, no amplification.

    Guarantee: exactly ``1/sigma``-Gaussian privacy under add-or-remove, for a sum whose terms have norm at most the
    clip bound and noise of standard deviation ``sigma`` times the clip bound.
    """

    noise_multiplier: float

    title: ClassVar[str] = "Gaussian noise on the whole data set"
    sampling: ClassVar[str] = "Every example takes part in every release; nothing is gained from sampling."
    _checks: ClassVar = {"noise_multiplier": checks.noise_multiplier}

    def mu_squared(self) -> float | None:
        return self.noise_multiplier**-2


@dataclass(frozen=True)
class PoissonGaussian(Event, kind="poisson_gaussian"):
    """A Gaussian release over a Poisson lot: each example enters independently with the sample rate.

    Guarantee: under add-or-remove, no worse than telling ``(1-q) N(0, sigma^2) + q N(1, sigma^2)`` from
    ``N(0, sigma^2)``, in either direction. Empty lots must be released too.
    """

    sample_rate: float
    noise_multiplier: float

    title: ClassVar[str] = "Gaussian noise on Poisson lots"
    sampling: ClassVar[str] = POISSON
    _checks: ClassVar = {"sample_rate": checks.sample_rate, "noise_multiplier": checks.noise_multiplier}

    def mu_squared(self) -> float | None:
        """``1 / sigma^2`` when nothing is sampled; a sampled release is not exactly Gaussian private."""
        return None if self.is_sampled else self.noise_multiplier**-2

    def clt_mu_squared(self) -> float | None:
        """``q^2 (e^(1/sigma^2) - 1)``, the limit for many steps; exactly ``1/sigma^2`` without sampling."""
        if not self.is_sampled:
            return self.mu_squared()
        try:
            return self.sample_rate**2 * math.expm1(self.noise_multiplier**-2)
        except OverflowError:
            return math.inf

    def zcdp(self) -> float | None:
        """``1 / (2 sigma^2)``, the price without sampling: zCDP keeps nothing of the amplification."""
        return self.noise_multiplier**-2 / 2

    def rdp(self, orders: Sequence[float]) -> NDArray[np.float64] | None:
        return poisson_gaussian_rdp(self.sample_rate, self.noise_multiplier, orders)

    def pld(self, interval: float) -> PrivacyLossDistribution | None:
        return poisson_gaussian_pld(self.sample_rate, self.noise_multiplier, interval)

    def sampled_gaussian(self) -> tuple[float, float] | None:
        return (self.sample_rate, self.noise_multiplier) if self.is_sampled else None


@dataclass(frozen=True)
class ShuffledGaussian(Event, kind="shuffled_gaussian"):
    """One Gaussian step of an epoch in which a permutation splits the data into disjoint batches.

    Guarantee: an example is in one batch of the epoch, so an epoch costs what its least noisy step costs, without
    amplification; epochs add. The relation is ``zero_out`` (one example's contribution becomes zero, the split and
    the number of examples stay), dp_accounting's ``REPLACE_SPECIAL``. Every new permutation needs a new ``epoch``
    number.
    """

    noise_multiplier: float
    epoch: int

    relation: ClassVar[Relation] = "zero_out"
    title: ClassVar[str] = "Gaussian noise on the disjoint batches of shuffled epochs"
    sampling: ClassVar[str] = (
        "A permutation splits the data into disjoint batches, so each example takes part once in an epoch; "
        "an epoch is charged its least noisy step, epochs add, and nothing is gained from sampling."
    )
    _checks: ClassVar = {"noise_multiplier": checks.noise_multiplier, "epoch": partial(checks.whole, "epoch", least=0)}

    @classmethod
    def charged(cls, counts: Mapping[Any, int]) -> Mapping[Event, int]:
        """One release per epoch, at the epoch's smallest noise multiplier (its largest divergence)."""
        least_noise: dict[int, float] = {}
        for event in counts:
            least_noise[event.epoch] = min(event.noise_multiplier, least_noise.get(event.epoch, math.inf))
        return Counter(cls(noise_multiplier, epoch=0) for noise_multiplier in least_noise.values())

    def check_follows(self, latest: Event) -> None:
        """Refuses to reopen an epoch: a second permutation under an old number would ride for free."""
        assert isinstance(latest, ShuffledGaussian)
        if self.epoch < latest.epoch:
            raise ValueError(
                f"epoch {self.epoch} is recorded after epoch {latest.epoch}: give each new permutation a "
                "larger epoch number"
            )

    def mu_squared(self) -> float | None:
        return self.noise_multiplier**-2


@dataclass(frozen=True)
class AdaptiveGaussian(Event, kind="adaptive_gaussian"):
    """A Poisson Gaussian step whose noise multiplier was itself chosen from earlier outputs.

    Guarantee: given the earlier outputs, that of ``PoissonGaussian``. Composition over steps is fully adaptive, so
    only a Rényi filter at an order fixed in advance covers a run of them. Without noise the price is infinite.
    """

    sample_rate: float
    noise_multiplier: float

    title: ClassVar[str] = "Gaussian noise on Poisson lots, its multiplier chosen from earlier outputs"
    sampling: ClassVar[str] = POISSON
    adaptive: ClassVar[bool] = True
    _checks: ClassVar = {
        "sample_rate": checks.sample_rate,
        "noise_multiplier": partial(checks.noise_multiplier, zero_allowed=True),
    }

    def rdp(self, orders: Sequence[float]) -> NDArray[np.float64] | None:
        return poisson_gaussian_rdp(self.sample_rate, self.noise_multiplier, orders)
