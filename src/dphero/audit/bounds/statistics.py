"""The statistics of an audit: from what an attacker saw to a lower bound on ε, each with its error probability.

Two kinds of evidence lead to a bound. *Two samples*: many releases with a canary and many without; how well a threshold
tells them apart bounds ε by the definition of differential privacy. *One run*: many canaries, each in or out by its own
coin; how many coins an attacker guesses bounds ε by the theorem of Steinke, Nasr and Jagielski (2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import ndtr, ndtri

Array = NDArray[np.float64]

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Of the canaries that are guessed, in one run: which is best is not known in advance."""

_PILOT = 0.15  # share of the observations that choose the thresholds, and are then put aside
_TRIMMED = 0.1  # share of the pilot that its centre leaves out at each end: no outlier may move it


def lower_rate(hits: int, trials: int, error: float) -> float:
    """Return the exact (Clopper–Pearson) lower bound on a rate: above the true one with probability ≤ ``error``."""
    return 0.0 if hits == 0 else float(stats.beta.ppf(error, hits, trials - hits + 1))


def upper_rate(hits: int, trials: int, error: float) -> float:
    """Return the exact (Clopper–Pearson) upper bound on a rate: below the true one with probability ≤ ``error``."""
    return 1.0 if hits == trials else float(stats.beta.isf(error, hits + 1, trials - hits))


@dataclass(frozen=True)
class Separation:
    """How surely a threshold tells releases with the canary from those without.

    The hypothesis tests behind it: "the canary is out" is rejected where an observation exceeds the threshold.

    Attributes:
        threshold: t.
        true_rate: A lower bound on P(observation > t | canary in).
        false_rate: An upper bound on P(observation > t | canary out).
    """

    threshold: float
    true_rate: float
    false_rate: float

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε ≥ 0 that (ε, δ)-privacy allows, whatever the mechanism.

        Both events and both directions: P(x > t | in) ≤ e^ε P(x > t | out) + δ, and
        P(x ≤ t | out) ≤ e^ε P(x ≤ t | in) + δ.
        """
        forward = _log_ratio(self.true_rate - delta, self.false_rate)
        backward = _log_ratio(1 - self.false_rate - delta, 1 - self.true_rate)
        return max(forward, backward, 0.0)

    @property
    def mu(self) -> float:
        """The smallest μ ≥ 0 that μ-Gaussian privacy allows: Φ⁻¹(true rate) − Φ⁻¹(false rate)."""
        return max(float(ndtri(self.true_rate) - ndtri(self.false_rate)), 0.0)

    def breaks(self, epsilons: Array, deltas: Array) -> bool:
        """Return whether (ε_j, δ_j)-privacy does not allow this, for any j."""
        with np.errstate(over="ignore"):
            growth = np.exp(epsilons)
        forward = self.true_rate > (growth * self.false_rate + deltas).min()
        backward = 1 - self.false_rate > (growth * (1 - self.true_rate) + deltas).min()
        return bool(forward or backward)


@dataclass(frozen=True)
class Errors:
    """How often a threshold errs in all: one number instead of two rates, and known better than either.

    Attributes:
        threshold: t.
        total: An upper bound on P(observation ≤ t | canary in) + P(observation > t | canary out); 1 is guessing.
    """

    threshold: float
    total: float

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε ≥ 0 that (ε, δ)-privacy allows: errors add up to 2 (1 − δ) / (1 + e^ε) at least."""
        return max(_log_ratio(2 * (1 - delta) - self.total, self.total), 0.0)

    @property
    def mu(self) -> float:
        """The smallest μ ≥ 0 that μ-Gaussian privacy allows: errors add up to 2 Φ(−μ/2) at least."""
        return max(-2 * float(ndtri(min(self.total / 2, 1.0))), 0.0)

    def breaks(self, epsilons: Array, deltas: Array) -> bool:
        """Return whether (ε_j, δ_j)-privacy does not allow this, for any j."""
        with np.errstate(over="ignore"):
            fewest = 2 * (1 - deltas) / (1 + np.exp(epsilons))
        return bool(self.total < fewest.max())


