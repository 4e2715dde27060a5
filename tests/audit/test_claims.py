"""Claims: the curve is that of the ledger, and evidence refutes it when, and only when, it breaks the curve."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dphero.accounting import Ledger, NoNoise, PoissonGaussian, ShuffledGaussian, claimed_by_paper, price
from dphero.accounting.numerics.curves import gaussian_delta, gaussian_epsilon, poisson_gaussian_deltas
from dphero.audit.bounds.claims import claim_of_ledger, claim_of_prices
from dphero.audit.bounds.statistics import Errors, Separation

DELTA = 1e-5


def gaussian(mu: float, threshold: float = 0.5) -> Separation:
    return Separation(threshold, float(stats.norm.sf(threshold - mu)), float(stats.norm.sf(threshold)))


def sampled(rate: float, sigma: float, threshold: float = 1.2) -> Separation:
    """The exact rates of a Poisson-sampled Gaussian, whose sum moves by 1 under noise σ."""
    out, moved = stats.norm.sf(threshold / sigma), stats.norm.sf((threshold - 1) / sigma)
    return Separation(threshold, float((1 - rate) * out + rate * moved), float(out))


def ledger(event: object, count: int = 1) -> Ledger:
    made = Ledger()
    made.record(event, count)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("sigma, steps", [(1.0, 1), (2.0, 5), (0.3, 1)])
def test_unsampled_releases_claim_gaussian_privacy(sigma: float, steps: int) -> None:
    claim = claim_of_ledger(ledger(PoissonGaussian(1.0, sigma), steps), DELTA)
    mu = math.sqrt(steps) / sigma
    assert claim.mu == pytest.approx(mu) and claim.epsilon == pytest.approx(gaussian_epsilon(mu, DELTA))
    for epsilon, delta in list(zip(*claim.curve, strict=True))[::40]:
        assert delta == pytest.approx(gaussian_delta(mu, epsilon), rel=1e-6, abs=1e-13)
    for threshold in (-2.0, 0.0, 0.5, 3.0):
        assert claim.refuted([gaussian(1.02 * mu, threshold)])
        assert not claim.refuted([gaussian(0.999 * mu, threshold)])
    assert claim.fitted([gaussian(0.5 * mu), gaussian(0.8 * mu)]) == pytest.approx(gaussian_epsilon(0.8 * mu, DELTA))


def test_sampled_releases_claim_their_own_curve() -> None:
    claim = claim_of_ledger(ledger(PoissonGaussian(0.5, 0.8)), DELTA)
    epsilons, deltas = claim.curve
    exact = np.maximum(
        poisson_gaussian_deltas(0.5, 0.8, epsilons, adding=False),
        poisson_gaussian_deltas(0.5, 0.8, epsilons, adding=True),
    )
    assert (deltas >= exact - 1e-9).all() and np.abs(deltas - exact).max() < 1e-3
    assert claim.epsilon == pytest.approx(price(ledger(PoissonGaussian(0.5, 0.8)), DELTA).epsilon, rel=2e-3)
    assert not claim.refuted([sampled(0.5, 0.8)])
    assert claim.refuted([sampled(0.5, 0.6)])  # less noise
    assert claim.refuted([sampled(0.8, 0.8)])  # a larger rate


def test_the_sum_of_errors_is_tested_against_the_curve() -> None:
    """Total variation is what it is about: δ at ε = 0."""
    for event, total in (
        (PoissonGaussian(1.0, 0.8), 2 * stats.norm.sf(0.5 / 0.8)),
        (PoissonGaussian(0.5, 0.8), 1 - (stats.norm.sf(-0.5 / 0.8) - stats.norm.sf(0.5 / 0.8)) / 2),
    ):
        claim = claim_of_ledger(ledger(event), DELTA)
        assert claim.refuted([Errors(0.0, total - 0.005)]) and not claim.refuted([Errors(0.0, total + 0.001)])
        fitted = claim.fitted([Errors(0.0, total)])
        assert fitted == pytest.approx(claim.epsilon, rel=0.02)


def test_the_family_finds_the_noise_that_was_there() -> None:
    claim = claim_of_ledger(ledger(PoissonGaussian(0.5, 0.8)), DELTA)
    for sigma in (0.5, 0.8, 1.5):
        true = price(ledger(PoissonGaussian(0.5, sigma)), DELTA).epsilon
        best = max(claim.fitted([sampled(0.5, sigma, threshold)]) or 0.0 for threshold in (1.0, 1.8))
        assert 0.85 * true <= best <= 1.01 * true
    assert claim.fitted([Separation(0, 0.3, 0.3)]) == 0
    nothing_missed = claim.fitted([Separation(0, 1 - 1e-12, 1e-12)])
    assert nothing_missed is not None and nothing_missed > 100


def test_an_epoch_of_shuffled_lots_claims_one_release() -> None:
    claim = claim_of_ledger(ledger(ShuffledGaussian(1.5, 0), 7), DELTA)
    assert claim.mu == pytest.approx(1 / 1.5)


def test_no_noise_claims_nothing() -> None:
    claim = claim_of_ledger(ledger(NoNoise()), DELTA)
    assert math.isinf(claim.epsilon)
    assert not claim.refuted([Separation(0, 1 - 1e-9, 1e-9)])


def test_any_price_makes_a_claim() -> None:
    claim = claim_of_prices(lambda delta: claimed_by_paper([4.0], delta).epsilon, DELTA)
    assert claim.epsilon == pytest.approx(1.2309, abs=1e-3) and claim.fitted([gaussian(1)]) is None
    assert not claim.refuted([gaussian(1 / 4)])
    assert claim.refuted([gaussian(10)])
    # zCDP's conversion is loose: a release must be clearly worse than claimed to break it.
    assert [claim.refuted([gaussian(mu, mu / 2)]) for mu in (0.3, 1.5)] == [False, True]
