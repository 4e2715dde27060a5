"""Accountants: what a ledger costs, and how far that number may be trusted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, from_gaussian_mechanism
from numpy.typing import NDArray

from dphero import _checks as checks
from dphero.accounting.events.base import Event, Relation
from dphero.accounting.ledger import Ledger
from dphero.accounting.numerics.curves import RDP_ORDERS, gaussian_epsilon, rdp_epsilon, self_compose
from dphero.accounting.numerics.many import compose_many, sum_of_divergences

DEFAULT_FILTER_ORDER = 8.0
"""The Rényi filter's order unless another is fixed in advance; near the best for epsilon 3 at delta 1e-5."""

MAX_STEPS = 10**6
"""Searches end here. Beyond it ``pld`` runs out of floating-point digits and falls back on ``rdp``."""

_FINEST, _FINE, _COARSE = 1e-7, 1e-4, 1e-3
_WIDEST = 0.1
_FEW = 16  # different events that are composed one by one
_MANY_CURVES = 128  # more different Rényi curves than that are bounded by those of a few
_MAX_POINTS_ONE, _MAX_POINTS_ALL = 2e5, 4e6  # a few seconds and a few hundred megabytes at most
_GUARD_ORDERS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # whole and few: quick


class UnpriceableError(ValueError):
    """An accountant was asked for the price of an event that it cannot price."""

    def __init__(self, event: Event, accountant: str, reason: str) -> None:
        super().__init__(f"accountant {accountant!r} cannot price {event}: {reason}")
        self.event, self.accountant = event, accountant


@dataclass(frozen=True)
class Price:
    """What a ledger costs.

    Attributes:
        epsilon: The privacy loss at ``delta``; infinite when nothing is guaranteed.
        delta: The probability left out of account.
        accountant: The accountant that answered.
        relation: The neighbouring relation that the price is about.
        is_bound: Whether (epsilon, delta) is a proven upper bound; ``False`` for approximations and claims.
        warning: What a reader must know before using the number, if anything.
    """

    epsilon: float
    delta: float
    accountant: str
    relation: Relation
    is_bound: bool
    warning: str | None = None


@dataclass(frozen=True)
class _Answer:
    epsilon: float
    is_bound: bool = True
    warning: str | None = None
    accountant: str | None = None


def price(
    ledger: Ledger,
    delta: float,
    accountant: str = "pld",
    *,
    coarse: bool = False,
    filter_order: float = DEFAULT_FILTER_ORDER,
) -> Price:
    """Price what was released so far; an empty ledger costs nothing.

    Accountants:
        ``pld``: privacy-loss distributions, tight (dp_accounting, grid 1e-4 or finer). Unsampled Gaussians are exact.
        ``rdp``: Rényi divergences, the best of many orders.
        ``zcdp``: ``rho = sum rho_t``, ``epsilon = rho + 2 sqrt(rho ln(1/delta))``; sampling earns nothing
            here.
        ``gdp``: the central-limit approximation of Gaussian privacy; under-reports sampled releases.
        ``filter``: Rényi divergences at the one order ``filter_order``; the only one for adaptive events.
        ``pure``: ``sum epsilon_t`` of releases that need no delta; it holds at every delta.

    Guarantee:
        If ``is_bound``, the releases in the ledger together are (epsilon, delta)-differentially private for
        neighbours under ``relation``. Grids round pessimistically, and the rounding of the FFT is taken off
        delta.

    Args:
        ledger: What was released.
        delta: The probability left out of account, in (0, 1).
        accountant: One of the names above.
        coarse: Let ``pld`` use a ten times coarser grid: faster, slightly larger, still a bound.
        filter_order: The order of ``filter``. It must have been fixed before the run.

    Raises:
        UnpriceableError: If the accountant cannot price an event.
        ValueError: If an argument is out of range or the accountant is unknown.
    """
    delta = checks.delta(delta)
    filter_order = _check_order(filter_order)
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant {accountant!r} is unknown: use one of {', '.join(ACCOUNTANTS)}")
    charges = ledger.charges()
    answer = ACCOUNTANTS[accountant](charges, delta, coarse, filter_order) if charges else _Answer(0.0)
    return Price(
        epsilon=answer.epsilon,
        delta=delta,
        accountant=answer.accountant or accountant,
        relation=ledger.relation or "add_or_remove",
        is_bound=answer.is_bound,
        warning=answer.warning,
    )


