"""What a privacy guarantee claims, as a curve that releases can be tested against.

A guarantee is more than one (ε, δ): the ledger of a run implies a δ for every ε, and a release that breaks any of them
refutes the claim. Where the noise is Gaussian, the claim also belongs to a family, that of the same releases with more
or less noise, and the audit can say which member of it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, from_gaussian_mechanism
from numpy.typing import NDArray
from scipy.special import log_ndtr

from dphero.accounting import Event, Ledger, price
from dphero.accounting.numerics.curves import gaussian_epsilon, self_compose
from dphero.audit.bounds.statistics import Evidence

_FINE, _POINTS = 1e-3, 1.5e3  # the grid of privacy losses: this fine, unless it would have more points than that
_DELTAS = (1e-9, 1e-7, *np.geomspace(1e-6, 0.5, 30), *np.linspace(0.52, 0.98, 24))


@dataclass(frozen=True, eq=False)
class Claim:
    """A privacy guarantee: for each j, P(in) ≤ e^ε_j P(out) + δ_j for every event, and with in and out exchanged.

    Attributes:
        epsilon: ε at δ, as it would be printed.
        delta: δ.
        curve: Pairs (ε_j, δ_j), as two arrays.
        family: Makes the claim for the noise multiplied by a factor (more noise, smaller ε); ``None`` where the
            releases are of a kind that has no such family.
        mu: μ, where the claim is exactly μ-Gaussian privacy.
        gaussian: Whether the releases are Gaussian and not sampled, whatever is claimed of their noise: then the
            family is that of all μ.
    """

    epsilon: float
    delta: float
    curve: tuple[NDArray[np.float64], NDArray[np.float64]]
    family: Callable[[float], Claim] | None = None
    mu: float | None = None
    gaussian: bool = False

    def refuted(self, evidence: Iterable[Evidence]) -> bool:
        """Return whether any of the evidence breaks the claim. No assumption is made on the mechanism."""
        return any(each.breaks(*self.curve) or (self.mu is not None and each.mu > self.mu) for each in evidence)

    def fitted(self, evidence: Sequence[Evidence]) -> float | None:
        """Return the largest ε of the claim's family that the evidence refutes; ``None`` without a family.

        A lower bound on the true ε *if* the releases are what they claim to be up to the size of the noise.
        """
        if self.gaussian:
            return gaussian_epsilon(max(each.mu for each in evidence), self.delta)
        if self.family is None:
            return None
        low, high = -2.5, 3.5  # the factor's logarithm: with more noise the claim is bolder
        if not self.family(math.exp(high)).refuted(evidence):
            return 0.0
        if self.family(math.exp(low)).refuted(evidence):
            return self.family(math.exp(low)).epsilon
        for _ in range(9):
            middle = (low + high) / 2
            low, high = (low, middle) if self.family(math.exp(middle)).refuted(evidence) else (middle, high)
        return self.family(math.exp(high)).epsilon


def claim_of_ledger(ledger: Ledger, delta: float, accountant: str = "pld") -> Claim:
    """Return what the releases in a ledger claim.

    Raises:
        UnpriceableError: If the accountant cannot price them.
    """
    scalable = all(any(field.name == "noise_multiplier" for field in fields(event)) for event in ledger.counts)
    family = (lambda factor: claim_of_ledger(_scaled(ledger, factor), delta, accountant)) if scalable else None
    charges = ledger.charges()
    squares = [event.mu_squared() for event in charges]
    if charges and all(square is not None for square in squares):
        mu = math.sqrt(sum(count * (square or 0.0) for count, square in zip(charges.values(), squares, strict=True)))
        return Claim(gaussian_epsilon(mu, delta), delta, _gaussian_curve(mu), family, mu, gaussian=True)
    if accountant == "pld" and (found := _loss_distribution(charges)) is not None:
        grid = np.concatenate([np.linspace(0, 1, 30), np.geomspace(1.05, 60, 60)])
        deltas = np.asarray(found.get_delta_for_epsilon(list(grid)), dtype=np.float64)
        return Claim(float(found.get_epsilon_for_delta(delta)), delta, (grid, deltas), family)
    return replace(claim_of_prices(lambda each: price(ledger, each, accountant).epsilon, delta), family=family)


def claim_of_prices(epsilon: Callable[[float], float], delta: float) -> Claim:
    """Return the claim of anything that names an ε for every δ."""
    epsilons = np.array([epsilon(each) for each in _DELTAS])
    return Claim(epsilon(delta), delta, (epsilons, np.array(_DELTAS)))


def _scaled(ledger: Ledger, factor: float) -> Ledger:
    scaled = Ledger()
    for event, count in ledger:
        changed: Any = event
        scaled.record(replace(changed, noise_multiplier=changed.noise_multiplier * factor), count)
    return scaled


def _gaussian_curve(mu: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if not 0 < mu < math.inf:
        return np.zeros(1), np.full(1, 0.0 if mu == 0 else 1.0)
    epsilons = np.linspace(0, gaussian_epsilon(mu, 1e-12), 400)
    kept = log_ndtr(mu / 2 - epsilons / mu)
    removed = epsilons + log_ndtr(-mu / 2 - epsilons / mu)
    return epsilons, np.maximum(np.exp(kept) - np.exp(np.minimum(removed, kept)), 0.0)


def _loss_distribution(charges: Any) -> PrivacyLossDistribution | None:
    """Return the composed privacy-loss distribution of all charges, if every one has its own."""
    if any(event.adaptive for event in charges):
        return None
    losses = [(event.zcdp(), count) for event, count in charges.items()]
    if any(rho is None for rho, _ in losses):
        return None
    widest = sum(count * (rho or 0.0) + 10 * math.sqrt(2 * count * (rho or 0.0)) for rho, count in losses)
    interval = max(_FINE, widest / _POINTS)
    total: PrivacyLossDistribution | None = None
    event: Event
    for event, count in charges.items():
        square = event.mu_squared()
        if square is not None:
            deviation = 1 / math.sqrt(square * count)
            several = from_gaussian_mechanism(standard_deviation=deviation, value_discretization_interval=interval)
        elif (one := event.pld(interval)) is not None:
            several = self_compose(one, count)
        else:
            return None
        total = several if total is None else total.compose(several)
    return total
