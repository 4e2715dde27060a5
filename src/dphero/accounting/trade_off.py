"""What an attacker could gain: the best true-positive rate at each false-positive rate, from what a ledger holds.

An attacker who sees everything that was released tests whether one record was among the data. Among all tests with the
same rate of false alarms, the likelihood-ratio test finds the record most often (Neyman and Pearson). How often that is
follows from the whole privacy curve of the ledger; (ε, δ) at one δ alone would allow far more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from dp_accounting.pld.pld_pmf import PLDPmf
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from dphero.accounting.accountants import price
from dphero.accounting.ledger import Ledger
from dphero.accounting.prices import DEFAULT_FILTER_ORDER, Query
from dphero.accounting.privacy_loss import compose, split

_RATES = np.unique([0.0, *np.geomspace(1e-6, 0.1, 201), 1e-4, 0.001, 0.01, *np.linspace(0.1, 1.0, 181)])
_DELTAS = (1e-12, 1e-9, *np.geomspace(1e-7, 0.3, 24))  # where an accountant without a curve is asked for prices
_READ_AT = 1e-9  # a delta far below every rate that is asked for


@dataclass(frozen=True, eq=False)
class TradeOff:
    """An upper bound on what any attacker reaches.

    Attributes:
        false_positive_rates: Of the test: the share of outsiders that it takes for members, increasing from 0 to 1.
        true_positive_rates: The largest share of members that it can find.
        is_bound: Whether that is proven; ``False`` where the price of the ledger is no bound either.
    """

    false_positive_rates: NDArray[np.float64]
    true_positive_rates: NDArray[np.float64]
    is_bound: bool = True

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Return the largest true-positive rate of any test with that rate of false positives.

        Between the points of the curve, that of the next one: it is never below the truth.
        """
        if not 0 <= false_positive_rate <= 1:
            raise ValueError(f"a false-positive rate lies between 0 and 1, got {false_positive_rate:g}")
        place = int(np.searchsorted(self.false_positive_rates, false_positive_rate))
        return float(self.true_positive_rates[place])


def trade_off(
    ledger: Ledger, accountant: str = "pld", *, coarse: bool = True, filter_order: float = DEFAULT_FILTER_ORDER
) -> TradeOff:
    """Return what an attacker could gain from the releases in a ledger.

    ``pld`` gives the exact curve: ``Phi(Phi^-1(a) + mu)`` for Gaussians without sampling, otherwise the
    likelihood-ratio test on the composed privacy losses, whose grid rounds pessimistically (by default the coarse one,
    which differs in the third digit at most). Of other accountants, the best of the prices at many delta is taken:
    ``min_delta e^epsilon(delta) a + delta``.

    Raises:
        UnpriceableError: If the accountant cannot price an event.
    """
    charges = ledger.charges()
    if not charges:
        return TradeOff(_RATES, _RATES)
    if accountant == "pld":
        Query(charges, _READ_AT).refuse_adaptive("pld")
        mu, rest = split(charges)
        if not rest:
            return TradeOff(_RATES, _gaussian(mu))
        composed = compose(rest, mu, _READ_AT, coarse=coarse)
        if composed is not None:
            losses, left = composed
            return _likelihood_ratio(losses._pmf_remove, _READ_AT - left)
    return _from_prices(ledger, accountant, filter_order)


def _gaussian(mu: float) -> NDArray[np.float64]:
    if math.isinf(mu):
        return np.ones_like(_RATES)
    return np.asarray(ndtr(ndtri(_RATES) + mu))


def _likelihood_ratio(losses: PLDPmf, rounding: float) -> TradeOff:
    """The test that says "member" where the privacy loss is large.

    A loss ``x`` has probability ``p(x)`` with the record and ``e^-x p(x)`` without; an infinite one is never seen
    without. Summed from the largest loss down, these are both rates of the test for every threshold; between two
    thresholds it throws a coin, which is a straight line.
    """
    dense = losses.to_dense_pmf()
    values = (dense._lower_loss + np.arange(dense.size)) * dense._discretization
    with_record = dense._probs[::-1]
    with np.errstate(over="ignore", invalid="ignore"):
        without = np.where(with_record > 0, with_record * np.exp(-values[::-1]), 0.0)
    false = np.concatenate([[0.0], np.cumsum(without)])
    true = np.concatenate([[0.0], np.cumsum(with_record)]) + dense._infinity_mass + rounding
    at_rates = np.interp(_RATES, false, true, right=1.0)
    # No test finds fewer than one that guesses, and one that accuses everybody finds all.
    bounded = np.maximum.accumulate(np.clip(np.maximum(at_rates, _RATES), 0.0, 1.0))
    bounded[-1] = 1.0
    return TradeOff(_RATES, bounded)


def _from_prices(ledger: Ledger, accountant: str, filter_order: float) -> TradeOff:
    """The best of the lines that an accountant's prices at many delta draw, and of their mirror images."""
    prices = [price(ledger, float(delta), accountant, coarse=True, filter_order=filter_order) for delta in _DELTAS]
    epsilons = np.array([each.epsilon for each in prices])[:, None]
    deltas = np.array(_DELTAS)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        growth = np.exp(epsilons)
        lines = np.where(np.isinf(growth), 1.0, growth * _RATES + deltas)
        mirrored = 1 - (1 - deltas - _RATES) / growth
    best = np.minimum(np.minimum(lines, mirrored).min(0), 1.0)
    return TradeOff(_RATES, np.maximum(best, _RATES), all(each.is_bound for each in prices))