def claimed_by_paper(noise_multipliers: Sequence[float], delta: float) -> Price:
    """The epsilon that the DP-Hero paper claims.

    ``rho + 2 sqrt(rho ln(1/delta))`` with ``rho = max_t 1 / (2 sigma_t^2)``.

    Guarantee:
        None. Steps compose by a sum, not by a maximum, and heterogeneous noise has the strength of its
        weakest direction. The number does not even depend on how long one trains; it is here to be compared
        with true prices.
    """
    delta = checks.delta(delta)
    rho = max((checks.noise_multiplier(value) ** -2 / 2 for value in noise_multipliers), default=0.0)
    warning = (
        "unsound: the paper's claim takes the largest step instead of the sum over steps, and ignores the "
        "weakest direction of its noise; it is not a privacy guarantee"
    )
    return Price(_zcdp_epsilon(rho, delta), delta, "claimed_by_paper", "add_or_remove", False, warning)


def filter_price(divergence: float, delta: float, order: float) -> float:
    """The epsilon at ``delta`` of a Rényi divergence at one order."""
    return rdp_epsilon((order,), np.array([divergence]), delta)


def filter_divergence(event: Event, order: float) -> float:
    """What one release of ``event`` takes from a Rényi filter at ``order``."""
    divergences = event.rdp((order,))
    if divergences is None:
        raise UnpriceableError(event, "filter", "it has no Rényi divergence")
    return float(divergences[0])


def _check_order(order: float) -> float:
    order = checks.finite("filter_order", order, "fix one Rényi order before the run, for example 8")
    if order <= 1.01:
        raise ValueError(f"filter_order must be above 1.01, got {order}: fix one order before the run, for example 8")
    return order


def _refuse_adaptive(charges: Mapping[Event, int], accountant: str) -> None:
    for event in charges:
        if event.adaptive:
            reason = (
                "its noise multiplier was chosen from earlier outputs, and only a Rényi filter at an order "
                "fixed in advance covers that; use accountant 'filter'"
            )
            raise UnpriceableError(event, accountant, reason)


def _sum_rdp(charges: Mapping[Event, int], orders: Sequence[float], accountant: str) -> NDArray[np.float64]:
    total = np.zeros(len(orders))
    for event, count in charges.items():
        divergences = event.rdp(orders)
        if divergences is None:
            raise UnpriceableError(event, accountant, "it has no Rényi divergence")
        total = total + count * divergences
    return total


def _rdp(charges: Mapping[Event, int], delta: float, coarse: bool, filter_order: float) -> _Answer:
    _refuse_adaptive(charges, "rdp")
    together, others = _sampled_gaussians(charges)
    if len(together) <= _MANY_CURVES:
        return _Answer(rdp_epsilon(RDP_ORDERS, _sum_rdp(charges, RDP_ORDERS, "rdp"), delta))
    total = _sum_rdp(others, RDP_ORDERS, "rdp") + sum_of_divergences(together, RDP_ORDERS)
    return _Answer(rdp_epsilon(RDP_ORDERS, total, delta))


def _sampled_gaussians(charges: Mapping[Event, int]) -> tuple[Counter[tuple[float, float]], dict[Event, int]]:
    """The Gaussians on Poisson lots, which can be priced together, and all others."""
    together: Counter[tuple[float, float]] = Counter()
    others: dict[Event, int] = {}
    for event, count in charges.items():
        release = None if event.adaptive else event.sampled_gaussian()
        if release is None:
            others[event] = count
        else:
            together[release] += count
    return together, others


def _filter(charges: Mapping[Event, int], delta: float, coarse: bool, filter_order: float) -> _Answer:
    divergence = float(_sum_rdp(charges, (filter_order,), "filter")[0])
    epsilon = filter_price(divergence, delta, filter_order)
    if not any(event.adaptive for event in charges):
        return _Answer(epsilon)
    warning = (
        f"this is what the run spent from a Rényi filter at order {filter_order:g}; with noise chosen from "
        "earlier outputs it is a guarantee only if a budget of at least this size was set before the run and "
        "enforced"
    )
    return _Answer(epsilon, is_bound=False, warning=warning)


def _zcdp_epsilon(rho: float, delta: float) -> float:
    return rho + 2 * math.sqrt(-rho * math.log(delta))


def _zcdp(charges: Mapping[Event, int], delta: float, coarse: bool, filter_order: float) -> _Answer:
    _refuse_adaptive(charges, "zcdp")
    total = 0.0
    for event, count in charges.items():
        rho = event.zcdp()
        if rho is None:
            raise UnpriceableError(event, "zcdp", "it has no zCDP bound")
        total += count * rho
    warning = None
    if any(event.is_sampled for event in charges):
        warning = "zCDP keeps no gain from sampling: this prices every example in every step; pld is far tighter"
    return _Answer(_zcdp_epsilon(total, delta), warning=warning)


