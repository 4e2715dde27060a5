"""A second opinion on ε: dp-accounting alone, from the fields of the ledger's entries.

Nothing of dphero's own accountants is used, so that a fault in them shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dp_accounting import DpEvent, GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

from dphero.accounting import Event, Gaussian, Ledger, PoissonGaussian, ShuffledGaussian
from dphero.audit.laws.checks import Check

_TOLERANCE = 5e-3
"""Relative: grids differ. Pricing at twice δ makes a difference of some 3 %."""
_FINE, _POINTS, _COARSEST = 1e-4, 1e5, 1.0


def independent_epsilon(ledger: Ledger, delta: float) -> float | None:
    """Return ε of a ledger by dp-accounting; ``None`` where it has no such events.

    Privacy-loss distributions round up; unsampled Gaussian releases, together one, are exact up to the grid.
    """
    events = _events(ledger.counts)
    if events is None:
        return None
    if not events:
        return 0.0
    spread = sum(count * rho + 10 * math.sqrt(2 * count * rho) for _, count, rho in events)
    interval = max(_FINE, spread / _POINTS)
    if interval > _COARSEST:
        return None
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=interval)
    for event, count, _ in events:
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def price_check(ledger: Ledger, delta: float, printed: float, name: str = "price") -> Check:
    """Compare a printed ε with dp-accounting's: less than that is refuted, more is not."""
    other = independent_epsilon(ledger, delta)
    if other is None:
        words = "dp-accounting has no price for these releases: nothing to compare with"
        return Check.exactly(name, words, sound=True)
    words = f"ε = {printed:.4g} printed at δ = {delta:g}, {other:.4g} by dp-accounting alone"
    return Check.exactly(name, words, sound=printed >= other * (1 - _TOLERANCE))


def _events(counts: Mapping[Event, int]) -> list[tuple[DpEvent, int, float]] | None:
    """Return dp-accounting's events, how often each, and 1/(2σ²); ``None`` if there is one of another kind."""
    found: list[tuple[DpEvent, int, float]] = []
    least: dict[int, float] = {}
    for event, count in counts.items():
        if type(event) is PoissonGaussian and event.noise_multiplier > 0:
            made = GaussianDpEvent(event.noise_multiplier)
            sampled = made if event.sample_rate == 1 else PoissonSampledDpEvent(event.sample_rate, made)
            found.append((sampled, count, event.noise_multiplier**-2 / 2))
        elif type(event) is Gaussian and event.noise_multiplier > 0:
            found.append((GaussianDpEvent(event.noise_multiplier), count, event.noise_multiplier**-2 / 2))
        elif type(event) is ShuffledGaussian and event.noise_multiplier > 0:
            least[event.epoch] = min(event.noise_multiplier, least.get(event.epoch, math.inf))
        else:
            return None
    # An example is in one lot of a shuffled epoch: the epoch costs its least noisy one.
    return found + [(GaussianDpEvent(sigma), 1, sigma**-2 / 2) for sigma in least.values()]
