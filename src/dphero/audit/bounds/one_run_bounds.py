"""Tighter bounds from one run, each at the price of an assumption that it names.

Steinke, Nasr and Jagielski (2023) bound ε by the number of right guesses, for any mechanism that is (ε, δ)-private. Who
claims more than one pair (ε, δ), a whole trade-off curve, can be held to all of it (Mahloujifar, Melis and Chaudhuri
2024). And where scores are normal, their two means say more than any number of guesses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats
from scipy.special import ndtr, ndtri

from dphero.accounting.numerics.curves import gaussian_epsilon
from dphero.audit.bounds.claims import Claim
from dphero.audit.bounds.statistics import SHARES, guesses_of

Array = NDArray[np.float64]

_HALVINGS = 9


@dataclass(frozen=True)
class Bound:
    """A lower bound on ε.

    Attributes:
        name: How it was found.
        epsilon: The bound.
        assumes: What it holds under, besides chance.
        confidence: The probability with which it holds then, by itself.
    """

    name: str
    epsilon: float
    assumes: str
    confidence: float

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return dict(vars(self))


def curve_refuted(
    claim: Claim, scores: Array, included: NDArray[np.bool_], error: float, shares: Sequence[float] = SHARES
) -> bool:
    """Return whether so many right guesses refute the claimed curve. It assumes nothing about the mechanism.

    Where the claim is true, ``True`` with probability at most ``error``.
    """
    least = _least_false_rate(claim)
    return any(
        _impossible(least, len(scores), guesses, correct, error / len(shares))
        for guesses, correct in guesses_of(scores, included, shares)
    )


def curve_bound(claim: Claim, scores: Array, included: NDArray[np.bool_], confidence: float) -> Bound | None:
    """Return the largest ε among the claims of the same kind, with more or less noise, that the guesses refute.

    ``None`` where the claim has no such family.
    """
    if claim.family is None:
        return None

    def refuted(factor: float) -> bool:
        assert claim.family is not None
        return curve_refuted(claim.family(math.exp(factor)), scores, included, 1 - confidence)

    assumes = "that the releases are the claimed ones up to the size of the noise"
    low, high = -2.5, 3.5  # the logarithm of the factor on the noise: with more of it the claim is bolder
    if not refuted(high):
        return Bound("trade-off curve", 0.0, assumes, confidence)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return Bound("trade-off curve", claim.family(math.exp(high)).epsilon, assumes, confidence)


def pair_bound(scores: Array, included: NDArray[np.bool_], delta: float, confidence: float) -> Bound | None:
    """Return ε of the distance μ between the scores of canaries that were in and those that were out.

    If scores are independent and normal, with means μ s apart and one deviation s, then the two-sample t statistic has
    a noncentral t distribution, which bounds μ exactly; and who can tell N(0, 1) from N(μ, 1) refutes every smaller ε.
    Where the deviations differ, that of both together counts: with sampled lots, canaries that are in vary more, and
    the bound says less than it could.
    """
    inside, outside = scores[included], scores[~included]
    if min(len(inside), len(outside)) < 2:
        return None
    freedom = len(scores) - 2
    square = float(((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum()) / freedom
    if not 0 < square < math.inf:
        return None
    width = math.sqrt(1 / len(inside) + 1 / len(outside))
    seen = float(inside.mean() - outside.mean()) / (math.sqrt(square) * width)
    mu = _noncentrality(seen, freedom, 1 - confidence) * width
    assumes = "independent normal scores of one variance, in and out"
    return Bound("normal scores", gaussian_epsilon(mu, delta) if mu > 0 else 0.0, assumes, confidence)


def _noncentrality(seen: float, freedom: int, error: float) -> float:
    """Return the lower bound on the noncentrality of a t statistic; 0 where it says nothing."""

    def excess(noncentrality: float) -> float:
        return float(stats.nct.sf(seen, freedom, noncentrality)) - error

    if float(stats.t.sf(seen, freedom)) >= error:
        return 0.0
    if seen > 36:  # beyond the digits of its distribution function: nearly normal, with the deviation of s on top
        return max(0.0, seen - float(stats.norm.isf(error)) * math.sqrt(1 + seen**2 / (2 * freedom)))
    return float(optimize.brentq(excess, 0.0, seen))


def _least_false_rate(claim: Claim) -> Callable[[float], float]:
    """Return the function from a rate of right alarms to the least rate of false ones that the claim allows.

    For μ-Gaussian privacy, Φ(Φ⁻¹(r) − μ). For (ε_j, δ_j), both directions: the largest of (r − δ_j) e^(−ε_j) and
    1 − δ_j − e^(ε_j) (1 − r). Pairs between those of the curve are left out, which allows more, not less.
    """
    mu = claim.mu
    if mu is not None:
        return lambda rate: float(ndtr(ndtri(rate) - mu)) if 0 < rate < 1 else float(rate >= 1)
    epsilons, deltas = (values[np.isfinite(claim.curve[0])] for values in claim.curve)
    with np.errstate(over="ignore"):
        growth = np.minimum(np.exp(epsilons), 1e300)

    def least(rate: float) -> float:
        lines = max(((rate - deltas) / growth).max(initial=0.0), (1 - deltas - growth * (1 - rate)).max(initial=0.0))
        return min(float(lines), 1.0)

    return least


def _impossible(least: Callable[[float], float], canaries: int, guesses: int, correct: int, error: float) -> bool:
    """Return whether the claim rules out that so many right guesses, or more, have probability ``error``.

    With p_i the probability of i right guesses of g, about m canaries, let r_i = Σ_{l ≥ i} l p_l / m be the rate at
    which a random canary is guessed rightly by those who guess i or more, and h_i = Σ_{l ≥ i} (g − l) p_l / m wrongly.
    Turning one coin turns a right guess of l + 1 into a wrong one of l, so h_i ≥ f̄⁻¹(r_{i+1}), with f̄⁻¹ the least rate
    of false alarms at a rate of right ones. From p_c = ``error`` at the count c that was seen, the smallest h and r
    follow downwards by r_i − r_{i+1} = i (h_i − h_{i+1}) / (g − i); in the end r_0 + h_0 must not exceed g / m
    (Mahloujifar, Melis and Chaudhuri 2024, algorithm 3).
    """
    right, wrong = error * correct / canaries, error * (guesses - correct) / canaries
    for number in range(correct - 1, -1, -1):
        higher = max(wrong, least(right))
        if higher == wrong:  # nothing can change any more
            break
        right = min(right + number / (guesses - number) * (higher - wrong), 1.0)
        wrong = higher
        if right + wrong > guesses / canaries:
            return True
    return right + wrong > guesses / canaries
