"""Many different sampled releases: quick, close to dp_accounting's own composition, and never below the truth."""

import math
import time

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st

from dphero.accounting import Budget, Gaussian, Ledger, PoissonGaussian, price
from dphero.accounting.numerics import many
from dphero.accounting.numerics.curves import poisson_gaussian_deltas, poisson_gaussian_masses
from dphero.accounting.numerics.mixtures import mixtures

RATES = st.floats(1e-4, 0.95)
SIGMAS = st.floats(0.2, 30.0)


def ledger_of(releases):
    ledger = Ledger()
    for (rate, sigma), count in releases.items():
        ledger.record(PoissonGaussian(rate, sigma), count)
    return ledger


def schedule(different, rate=0.01, low=0.8, high=1.6, count=1):
    return {(rate, float(sigma)): count for sigma in np.linspace(low, high, different)}


def composed_by_dp_accounting(releases, interval, *, pessimistic):
    total = None
    for (rate, sigma), count in releases.items():
        one = from_gaussian_mechanism(
            sigma,
            sampling_prob=rate,
            value_discretization_interval=interval,
            pessimistic_estimate=pessimistic,
            use_connect_dots=pessimistic,
        ).self_compose(count)
        total = one if total is None else total.compose(one)
    return total


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(RATES, SIGMAS), min_size=12, max_size=12), st.floats(-3, 3), st.booleans())
def test_a_mixture_dominates_the_release_at_every_epsilon(releases, epsilon, adding):
    found = mixtures(releases, at_most=20)
    assert found.weights.sum(axis=1) == pytest.approx(1)
    epsilons = np.array([epsilon, epsilon / 100])
    nodes = [poisson_gaussian_deltas(rate, sigma, epsilons, adding=adding) for rate, sigma in found.nodes]
    for (rate, sigma), indices, weights in zip(releases, found.indices, found.weights, strict=True):
        true = poisson_gaussian_deltas(rate, sigma, epsilons, adding=adding)
        mixed = sum(weight * nodes[index] for index, weight in zip(indices, weights, strict=True))
        assert (mixed >= true - 1e-13).all()


def test_the_other_direction_of_the_weights_would_not_dominate():
    releases = [(0.01, float(sigma)) for sigma in np.linspace(0.8, 1.2, 200)]
    found = mixtures(releases, at_most=100)
    assert found.lattice is not None
    less = 0
    for (rate, sigma), indices, weights in zip(releases, found.indices, found.weights, strict=True):
        true = poisson_gaussian_deltas(rate, sigma, np.array([0.1]), adding=False)[0]
        swapped = [*weights[::-1][-2:].tolist(), 0.0, 0.0]
        nodes = [poisson_gaussian_deltas(*found.nodes[index], np.array([0.1]), adding=False)[0] for index in indices]
        less += sum(w * node for w, node in zip(swapped, nodes, strict=True)) < true
    assert less > 50


@pytest.mark.parametrize("adding", [False, True])
@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 0.9), (0.5, 0.4), (0.9, 5.0), (1e-4, 1.0)])
def test_few_points_still_lie_above_the_divergences(rate, sigma, adding):
    losses, masses, infinite = poisson_gaussian_masses(rate, sigma, 1e-3, adding=adding)
    assert masses.sum() + infinite == pytest.approx(1, abs=1e-9)
    for epsilon in np.linspace(-0.5, 2.0, 41):
        above = losses * 1e-3 > epsilon
        found = infinite - np.expm1(epsilon - losses[above] * 1e-3) @ masses[above]
        true = poisson_gaussian_deltas(rate, sigma, np.array([epsilon]), adding=adding)[0]
        assert true - 1e-12 <= found <= true * 1.001 + 1e-3


@pytest.mark.parametrize(
    "releases",
    [
        schedule(18, count=30),
        schedule(18, rate=0.2, low=3.0, high=9.0, count=5),
        pytest.param({(float(rate), 1.0): 20 for rate in np.linspace(0.001, 0.05, 18)}, marks=pytest.mark.slow),
    ],
    ids=["noise", "large_lots", "rates"],
)
def test_close_to_dp_accounting_and_not_below_the_truth(releases):
    ledger = ledger_of(releases)
    optimistic = composed_by_dp_accounting(releases, 1e-3, pessimistic=False)
    pessimistic = composed_by_dp_accounting(releases, 5e-4, pessimistic=True)
    for delta in (1e-3, 1e-5, 1e-8):
        found = price(ledger, delta)
        assert found.is_bound
        assert found.epsilon >= optimistic.get_epsilon_for_delta(delta)
        assert found.epsilon == pytest.approx(pessimistic.get_epsilon_for_delta(delta), rel=1e-3)


