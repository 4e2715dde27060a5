"""The curves under the accountants, against dp_accounting and against plain integration."""

import math

import numpy as np
import pytest
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy.integrate import quad
from scipy.stats import norm

from dphero.accounting.numerics.curves import (
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    poisson_gaussian_deltas,
    poisson_gaussian_pld,
    self_compose,
)


@pytest.mark.parametrize("sigma", [0.05, 0.5, 1.0, 8.0, 50.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_gaussian_epsilon_is_exact_and_on_the_safe_side(sigma, delta):
    epsilon = gaussian_epsilon(1 / sigma, delta)
    assert epsilon == pytest.approx(get_epsilon_gaussian(sigma, delta), rel=1e-6, abs=1e-9)
    assert gaussian_delta(1 / sigma, epsilon) <= delta


def test_gaussian_epsilon_at_the_ends():
    assert gaussian_epsilon(0.0, 1e-5) == 0.0
    assert gaussian_epsilon(1e-7, 1e-5) == 0.0
    assert math.isinf(gaussian_epsilon(math.inf, 1e-5))
    assert 5e5 < gaussian_epsilon(1e3, 1e-5) < 5.1e5


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 8.0, 300.0])
def test_gaussian_mu_inverts_gaussian_epsilon(epsilon):
    assert gaussian_epsilon(gaussian_mu(epsilon, 1e-5), 1e-5) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 1.0), (0.3, 0.6), (0.9, 3.0)])
@pytest.mark.parametrize("epsilon", [-0.2, 0.0, 0.05, 0.5])
@pytest.mark.parametrize("adding", [False, True])
def test_divergences_are_the_integral_of_the_positive_part(rate, sigma, epsilon, adding):
    def without(x):
        return norm.pdf(x, 0, sigma)

    def with_example(x):
        return (1 - rate) * norm.pdf(x, 0, sigma) + rate * norm.pdf(x, 1, sigma)

    upper, lower = (without, with_example) if adding else (with_example, without)
    expected, _ = quad(
        lambda x: max(upper(x) - math.exp(epsilon) * lower(x), 0.0),
        -12 * sigma,
        1 + 12 * sigma,
        limit=1000,
        epsabs=1e-13,
        epsrel=1e-9,
    )
    found = poisson_gaussian_deltas(rate, sigma, np.array([epsilon]), adding=adding)[0]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-10)


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.5, 0.999999])
@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.1, 20.0])
@pytest.mark.parametrize("adjacency", [AdjacencyType.ADD, AdjacencyType.REMOVE])
def test_divergences_equal_those_of_dp_accounting(rate, sigma, adjacency):
    theirs = GaussianPrivacyLoss(sigma, sampling_prob=rate, adjacency_type=adjacency)
    bounds = theirs.connect_dots_bounds()
    epsilons = np.linspace(bounds.epsilon_lower - 0.1, bounds.epsilon_upper + 0.1, 501)
    ours = poisson_gaussian_deltas(rate, sigma, epsilons, adding=adjacency is AdjacencyType.ADD)
    np.testing.assert_allclose(ours, theirs.get_delta_for_epsilon(epsilons), rtol=1e-4, atol=1e-14)


def test_distribution_equals_that_of_dp_accounting():
    ours = poisson_gaussian_pld(0.02, 0.9, 1e-3).self_compose(500)
    theirs = from_gaussian_mechanism(0.9, sampling_prob=0.02, value_discretization_interval=1e-3)
    theirs = theirs.self_compose(500)
    for delta in (1e-3, 1e-5, 1e-8):
        assert ours.get_epsilon_for_delta(delta) == pytest.approx(theirs.get_epsilon_for_delta(delta), rel=1e-6)


def test_long_runs_composed_in_stages_cost_the_same():
    one = poisson_gaussian_pld(1e-3, 2.0, 1e-3)
    count = 100_500
    staged, straight = self_compose(one, count), one.self_compose(count)
    assert staged.get_epsilon_for_delta(1e-5) == pytest.approx(straight.get_epsilon_for_delta(1e-5), rel=1e-6)
