"""What an attacker could gain: against the Gaussian formula, plain integration, and a simulated attack."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from dphero.accounting import (
    AdaptiveGaussian,
    Gaussian,
    Ledger,
    NoNoise,
    PoissonGaussian,
    PoissonStudentT,
    RandomisedLabels,
    UnpriceableError,
    price,
    trade_off,
)


def ledger(event, count=1):
    found = Ledger()
    found.record(event, count)
    return found


def test_nothing_released_nothing_gained():
    assert trade_off(Ledger()).true_positive_rate(0.01) == 0.01


def test_gaussians_have_a_formula():
    found = trade_off(ledger(Gaussian(noise_multiplier=2.0), 9))
    for rate in (0.001, 0.01, 0.5):
        assert found.true_positive_rate(rate) == pytest.approx(norm.cdf(norm.ppf(rate) + 1.5), rel=2e-3)
    assert found.is_bound


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.2])
def test_one_sampled_release_by_the_quantiles_of_its_test(rate):
    q, sigma = 0.2, 0.8
    threshold = norm.isf(rate) * sigma  # Q = N(0, s²), P = (1-q) Q + q N(1, s²): the ratio grows with x
    true = (1 - q) * rate + q * norm.sf(threshold, 1, sigma)
    found = trade_off(ledger(PoissonGaussian(sample_rate=q, noise_multiplier=sigma)), coarse=False)
    assert true <= found.true_positive_rate(rate) == pytest.approx(true, rel=3e-3)


def test_no_simulated_attack_beats_it_and_the_best_one_comes_close():
    q, sigma, steps, attacks = 0.1, 1.0, 60, 40_000
    generator = np.random.default_rng(0)

    def scores(present):
        chosen = generator.random((attacks, steps)) < q if present else 0
        seen = generator.normal(0, sigma, (attacks, steps)) + chosen
        return np.log1p(q * np.expm1((2 * seen - 1) / (2 * sigma**2))).sum(1)

    threshold = np.quantile(scores(False), 0.99)
    reached = (scores(True) > threshold).mean()
    bound = trade_off(ledger(PoissonGaussian(sample_rate=q, noise_multiplier=sigma), steps)).true_positive_rate(0.01)
    assert 0.9 * bound < reached < bound + 4 * math.sqrt(bound / attacks)


def test_it_is_far_below_what_epsilon_alone_allows():
    spent = ledger(PoissonGaussian(sample_rate=0.01, noise_multiplier=1.0), 1000)
    epsilon = price(spent, 1e-5).epsilon
    assert trade_off(spent).true_positive_rate(0.01) < 0.5 * math.exp(epsilon) * 0.01


def test_other_accountants_give_a_weaker_bound_and_none_gives_one_where_there_is_none():
    spent = ledger(PoissonGaussian(sample_rate=0.01, noise_multiplier=1.0), 1000)
    by_rdp, by_pld = (trade_off(spent, name).true_positive_rate(0.01) for name in ("rdp", "pld"))
    assert by_pld < by_rdp < 1
    assert trade_off(
        ledger(PoissonStudentT(sample_rate=0.1, noise_multiplier=9.0, degrees=20, spacing=0.1, levels=100), 5), "rdp"
    ).is_bound
    assert trade_off(ledger(NoNoise())).true_positive_rate(0.0) == 1
    with pytest.raises(UnpriceableError, match="filter"):
        trade_off(ledger(AdaptiveGaussian(sample_rate=0.1, noise_multiplier=1.0)))
    assert not trade_off(ledger(AdaptiveGaussian(sample_rate=0.1, noise_multiplier=1.0)), "filter").is_bound


def test_randomised_labels_are_told_by_their_odds():
    found = trade_off(ledger(RandomisedLabels(epsilon=1.0, part=0)))
    assert found.true_positive_rate(0.01) == pytest.approx(0.01 * math.e, rel=2e-2)


def test_rates_are_rates():
    with pytest.raises(ValueError, match="between 0 and 1"):
        trade_off(Ledger()).true_positive_rate(2.0)
