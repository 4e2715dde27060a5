"""Rényi divergences: the accountants ``rdp`` (the best of many orders) and ``filter`` (one order, fixed in advance)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dphero.accounting.events.base import Event
from dphero.accounting.numerics.curves import RDP_ORDERS, rdp_epsilon
from dphero.accounting.numerics.many import sum_of_divergences
from dphero.accounting.prices import Answer, Query, add_up

_MANY_CURVES = 128  # more different Rényi curves than that are bounded by those of a few


def rdp(query: Query) -> Answer:
    """Add the divergences at many orders, and take the best of them."""
    together, others = sampled_gaussians(query.charges)
    if len(together) <= _MANY_CURVES:
        total = _sum_of(query.charges, RDP_ORDERS, "rdp")
    else:
        total = _sum_of(others, RDP_ORDERS, "rdp") + sum_of_divergences(together, RDP_ORDERS)
    return Answer(rdp_epsilon(RDP_ORDERS, total, query.delta))


def renyi_filter(query: Query) -> Answer:
    """Add the divergences at the one order that was fixed before the run."""
    order = query.filter_order
    epsilon = filter_price(filter_divergence(query.charges, order), query.delta, order)
    if not any(event.adaptive for event in query.charges):
        return Answer(epsilon)
    warning = (
        f"this is what the run spent from a Rényi filter at order {order:g}; with noise chosen from "
        "earlier outputs it is a guarantee only if a budget of at least this size was set before the run and "
        "enforced"
    )
    return Answer(epsilon, is_bound=False, warning=warning)


def filter_price(divergence: float, delta: float, order: float) -> float:
    """The epsilon at ``delta`` of a Rényi divergence at one order."""
    return rdp_epsilon((order,), np.array([divergence]), delta)


def filter_divergence(charges: Mapping[Event, int], order: float) -> float:
    """What releases take from a Rényi filter at ``order``."""
    return float(np.sum(_sum_of(charges, (order,), "filter")))


def sampled_gaussians(charges: Mapping[Event, int]) -> tuple[Counter[tuple[float, float]], dict[Event, int]]:
    """Return the Gaussians on Poisson lots, which can be priced together, and all other events."""
    together: Counter[tuple[float, float]] = Counter()
    others: dict[Event, int] = {}
    for event, count in charges.items():
        release = None if event.adaptive else event.sampled_gaussian()
        if release is None:
            others[event] = count
        else:
            together[release] += count
    return together, others


def _sum_of(charges: Mapping[Event, int], orders: Sequence[float], accountant: str) -> NDArray[np.float64]:
    total = add_up(charges, accountant, lambda event: event.rdp(orders), "it has no Rényi divergence")
    return np.asarray(total, dtype=np.float64)
