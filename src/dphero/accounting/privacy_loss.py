"""Privacy-loss distributions: the accountant ``pld``, a tight bound by dp_accounting's numerical composition."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, from_gaussian_mechanism

from dphero.accounting.events.base import Event
from dphero.accounting.numerics.curves import gaussian_epsilon, rdp_epsilon, self_compose
from dphero.accounting.numerics.many import compose_many
from dphero.accounting.prices import Answer, Query, UnpriceableError
from dphero.accounting.renyi import rdp, sampled_gaussians

MAX_STEPS = 10**6
"""Searches end here. Beyond it ``pld`` runs out of floating-point digits and falls back on ``rdp``."""

_FINEST, _FINE, _COARSE = 1e-7, 1e-4, 1e-3
_WIDEST = 0.1
_FEW = 16  # different events that are composed one by one
_MAX_POINTS_ONE, _MAX_POINTS_ALL = 2e5, 4e6  # a few seconds and a few hundred megabytes at most
_GUARD_ORDERS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # whole and few: quick

Composed = tuple[PrivacyLossDistribution, float] | None  # the distribution and what is left of delta


def pld(query: Query) -> Answer:
    """Compose the privacy losses; unsampled Gaussians are exact, and the rest is rounded up on a grid."""
    charges, delta = query.charges, query.delta
    mu, rest = split(charges)
    if not rest:
        return Answer(gaussian_epsilon(mu, delta))
    composed = compose(rest, mu, delta, coarse=query.coarse)
    if composed is None:
        return _by_rdp(query)
    total, delta_left = composed
    epsilon = float(total.get_epsilon_for_delta(delta_left))
    if len(rest) > _FEW:
        epsilon = _up_to_nine_digits(epsilon)
    if math.isinf(epsilon) and all(event.rdp(_GUARD_ORDERS) is not None for event in charges):
        other = _by_rdp(query)  # losses of some 700 overflow in dp_accounting
        return other if math.isfinite(other.epsilon) else Answer(epsilon)
    return Answer(epsilon)


def split(charges: Mapping[Event, int]) -> tuple[float, dict[Event, int]]:
    """Return the mu of all releases that are exactly Gaussian private, taken together, and the other releases."""
    exact = {event: event.mu_squared() for event in charges}
    mu = math.sqrt(sum(charges[event] * value for event, value in exact.items() if value is not None))
    return mu, {event: count for event, count in charges.items() if exact[event] is None}


def compose(charges: Mapping[Event, int], mu: float, delta: float, *, coarse: bool = False) -> Composed:
    """Compose at least one release with each other and with mu-Gaussian privacy, to be read at ``delta``.

    Of many different sampled Gaussians these are composed together, all else one by one. Returned are the distribution
    of the privacy losses, rounded pessimistically, and what the FFT's rounding leaves of delta; ``None`` where floating
    point has no digits left.
    """
    together, others = sampled_gaussians(charges)
    if len(together) <= _FEW:
        together, others = Counter(), dict(charges)
    steps = sum(others.values())
    rounding = _rounding(len(others), steps) if others or mu > 0 else 0.0
    if sum(charges.values()) > MAX_STEPS or delta < 2 * rounding:
        return None
    if together:
        interval, start = compose_many(together, delta, coarse=coarse)
    else:
        interval, start = _interval(others, steps, mu, coarse), None
    return None if interval > _WIDEST else (_one_by_one(others, mu, interval, start), delta - rounding)


def _up_to_nine_digits(epsilon: float) -> float:
    """Round up: the last digits depend on the order of multiplication, and so on what was priced before."""
    if not 0 < epsilon < math.inf:
        return epsilon
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 8)
    return math.ceil(epsilon / unit) * unit


def _rounding(different: int, steps: int) -> float:
    """What the FFT can leave in the tail: about 1e-16 per composition.

    Taking it off delta keeps the price a bound; once it is of delta's own size the tail says nothing (dp_accounting
    then reports too much or too little).
    """
    return 2e-14 * (1 + different) + 1e-15 * steps


def _one_by_one(
    charges: Mapping[Event, int], mu: float, interval: float, total: PrivacyLossDistribution | None
) -> PrivacyLossDistribution:
    for event, count in charges.items():
        one = event.pld(interval)
        if one is None:
            raise UnpriceableError(event, "pld", "it has no privacy-loss distribution; try accountant 'rdp'")
        several = self_compose(one, count)
        total = several if total is None else total.compose(several)
    assert total is not None
    if mu > 0:
        gaussian = from_gaussian_mechanism(standard_deviation=1 / mu, value_discretization_interval=interval)
        total = total.compose(gaussian)
    return total


def _by_rdp(query: Query) -> Answer:
    """Answer by ``rdp``, and say so."""
    warning = "so many steps, so small a delta or so little noise is beyond pld's digits: priced by rdp"
    return replace(rdp(query), warning=warning, accountant="rdp")


def _interval(charges: Mapping[Event, int], steps: int, mu: float, coarse: bool) -> float:
    """The grid: 1e-4, or up to 1e-3 if coarse; finer where the losses are tiny, wider where they are huge.

    Rounding each of T losses adds variance of about ``T interval^2``, so the grid stays at a fifth of the
    losses' own deviation, whose square is at most their divergence at order 2. Little noise spreads the
    losses over thousands: a wider grid keeps memory bounded, and is still a bound. How far they spread is
    read off the Rényi divergences.
    """
    curves = [(event.rdp(_GUARD_ORDERS), count) for event, count in charges.items()]
    known = [(curve, count) for curve, count in curves if curve is not None]
    total = np.sum([np.zeros(len(_GUARD_ORDERS)), *(count * curve for curve, count in known)], axis=0)
    usual = _COARSE if coarse else _FINE
    all_known = len(known) == len(curves)  # of others nobody knows whether their losses are tiny
    interval = min(max(0.2 * math.sqrt(total[0] / steps), _FINEST), usual) if all_known else usual
    spreads = [rdp_epsilon(_GUARD_ORDERS, curve, math.exp(-50)) for curve, _ in known]
    widest = max(mu * mu / 2 + 10 * mu, *spreads, 0.0)
    everything = rdp_epsilon(_GUARD_ORDERS, total, 1e-15) + widest
    return max(interval, widest / _MAX_POINTS_ONE, everything / _MAX_POINTS_ALL)