def _gdp(charges: Mapping[Event, int], delta: float, coarse: bool, filter_order: float) -> _Answer:
    _refuse_adaptive(charges, "gdp")
    total = 0.0
    for event, count in charges.items():
        mu_squared = event.clt_mu_squared()
        if mu_squared is None:
            raise UnpriceableError(event, "gdp", "it has no Gaussian-privacy approximation")
        total += count * mu_squared
    epsilon = gaussian_epsilon(math.sqrt(total), delta)
    if all(event.mu_squared() is not None for event in charges):
        return _Answer(epsilon)  # nothing was approximated
    warning = "a central-limit approximation, not a bound: it under-reports epsilon; use pld for a guarantee"
    return _Answer(epsilon, is_bound=False, warning=warning)


def _pure(charges: Mapping[Event, int], delta: float, coarse: bool, filter_order: float) -> _Answer:
    _refuse_adaptive(charges, "pure")
    total = 0.0
    for event, count in charges.items():
        epsilon = event.pure_epsilon()
        if epsilon is None:
            raise UnpriceableError(event, "pure", "it has no epsilon at delta 0; use accountant 'pld'")
        total += count * epsilon
    return _Answer(total)


def _pld(charges: Mapping[Event, int], delta: float, coarse: bool, filter_order: float) -> _Answer:
    _refuse_adaptive(charges, "pld")
    exact = {event: event.mu_squared() for event in charges}
    mu = math.sqrt(sum(charges[event] * value for event, value in exact.items() if value is not None))
    rest = {event: count for event, count in charges.items() if exact[event] is None}
    if not rest:
        return _Answer(gaussian_epsilon(mu, delta))
    composed = _few(rest, mu, coarse, delta) if len(rest) <= _FEW else _many(rest, mu, coarse, delta)
    if composed is None:
        return _by_rdp(charges, delta)
    total, delta_left = composed
    epsilon = float(total.get_epsilon_for_delta(delta_left))
    if len(rest) > _FEW:
        epsilon = _up_to_nine_digits(epsilon)
    if math.isinf(epsilon) and all(event.rdp(_GUARD_ORDERS) is not None for event in charges):
        other = _by_rdp(charges, delta)  # losses of some 700 overflow in dp_accounting
        return other if math.isfinite(other.epsilon) else _Answer(epsilon)
    return _Answer(epsilon)


_Composed = tuple[PrivacyLossDistribution, float] | None  # the distribution and what is left of delta


def _few(charges: Mapping[Event, int], mu: float, coarse: bool, delta: float) -> _Composed:
    """Compose a few different events one by one; ``None`` where that has no digits left."""
    steps = sum(charges.values())
    interval = _interval(charges, steps, mu, coarse)
    rounding = _rounding(len(charges), steps)
    if steps > MAX_STEPS or delta < 2 * rounding or interval > _WIDEST:
        return None
    return _one_by_one(charges, mu, interval, None), delta - rounding


def _many(charges: Mapping[Event, int], mu: float, coarse: bool, delta: float) -> _Composed:
    """Compose many different events: the sampled Gaussians among them together, the others one by one."""
    together, others = _sampled_gaussians(charges)
    if len(together) <= _FEW:
        return _few(charges, mu, coarse, delta)
    steps = sum(others.values())
    rounding = _rounding(len(others), steps) if others or mu > 0 else 0.0
    if sum(charges.values()) > MAX_STEPS or delta < 2 * rounding:
        return None
    interval, start = compose_many(together, delta, coarse=coarse)
    if interval > _WIDEST:
        return None
    return _one_by_one(others, mu, interval, start), delta - rounding


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


def _by_rdp(charges: Mapping[Event, int], delta: float) -> _Answer:
    warning = "so many steps, so small a delta or so little noise is beyond pld's digits: priced by rdp"
    return replace(_rdp(charges, delta, False, 0.0), warning=warning, accountant="rdp")


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


_Accountant = Callable[[Mapping[Event, int], float, bool, float], _Answer]

ACCOUNTANTS: Mapping[str, _Accountant] = {
    "pld": _pld,
    "rdp": _rdp,
    "zcdp": _zcdp,
    "gdp": _gdp,
    "filter": _filter,
    "pure": _pure,
}