Evidence = Separation | Errors


def _log_ratio(upper: float, lower: float) -> float:
    return math.log(upper / lower) if upper > 0 and lower > 0 else (-math.inf if upper <= 0 else math.inf)


def separate(inside: Array, outside: Array, *, delta: float, confidence: float) -> tuple[Evidence, ...]:
    """Return what tells two samples apart, with rates that hold *all together* at the confidence.

    A part of each sample, the pilot, chooses two thresholds. One lies halfway between the centres of the two samples:
    there Gaussian releases are told apart best, and it hardly depends on chance (the threshold that looks best in the
    pilot does, and at few releases that costs a quarter of ε). The other promises most against (ε, δ), whatever the
    mechanism.

    The rest of the samples, which had no say in that, is counted: at both thresholds each rate, and at the middle one
    the sum of both errors. Each of these three has a third of the error probability.

    Args:
        inside: Independent observations of releases with the canary; larger should mean "in".
        outside: Without it.
        delta: δ.
        confidence: The probability with which all the rates hold.

    Raises:
        ValueError: If there are fewer than 20 observations of a kind, or some are not numbers.
    """
    for name, sample in (("with", inside), ("without", outside)):
        if len(sample) < 20:
            raise ValueError(f"{len(sample)} releases {name} the canary are too few to bound anything: make 20 or more")
        if np.isnan(sample).any():
            raise ValueError(f"a release {name} the canary was observed as NaN: the attack has no score for it")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence:g}")
    cut_in, cut_out = math.ceil(_PILOT * len(inside)), math.ceil(_PILOT * len(outside))
    pilots, error = (inside[:cut_in], outside[:cut_out]), (1 - confidence) / 3
    middle = (_centre(pilots[0]) + _centre(pilots[1])) / 2
    promising = _promising(*pilots, len(inside), len(outside), error / 2, delta)
    inside, outside = inside[cut_in:], outside[cut_out:]
    return (
        _errors(inside, outside, middle, error),
        *(_rates(inside, outside, threshold, error) for threshold in (middle, promising)),
    )


def _rates(inside: Array, outside: Array, threshold: float, error: float) -> Separation:
    """Bound both rates at a threshold, each with half the error probability."""
    return Separation(
        threshold=threshold,
        true_rate=lower_rate(int((inside > threshold).sum()), len(inside), error / 2),
        false_rate=upper_rate(int((outside > threshold).sum()), len(outside), error / 2),
    )


def _errors(inside: Array, outside: Array, threshold: float, error: float) -> Errors:
    """Bound the sum of both error rates at a threshold.

    Misses and false alarms among n observations of each kind are a sum of 2n independent trials of two different rates.
    Far below its mean it is no more probable than a binomial of 2n trials at the mean of the rates (Hoeffding 1956,
    theorem 4), so the bound of Clopper and Pearson holds for that mean: exactly, where it says less than 1/2 and the
    error probability is at most 1/4, and nothing is said otherwise.
    """
    size = min(len(inside), len(outside))
    wrong = int((inside[:size] <= threshold).sum() + (outside[:size] > threshold).sum())
    return Errors(threshold, min(2 * upper_rate(wrong, 2 * size, min(error, 0.25)), 1.0))


def _centre(sample: Array) -> float:
    """Return the trimmed mean. Not the median: of a canary that is drawn into few lots, the median sees nothing."""
    return float(stats.trim_mean(np.clip(sample, -1e150, 1e150), _TRIMMED))


