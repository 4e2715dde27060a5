"""Bounds from one run: as large as published for ideal canaries, and above the truth no more often than they say."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from dphero.accounting import Gaussian, Ledger
from dphero.accounting.numerics.curves import gaussian_epsilon, gaussian_mu
from dphero.audit.bounds.claims import Claim, claim_of_ledger
from dphero.audit.bounds.one_run_bounds import curve_bound, curve_refuted, pair_bound
from dphero.audit.bounds.statistics import guessing_bound

DELTA = 1e-5
MU = gaussian_mu(3.0, DELTA)


def claim(mu: float) -> Claim:
    ledger = Ledger()
    ledger.record(Gaussian(1 / mu))
    return claim_of_ledger(ledger, DELTA)


def ideal(canaries: int, mu: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores that are the quantiles of N(μ, 1), in, and of N(0, 1), out: no chance in them."""
    quantiles = stats.norm.ppf((np.arange(canaries // 2) + 0.5) / (canaries // 2))
    return np.r_[quantiles + mu, quantiles], np.arange(canaries) < canaries // 2


def drawn(seed: int, canaries: int, mu: float) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    included = random.random(canaries) < 0.5
    return random.normal(size=canaries) + mu * included, included


def test_ideal_canaries_give_the_known_values() -> None:
    """ε = 3, 500 canaries, 95 %: 0.74, 1.09 and 2.29, give or take how many are guessed."""
    scores, included = ideal(500, MU)
    steinke, _, _ = guessing_bound(scores, included, delta=DELTA, confidence=0.95)
    curve, pair = curve_bound(claim(MU), scores, included, 0.95), pair_bound(scores, included, DELTA, 0.95)
    assert curve is not None and pair is not None
    assert steinke == pytest.approx(0.74, abs=0.03)
    assert curve.epsilon == pytest.approx(1.09, abs=0.03)
    assert pair.epsilon == pytest.approx(2.29, abs=0.03)
    assert "up to the size of the noise" in curve.assumes and "independent normal scores" in pair.assumes


def test_the_curve_is_refuted_no_more_often_than_its_error_probability() -> None:
    """Independent normal scores are the worst that the claim allows."""
    true = claim(MU)
    wrong = sum(curve_refuted(true, *drawn(seed, 200, MU), 0.05) for seed in range(300))
    assert wrong <= stats.binom.ppf(0.999, 300, 0.05)


def test_the_distance_of_normal_scores_is_overstated_as_often_as_it_says() -> None:
    found = [pair_bound(*drawn(seed, 200, MU), DELTA, 0.95) for seed in range(1000)]
    above = sum(each is not None and each.epsilon > 3.0 for each in found)
    assert stats.binom.ppf(0.001, 1000, 0.05) <= above <= stats.binom.ppf(0.999, 1000, 0.05)  # exact, so not less


def test_canaries_that_sampled_lots_leave_out_now_and_then_do_not_break_the_bound() -> None:
    """Scores of 16 steps, in a quarter of which a canary is: the claim is that of the sampled releases."""
    from dphero.accounting import PoissonGaussian, price

    ledger, random = Ledger(), np.random.default_rng(5)
    ledger.record(PoissonGaussian(0.25, 1.0), 16)
    true, above = price(ledger, DELTA).epsilon, 0
    for _ in range(200):
        included = random.random(300) < 0.5
        scores = included * random.binomial(16, 0.25, size=300) + 4 * random.normal(size=300)
        bound = pair_bound(scores, included, DELTA, 0.95)
        above += bound is not None and bound.epsilon > true
    assert above <= stats.binom.ppf(0.999, 200, 0.05)


def test_a_curve_by_points_is_nearly_the_exact_one_and_never_stricter() -> None:
    scores, included = ideal(400, 1.5)
    exact = [curve_refuted(claim(mu), scores, included, 0.05) for mu in np.arange(0.1, 1.5, 0.01)]
    points = [curve_refuted(replace(claim(mu), mu=None), scores, included, 0.05) for mu in np.arange(0.1, 1.5, 0.01)]
    assert 30 < sum(exact) < 100 and sum(exact) - 2 <= sum(points) <= sum(exact)
    assert exact == sorted(exact, reverse=True)  # a bolder claim is refuted sooner


def test_more_than_the_claim_allows_is_refuted() -> None:
    assert curve_refuted(claim(0.5), *drawn(1, 500, 2.0), 0.05)
    assert not curve_refuted(claim(2.0), *drawn(1, 500, 2.0), 0.05)
    found = curve_bound(claim(0.5), *drawn(1, 500, 2.0), 0.95)
    assert found is not None and gaussian_epsilon(0.5, DELTA) < found.epsilon < gaussian_epsilon(2.0, DELTA)


def test_scores_that_say_nothing_bound_nothing() -> None:
    scores, included = drawn(3, 200, 0.0)
    assert pair_bound(scores, included, DELTA, 0.95) == pair_bound(-scores, ~included, DELTA, 0.95)
    assert pair_bound(np.zeros(200), included, DELTA, 0.95) is None
    assert pair_bound(scores, np.full(200, True), DELTA, 0.95) is None
    bound = pair_bound(*drawn(3, 200, -3.0), DELTA, 0.95)
    assert bound is not None and bound.epsilon == 0.0
    found = curve_bound(claim(1.0), *drawn(4, 200, 0.0), 0.95)
    assert found is not None and found.epsilon < 0.1
    assert curve_bound(replace(claim(1.0), family=None), scores, included, 0.95) is None


def test_scores_far_apart_are_no_overflow() -> None:
    bound = pair_bound(*drawn(5, 400, 50.0), DELTA, 0.95)
    assert bound is not None and math.isfinite(bound.epsilon) and 500 < bound.epsilon < gaussian_epsilon(50.0, DELTA)
