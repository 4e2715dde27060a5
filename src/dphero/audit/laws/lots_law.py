"""Are lots what is charged for? Tests of who was in them: each record in each lot by a coin of its own."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dphero.audit.laws.checks import Check

_LAGS = 10


def poisson_checks(members: NDArray[np.bool_], rate: float) -> list[Check]:
    """Test lots that are charged as Poisson lots.

    Args:
        members: Whether a record (a column) was in a lot (a row).
        rate: q, as charged.
    """
    return [
        _rate(members, rate),
        _records(members, rate),
        _sizes(members, rate),
        _lags(members),
        _pairs(members, "lots: drawn again", "lots", "records"),
        _pairs(members.T, "lots: records apart", "records", "lots"),
    ]


def shuffle_checks(members: NDArray[np.bool_], lots_per_epoch: int) -> list[Check]:
    """Test lots that are charged as the parts of shuffled epochs: nobody may be in two of one epoch."""
    most = max(
        int(members[start : start + lots_per_epoch].sum(0).max()) for start in range(0, len(members), lots_per_epoch)
    )
    return [Check.exactly("lots: once an epoch", f"a record is in {most} lots of an epoch at most", sound=most <= 1)]


def _rate(members: NDArray[np.bool_], rate: float) -> Check:
    """All records together: binomial, too large where records take part more often than is charged."""
    count = int(members.sum())
    p_value = float(stats.binom.sf(count - 1, members.size, rate))
    return Check("lots: rate", f"records are in {count / members.size:.4f} of the lots, charged: {rate:g}", p_value)


def _records(members: NDArray[np.bool_], rate: float) -> Check:
    """The same for the record that is in most lots."""
    most = int(members.sum(0).max())
    p_value = min(1.0, float(stats.binom.sf(most - 1, len(members), rate)) * members.shape[1])
    return Check("lots: rate of each record", f"one is in {most} of {len(members)} lots, charged: {rate:g}", p_value)


def _sizes(members: NDArray[np.bool_], rate: float) -> Check:
    """How much the sizes of lots vary: as those of independent coins, neither less (fixed sizes) nor more."""
    lots, records = members.shape
    variance = records * rate * (1 - rate)
    total = float(np.square(members.sum(1) - records * rate).sum()) / variance
    p_value = 2 * min(float(stats.chi2.cdf(total, lots)), float(stats.chi2.sf(total, lots)))
    words = f"the variance of their sizes is {total / lots:.2f} of what independent coins give"
    return Check("lots: sizes", words, min(1.0, p_value))


def _lags(members: NDArray[np.bool_]) -> Check:
    """How many records two lots 1, 2, … apart share, given their sizes: neither too few (epochs) nor too many."""
    records = members.shape[1]
    sizes, counts = members.sum(1), members.astype(np.float64)
    tests = []
    for lag in range(1, min(_LAGS, len(members) - 1) + 1):
        first, second = sizes[:-lag], sizes[lag:]
        shared = (counts[:-lag] * counts[lag:]).sum(1)
        expected = first * second / records
        variance = expected * (1 - first / records) * (records - second) / (records - 1)
        together = float((shared - expected).sum()) / math.sqrt(max(float(variance.sum()), 1e-300))
        tests.append((2 * float(stats.norm.sf(abs(together))), f"{together:+.1f} deviations at a distance of {lag}"))
    p_value, about = min(tests)
    return Check("lots: over time", f"records that two lots share: {about}", min(1.0, p_value * len(tests)))


def _pairs(rows: NDArray[np.bool_], name: str, what: str, shared_by: str) -> Check:
    """Two rows that share most, given what each has: hypergeometric."""
    counts, width = rows.sum(1), rows.shape[1]
    numbers = rows.astype(np.float64)
    first, second = np.triu_indices(len(rows), 1)
    shared = np.rint((numbers @ numbers.T)[first, second]).astype(int)
    p_values = stats.hypergeom.sf(shared - 1, width, counts[first], counts[second])
    place = int(p_values.argmin())
    p_value = min(1.0, float(p_values[place]) * len(p_values))
    words = f"two {what} share {shared[place]} of {width} {shared_by}, having {counts[first[place]]} and "
    return Check(name, words + f"{counts[second[place]]}", p_value)
