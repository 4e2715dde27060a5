"""Whole runs under a filter whose size was fixed in advance: one event for all their releases.

Where the cost of a step depends on earlier outputs, or differs from person to person, the steps cannot be written
down one by one: only the size of the filter is a guarantee (and what each person spent is itself private). A filter
at Rényi order ``a`` and size ``r`` makes the run ``(a, r)``-Rényi private, however many steps it took (Feldman and
Zrnic 2021, Theorems 3.1 and 4.5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dphero import _checks as checks
from dphero.accounting.events.base import Event, Relation
from dphero.accounting.numerics.curves import RDP_ORDERS
from dphero.accounting.renyi import filter_price

WHOLE_ORDERS: tuple[int, ...] = tuple(int(order) for order in RDP_ORDERS if order.is_integer() and 2 <= order <= 256)
"""Orders at which sampled divergences are exact sums, and which the accountant ``rdp`` asks for."""

_FILTER = "fix the filter before the run, for example order 8 and divergence 1"
_SUM = "give the sum over epochs of 1/(2 sigma^2), for example 0.5"


@dataclass(frozen=True)
class IndividualFilter(Event, kind="individual_filter"):
    """All noisy sums of a training in which every example leaves before its own spending exceeds the filter.

    Guarantee: the Rényi divergence at ``order`` is at most ``divergence``, hence also at every smaller order; above
    it nothing is known. Record it once, before the first release.
    """

    order: float
    divergence: float

    title: ClassVar[str] = "All noisy gradients of one training, each example's part in them limited by a Rényi filter"
    sampling: ClassVar[str] = (
        "Every example is charged at every step by the norm of its own clipped gradient, whether drawn or not, and "
        "takes no part once its budget is used up; what an example has spent is never released."
    )

    _checks: ClassVar = {
        "order": partial(checks.number, "order", advice=_FILTER, above=1),
        "divergence": partial(checks.number, "divergence", advice=_FILTER, least=0),
    }

    def rdp(self, orders: Sequence[float]) -> NDArray[np.float64] | None:
        """The filter's size up to its order (divergences grow with the order), infinite beyond."""
        return np.where(np.asarray(orders, dtype=np.float64) <= self.order, self.divergence, math.inf)


@dataclass(frozen=True)
class ShuffledFilter(Event, kind="shuffled_filter"):
    """All releases of shuffled epochs whose noise was chosen from earlier outputs, within a sum fixed in advance.

    Guarantee: ``sum_e 1/(2 sigma_e^2) <= rho`` holds in every run, so at every order ``a`` the divergences sum to at
    most ``a rho`` and the run is ``rho``-zero-concentrated private (the Rényi filter at every order at once). The
    relation is that of shuffled epochs. Record it once, before the first release.
    """

    rho: float

    relation: ClassVar[Relation] = "zero_out"
    title: ClassVar[str] = (
        "Gaussian noise on disjoint batches, its strength chosen from earlier releases within a budget"
    )
    sampling: ClassVar[str] = (
        "A permutation splits the data into disjoint batches, so each example takes part once in an epoch; epochs add "
        "up to at most the budget, and nothing is gained from sampling."
    )

    _checks: ClassVar = {"rho": partial(checks.number, "rho", advice=_SUM, least=0)}

    def zcdp(self) -> float | None:
        return self.rho


def filter_size(epsilon: float, delta: float, order: float) -> float:
    """The largest divergence at one order that is worth at most ``epsilon`` at ``delta``; negative if there is none.

    ``epsilon - ln((a-1)/a) + (ln delta + ln a) / (a-1)``, the inverse of ``filter_price``.
    """
    exact = epsilon - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)
    size = exact * (1 - 1e-12) if exact > 0 else exact  # rounding must not push the price above the target
    assert size <= 0 or filter_price(size, delta, order) <= epsilon
    return size
