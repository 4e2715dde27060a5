"""The statistics: equal to scipy's where scipy has them, and holding as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dphero.accounting.numerics.curves import gaussian_epsilon
from dphero.audit.bounds.statistics import (
    Errors,
    Separation,
    _errors,
    guessing_bound,
    guessing_p_value,
    lower_rate,
    separate,
    upper_rate,
)

RATES = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
ERRORS = st.sampled_from([0.001, 0.0125, 0.05, 0.2])


@given(rate=RATES, error=ERRORS)
def test_rates_are_those_of_clopper_and_pearson(rate: tuple[int, int], error: float) -> None:
    exact = stats.binomtest(*rate).proportion_ci(1 - 2 * error, method="exact")
    assert lower_rate(*rate, error) == pytest.approx(exact.low, abs=1e-12)
    assert upper_rate(*rate, error) == pytest.approx(exact.high, abs=1e-12)


@given(rate=RATES, error=ERRORS)
def test_a_rate_and_its_complement_mirror_each_other(rate: tuple[int, int], error: float) -> None:
    hits, trials = rate
    assert lower_rate(hits, trials, error) == pytest.approx(1 - upper_rate(trials - hits, trials, error), abs=1e-12)
    assert 0 <= lower_rate(hits, trials, error) <= hits / trials <= upper_rate(hits, trials, error) <= 1


@given(epsilon=st.floats(0.1, 8), delta=st.sampled_from([0.0, 1e-5, 0.01]))
def test_randomised_response_is_bounded_exactly(epsilon: float, delta: float) -> None:
    """It tells the truth with probability δ, and otherwise as often as ε allows: both directions are tight."""
    truth = delta + (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    assert Separation(0.5, truth, 1 - truth).epsilon(delta) == pytest.approx(epsilon, rel=1e-6)


def test_both_directions_are_looked_at() -> None:
    assert Separation(0, 0.5, 0.001).epsilon(0) == pytest.approx(math.log(500))
    assert Separation(0, 0.999, 0.5).epsilon(0) == pytest.approx(math.log(500))
    assert Separation(0, 0.2, 0.3).epsilon(0) == Separation(0, 0.2, 0.3).mu == 0
    assert Separation(0, 0.0, 1.0).epsilon(1e-5) == Separation(0, 0.0, 1.0).mu == 0
    assert Separation(0, 0.005, 0.001).epsilon(0.01) < math.log(1.01)  # a rate below δ says nothing by itself


@given(mu=st.floats(0.05, 4), threshold=st.floats(-1, 3))
def test_gaussian_samples_have_their_mu_at_every_threshold(mu: float, threshold: float) -> None:
    found = Separation(threshold, stats.norm.sf(threshold - mu), stats.norm.sf(threshold))
    assert found.mu == pytest.approx(mu, rel=1e-6)


@given(epsilon=st.floats(0.1, 8), delta=st.sampled_from([0.0, 1e-5, 0.01]))
def test_all_errors_together_bound_randomised_response_exactly(epsilon: float, delta: float) -> None:
    lies = (1 - delta) / (1 + math.exp(epsilon))
    found = Errors(0.5, 2 * lies)
    assert found.epsilon(delta) == pytest.approx(epsilon, rel=1e-6)
    assert found.breaks(np.array([epsilon - 0.01]), np.array([delta]))
    assert not found.breaks(np.array([epsilon + 0.01, math.inf]), np.array([delta, 0.0]))


def test_all_errors_together_know_what_they_cannot_know() -> None:
    assert Errors(0, 2 * stats.norm.sf(0.75)).mu == pytest.approx(1.5)
    assert Errors(0, 1.0).mu == Errors(0, 1.0).epsilon(1e-5) == Errors(0, 1.0).epsilon(0) == 0
    assert Errors(0, 0.0).mu == math.inf
    assert not Errors(0, 1.0).breaks(np.zeros(1), np.zeros(1))


@pytest.mark.parametrize(
    "rates", [(0.5, 0.5), (0.1, 0.9), (0.0, 0.9), (0.3, 0.1), (0.02, 0.02), (0.0, 0.3), (0.7, 0.9)]
)
def test_misses_and_false_alarms_may_be_counted_together(rates: tuple[float, float]) -> None:
    """Of all outcomes of 12 observations of each kind: those that bound the sum of two rates wrongly are improbable.

    Computed, not sampled: the bound may fail with the error probability, whatever the two rates are.
    """
    size, error, wrong = 12, (1 - 0.9) / 3, 0.0
    misses, alarms = (stats.binom(size, rate) for rate in rates)
    for missed in range(size + 1):
        for alarmed in range(size + 1):
            inside = np.repeat([0.0, 2.0], [missed, size - missed])
            outside = np.repeat([2.0, 0.0], [alarmed, size - alarmed])
            total = _errors(inside, outside, 1.0, error).total
            wrong += misses.pmf(missed) * alarms.pmf(alarmed) * (total < sum(rates) and total < 1)
    assert wrong <= error


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "coins"])
def test_bounds_of_two_samples_hold_as_often_as_they_say(kind: str) -> None:
    """Each repetition counts as a failure if any rate is beyond the true one; 5 % may fail, of 200."""
    failures = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        if kind == "normal":
            law = stats.norm
            outside, inside = random.normal(size=120), random.normal(size=120) + 1
        elif kind == "heavy tails":
            law = stats.cauchy
            outside, inside = random.standard_cauchy(120), random.standard_cauchy(120) + 1
        else:
            law = stats.bernoulli(0.3)
            outside, inside = (random.random(120) < 0.3) * 1.0, (random.random(120) < 0.3) + 1.0
        for found in separate(inside, outside, delta=1e-5, confidence=0.95):
            truth = float(law.sf(found.threshold - 1)), float(law.sf(found.threshold))
            if isinstance(found, Errors):
                beyond = found.total < 1 - truth[0] + truth[1]
            else:
                beyond = found.true_rate > truth[0] or found.false_rate < truth[1]
            if beyond:
                failures += 1
                break
    assert failures <= stats.binom.ppf(0.999, 200, 0.05)
    if kind == "normal":
        assert failures > 0  # it is not valid by saying nothing


def test_what_chose_the_thresholds_does_not_count() -> None:
    """The pilot is told apart without an error, the rest not at all: nothing follows."""
    random = np.random.default_rng(0)
    inside, outside = random.normal(size=200), random.normal(size=200)
    inside[:30] += 10
    for found in separate(inside, outside, delta=1e-5, confidence=0.95):
        assert found.mu == found.epsilon(1e-5) == 0


def test_more_observations_bound_tighter() -> None:
    random = np.random.default_rng(0)
    found = []
    for size in (40, 400, 4000, 40000):
        rates = separate(random.normal(size=size) + 1, random.normal(size=size), delta=1e-5, confidence=0.95)
        found.append(max(each.mu for each in rates))
    assert found == sorted(found) and found[-1] > 0.9
    assert found[0] < 0.9


@pytest.mark.parametrize("releases, least", [(3000, 0.8), (10000, 0.88)])
def test_most_of_epsilon_is_reached_whatever_the_seed(releases: int, least: float) -> None:
    """Likelihood ratios of one Gaussian release, σ = 1. With thresholds by a noisy maximum some seeds gave 0.65."""
    shares = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        inside, outside = random.normal(size=releases) + 0.5, random.normal(size=releases) - 0.5
        found = max(each.mu for each in separate(inside, outside, delta=1e-5, confidence=0.95))
        shares.append(gaussian_epsilon(found, 1e-5) / gaussian_epsilon(1.0, 1e-5))
    assert min(shares) > least and np.mean(shares) < 0.98


def test_outliers_do_not_move_the_threshold() -> None:
    random = np.random.default_rng(0)
    inside, outside = random.normal(size=400) + 2, random.normal(size=400)
    inside[::25], outside[::25] = math.inf, -1e300
    assert 0.5 < separate(inside, outside, delta=1e-5, confidence=0.95)[0].threshold < 1.5


def test_what_cannot_be_bounded_is_refused() -> None:
    few, enough = np.zeros(19), np.zeros(20)
    with pytest.raises(ValueError, match="19 releases without the canary are too few"):
        separate(enough, few, delta=1e-5, confidence=0.95)
    with pytest.raises(ValueError, match="NaN"):
        separate(enough + np.nan, enough, delta=1e-5, confidence=0.95)
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1, got 95"):
        separate(enough, enough, delta=1e-5, confidence=95)
    assert separate(enough, enough, delta=1e-5, confidence=0.95)[0].mu == 0  # a constant tells nothing


# -- one run ------------------------------------------------------------------------------------------------------


@given(guesses=st.integers(1, 300), share=st.floats(0, 1), epsilon=st.floats(0, 5))
def test_without_delta_the_p_value_is_binomial(guesses: int, share: float, epsilon: float) -> None:
    correct = round(share * guesses)
    exact = stats.binomtest(correct, guesses, math.exp(epsilon) / (1 + math.exp(epsilon)), alternative="greater").pvalue
    assert guessing_p_value(guesses, guesses, correct, epsilon, 0.0) == pytest.approx(exact, rel=1e-6, abs=1e-15)


@settings(max_examples=40)
@given(guesses=st.integers(2, 200), share=st.floats(0.5, 1), epsilon=st.floats(0, 4), delta=st.floats(0, 1e-3))
def test_delta_and_epsilon_only_excuse(guesses: int, share: float, epsilon: float, delta: float) -> None:
    correct = round(share * guesses)
    p = guessing_p_value(1000, guesses, correct, epsilon, delta)
    assert p >= guessing_p_value(1000, guesses, correct, epsilon, 0.0) - 1e-12
    assert guessing_p_value(1000, guesses, correct, epsilon + 0.5, 0.0) >= guessing_p_value(
        1000, guesses, correct, epsilon, 0.0
    )
    assert 0 <= p <= 1


def test_the_formula_at_a_point() -> None:
    """m 1000, r 100, v 90, ε 1, δ 1e-5, term by term."""
    rate = math.e / (1 + math.e)
    tail = [sum(math.comb(100, k) * rate**k * (1 - rate) ** (100 - k) for k in range(v, 101)) for v in range(91)]
    expected = tail[90] + 2 * 1000 * 1e-5 * max((tail[90 - i] - tail[90]) / i for i in range(1, 91))
    assert guessing_p_value(1000, 100, 90, 1.0, 1e-5) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match="5 right of 4 guesses"):
        guessing_p_value(10, 4, 5, 1.0, 0.0)


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_one_run_bounds_of_randomised_response_hold(epsilon: float) -> None:
    """m independent answers, each true with probability e^ε / (1 + e^ε): the strongest one-run release there is."""
    above, bounds = 0, []
    for seed in range(100):
        random = np.random.default_rng(seed)
        included = random.random(300) < 0.5
        truth = random.random(300) < math.exp(epsilon) / (1 + math.exp(epsilon))
        scores = np.where(included == truth, 1.0, -1.0) + 0.1 * random.random(300)
        bound, guesses, correct = guessing_bound(scores, included, delta=0.0, confidence=0.95)
        assert 0 <= correct <= guesses <= 300
        above += bound > epsilon
        bounds.append(bound)
    assert above <= stats.binom.ppf(0.999, 100, 0.05)
    assert np.mean(bounds) >= 0.6 * epsilon


def test_scores_and_canaries_belong_together() -> None:
    with pytest.raises(ValueError, match="3 scores for 2 canaries"):
        guessing_bound(np.zeros(3), np.zeros(2, dtype=bool), delta=0.0, confidence=0.95)
