"""Accountants: what a ledger costs, and how far that number may be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from dphero import _checks as checks
from dphero.accounting.ledger import Ledger
from dphero.accounting.numerics.curves import gaussian_epsilon
from dphero.accounting.prices import DEFAULT_FILTER_ORDER, Answer, Price, Query, add_up
from dphero.accounting.privacy_loss import pld
from dphero.accounting.renyi import rdp, renyi_filter


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
    advice = "fix one Rényi order before the run, for example 8"
    filter_order = checks.number("filter_order", filter_order, advice, above=1.01)
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant {accountant!r} is unknown: use one of {', '.join(ACCOUNTANTS)}")
    query = Query(ledger.charges(), delta, coarse, filter_order)
    if accountant != "filter":
        query.refuse_adaptive(accountant)
    answer = ACCOUNTANTS[accountant](query) if query.charges else Answer(0.0)
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


def _zcdp_epsilon(rho: float, delta: float) -> float:
    return rho + 2 * math.sqrt(-rho * math.log(delta))


def _zcdp(query: Query) -> Answer:
    rho = add_up(query.charges, "zcdp", lambda event: event.zcdp(), "it has no zCDP bound")
    warning = None
    if any(event.is_sampled for event in query.charges):
        warning = "zCDP keeps no gain from sampling: this prices every example in every step; pld is far tighter"
    return Answer(_zcdp_epsilon(rho, query.delta), warning=warning)


def _gdp(query: Query) -> Answer:
    missing = "it has no Gaussian-privacy approximation"
    total = add_up(query.charges, "gdp", lambda event: event.clt_mu_squared(), missing)
    epsilon = gaussian_epsilon(math.sqrt(total), query.delta)
    if all(event.mu_squared() is not None for event in query.charges):
        return Answer(epsilon)  # nothing was approximated
    warning = "a central-limit approximation, not a bound: it under-reports epsilon; use pld for a guarantee"
    return Answer(epsilon, is_bound=False, warning=warning)


def _pure(query: Query) -> Answer:
    missing = "it has no epsilon at delta 0; use accountant 'pld'"
    return Answer(add_up(query.charges, "pure", lambda event: event.pure_epsilon(), missing))


ACCOUNTANTS: Mapping[str, Callable[[Query], Answer]] = {
    "pld": pld,
    "rdp": rdp,
    "zcdp": _zcdp,
    "gdp": _gdp,
    "filter": renyi_filter,
    "pure": _pure,
}