@settings(max_examples=3, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.002, 0.2), st.floats(0.7, 4.0)), min_size=17, max_size=20, unique=True),
    st.sampled_from([1e-4, 1e-6]),
)
def test_any_releases_are_priced_from_above(releases, delta):
    found = many.compose_many(dict.fromkeys(releases, 2), delta)[1].get_epsilon_for_delta(delta)
    optimistic = composed_by_dp_accounting(dict.fromkeys(releases, 2), 2e-3, pessimistic=False)
    assert found >= optimistic.get_epsilon_for_delta(delta)


def test_the_lattice_adds_little(monkeypatch):
    releases = schedule(300)
    on_lattice = price(ledger_of(releases), 1e-5).epsilon
    monkeypatch.setattr(many, "_NODES", 10**6)
    many.remembered.clear()
    assert 1 < on_lattice / price(ledger_of(releases), 1e-5).epsilon < 1.0005


def test_releases_that_hardly_differ_cost_what_equal_ones_cost():
    nearly = {(0.01, 1.0 + 1e-9 * index): 10 for index in range(40)}
    equal = Ledger()
    equal.record(PoissonGaussian(0.01, 1.0), 400)
    assert price(ledger_of(nearly), 1e-5).epsilon == pytest.approx(price(equal, 1e-5).epsilon, rel=5e-4)


def test_gaussians_without_sampling_are_composed_too():
    ledger = ledger_of(schedule(30, count=10))
    alone = price(ledger, 1e-5).epsilon
    both = price(ledger.with_event(Gaussian(2.0)), 1e-5).epsilon
    whole = Ledger()
    whole.record(Gaussian(2.0))
    assert max(alone, price(whole, 1e-5).epsilon) < both < alone + price(whole, 1e-5).epsilon


@pytest.mark.parametrize("shrink", [4, 16])
def test_a_circle_that_is_too_small_makes_the_price_larger_not_smaller(shrink, monkeypatch):
    releases = schedule(40, count=50)
    right = many.compose_many(releases, 1e-5)[1].get_epsilon_for_delta(1e-5)
    grid = many._grid

    def small(*arguments):
        found = grid(*arguments)
        return many.Grid(found.interval, found.points // shrink)

    monkeypatch.setattr(many, "_grid", small)
    assert many.compose_many(releases, 1e-5)[1].get_epsilon_for_delta(1e-5) >= right * (1 - 1e-6)


def test_an_appended_release_costs_one_multiplication_and_changes_nothing_else(monkeypatch):
    releases = schedule(200)
    many.remembered.clear()
    price(ledger_of(releases), 1e-5)
    calls = []
    multiply = many._Factors.multiply
    monkeypatch.setattr(many._Factors, "multiply", lambda self, *rest: (calls.append(1), multiply(self, *rest)))
    longer = {**releases, (0.01, 2.0): 1}
    again = {**longer, (0.01, 0.8): 3}  # one that was there before, twice more
    appended = [price(ledger_of(several), 1e-5).epsilon for several in (longer, again)]
    assert len(calls) == 2
    many.remembered.clear()
    fresh = []
    for several in (again, longer):
        fresh.insert(0, price(ledger_of(several), 1e-5).epsilon)
        many.remembered.clear()
    assert appended == pytest.approx(fresh, rel=3e-9)
    assert price(ledger_of(releases), 1e-5).epsilon < appended[0] < appended[1]


@pytest.mark.parametrize(("different", "seconds"), [(1_000, 1.0), (10_000, 5.0)])
def test_thousands_of_different_events_are_priced_in_seconds(different, seconds):
    ledger = ledger_of(schedule(different))
    many.remembered.clear()
    start = time.process_time()
    epsilon = price(ledger, 1e-5).epsilon
    assert time.process_time() - start < seconds
    assert 1 < epsilon < 6
    start = time.process_time()
    assert epsilon < price(ledger.with_event(PoissonGaussian(0.01, 0.7)), 1e-5).epsilon
    assert time.process_time() - start < 0.5


def test_huge_losses_and_tiny_ones_have_a_price():
    assert math.isfinite(price(ledger_of(schedule(40, rate=0.1, low=0.2, high=0.4)), 1e-5).epsilon)
    assert price(ledger_of(schedule(40, rate=1e-6, low=50.0, high=90.0)), 1e-5).epsilon < 0.01


@pytest.mark.slow
def test_renyi_divergences_of_many_are_bounded_from_above_by_those_of_a_few(monkeypatch):
    ledger = ledger_of(schedule(150, count=20))
    found = price(ledger, 1e-5, "rdp").epsilon
    monkeypatch.setattr(many, "_RENYI_NODES", 10**6)  # every release its own node
    assert 1 < found / price(ledger, 1e-5, "rdp").epsilon < 1.005


def test_a_budget_on_a_schedule_is_checked_quickly():
    budget = Budget(epsilon=2.0, delta=1e-5)
    ledger = ledger_of(schedule(300))
    budget.check(ledger, PoissonGaussian(0.01, 1.61))
    start = time.process_time()
    for index in range(3):
        event = PoissonGaussian(0.01, 1.62 + index / 100)
        budget.check(ledger, event)
        ledger.record(event)
    assert time.process_time() - start < 6
