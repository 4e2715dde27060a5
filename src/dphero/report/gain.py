"""What an attacker could gain from what a run released, by the exact privacy curve of its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dphero.accounting import Ledger, TradeOff, UnpriceableError, trade_off
from dphero.report.reading.runs import Run

RATES = (0.001, 0.01)
"""The rates of false positives at which the gain is told."""


@dataclass(frozen=True, eq=False)
class Gain:
    """What an attacker could gain.

    Attributes:
        curve: The best true-positive rate at each false-positive rate; ``None`` if nothing is known.
        reason: Why nothing is known.
        labels_only: Whether labels alone are protected: the gain is then about a label, and records have none.
    """

    curve: TradeOff | None
    reason: str = ""
    labels_only: bool = False

    @property
    def rates(self) -> dict[float, float]:
        """The best true-positive rate at each of :data:`RATES`."""
        if self.curve is None:
            return {}
        return {rate: self.curve.true_positive_rate(rate) for rate in RATES}

    @property
    def is_bound(self) -> bool:
        """Whether the curve is proven."""
        return self.curve is not None and self.curve.is_bound


def gain_of(run: Run) -> Gain:
    """Return what could be gained from a run so far."""
    if run.ledger is None:
        return Gain(None, "there is no ledger")
    accountant = run.recipe.accountant if run.result is None else str(run.result["accountant"])
    if any(event.adaptive for event in run.ledger.counts):
        accountant = "filter"
    return _gain(run.ledger.to_json(), accountant)


def worst_gain(runs: Sequence[Run]) -> Gain:
    """Return the largest gain among several runs, at each rate; those of one setting mostly have the same ledger."""
    gains = [gain_of(run) for run in runs if run.ledger is not None]
    unknown = [gain for gain in gains if gain.curve is None]
    if unknown or not gains:  # one that is not known may be larger than all that are
        return unknown[0] if unknown else Gain(None, "there is no ledger")
    several = {id(gain): gain for gain in gains}  # equal ledgers have one
    return gains[0] if len(several) == 1 else _upper(list(several.values()))


def _upper(gains: Sequence[Gain]) -> Gain:
    """Return what is above all curves: which of them is highest may change along the way."""
    curves = [gain.curve for gain in gains if gain.curve is not None]
    rates = np.unique(np.concatenate([curve.false_positive_rates for curve in curves]))
    highest = [max(curve.true_positive_rate(rate) for curve in curves) for rate in rates]
    together = TradeOff(rates, np.asarray(highest), all(curve.is_bound for curve in curves))
    return Gain(together, labels_only=any(gain.labels_only for gain in gains))


@lru_cache(maxsize=1024)
def _gain(ledger: str, accountant: str) -> Gain:
    read = Ledger.from_json(ledger)
    try:
        return Gain(trade_off(read, accountant), labels_only=read.relation == "replace_label")
    except (UnpriceableError, ValueError, ArithmeticError) as error:
        return Gain(None, str(error))