def _promising(inside: Array, outside: Array, size_in: int, size_out: int, error: float, delta: float) -> float:
    """Return the threshold of the largest ε that the pilot lets expect of the main part."""
    values = np.unique(np.concatenate([inside, outside]))
    cuts = (values[1:] + values[:-1]) / 2 if len(values) > 1 else values
    true, false = _smooth_rate(inside, cuts), _smooth_rate(outside, cuts)
    n, m = size_in - len(inside), size_out - len(outside)
    low = stats.beta.ppf(error, true * n, (1 - true) * n + 1)
    high = stats.beta.isf(error, false * m + 1, (1 - false) * m)
    with np.errstate(divide="ignore", invalid="ignore"):
        forward = np.log(np.maximum(low - delta, 1e-300) / high)
        backward = np.log(np.maximum(1 - high - delta, 1e-300) / (1 - low))
    return float(cuts[np.argmax(np.maximum(forward, backward))])


def _smooth_rate(sample: Array, cuts: Array) -> Array:
    """Guess P(x > cut): half what was counted (and half a hit), half a normal distribution, against overfitting."""
    counted = (len(sample) - np.searchsorted(np.sort(sample), cuts, side="right") + 0.5) / (len(sample) + 1)
    with np.errstate(invalid="ignore", over="ignore"):  # infinite scores: counting is left
        spread = sample.std()
    return (counted + ndtr((sample.mean() - cuts) / spread)) / 2 if 0 < spread < math.inf else counted


# -- one run ------------------------------------------------------------------------------------------------------


def guessing_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return how probable at most so many right guesses, or more, are under (ε, δ)-privacy.

    Each of m canaries is in or out by a fair coin; an attacker who sees the outcome guesses r of the coins, v rightly.
    With X ~ Bin(r, e^ε / (1 + e^ε)) and β = P(X ≥ v):

        p = β + 2 m δ max_{1 ≤ i ≤ v} (P(X ≥ v − i) − β) / i

    (Steinke, Nasr and Jagielski 2023, theorem 5.2.)
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"{correct} right of {guesses} guesses about {canaries} canaries is impossible")
    if correct == 0:
        return 1.0
    rate = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, rate))
    steps = np.arange(1, correct + 1)
    gains = (stats.binom.sf(correct - steps - 1, guesses, rate) - beta) / steps
    return min(1.0, beta + 2 * canaries * delta * max(float(gains.max()), 0.0))


def guessing_bound(
    scores: Array, included: NDArray[np.bool_], *, delta: float, confidence: float, shares: Sequence[float] = ()
) -> tuple[float, int, int]:
    """Return a lower bound on ε from one run, and the number of guesses, and of right ones, that gave it.

    The canaries of the highest scores are guessed to be in, as many of the lowest to be out. Which share of all
    canaries to guess is not known in advance: a few shares are tried, each at an equal part of the error probability.

    Args:
        scores: What the attacker made of each canary; larger should mean "in".
        included: Whether it was.
        delta: δ.
        confidence: The probability with which the bound holds.
        shares: Of the canaries that are guessed; default :data:`SHARES`.
    """
    shares = shares or SHARES
    error = (1 - confidence) / len(shares)
    best = (0.0, 0, 0)
    for guesses, correct in guesses_of(scores, included, shares):
        epsilon = _largest_rejected(len(scores), guesses, correct, delta, error)
        best = max(best, (epsilon, guesses, correct))
    return best


def guesses_of(scores: Array, included: NDArray[np.bool_], shares: Sequence[float]) -> list[tuple[int, int]]:
    """Return, for each share of the canaries that is guessed, the number of guesses and of right ones."""
    if len(scores) != len(included):
        raise ValueError(f"there are {len(scores)} scores for {len(included)} canaries")
    order = np.argsort(scores, kind="stable")
    found = []
    for share in shares:
        half = max(1, int(share * len(scores)) // 2)
        correct = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
        found.append((2 * half, correct))
    return found


def _largest_rejected(canaries: int, guesses: int, correct: int, delta: float, error: float) -> float:
    def rejected(epsilon: float) -> bool:
        return guessing_p_value(canaries, guesses, correct, epsilon, delta) <= error

    if not rejected(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while rejected(high) and high < 64:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low
