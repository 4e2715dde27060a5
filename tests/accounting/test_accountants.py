"""Prices against dp_accounting and published values; what accountants refuse; that costs grow."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import from_randomized_response
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from dphero.accounting import (
    EVENT_KINDS,
    AdaptiveGaussian,
    Event,
    Gaussian,
    Ledger,
    PoissonGaussian,
    ShuffledGaussian,
    UnpriceableError,
    claimed_by_paper,
    price,
)
from dphero.accounting.events.line_search import LineSearchStep
from dphero.accounting.numerics.curves import _poisson_gaussian_rdp, gaussian_epsilon, poisson_gaussian_pld, rdp_epsilon

MNIST_RATE = 256 / 60000


def ledger_of(event: Event, count: int) -> Ledger:
    ledger = Ledger()
    ledger.record(event, count)
    return ledger


def shuffled(sigma: float, epochs: int, batches: int = 3) -> Ledger:
    ledger = Ledger()
    for epoch in range(epochs):
        ledger.record(ShuffledGaussian(sigma, epoch), batches)
    return ledger


# Against dp_accounting.

GRID = [
    (MNIST_RATE, 1.1, 14062, 1e-5),
    (0.01, 0.8, 1000, 1e-5),
    (0.01, 2.0, 3000, 1e-6),
    (0.1, 3.0, 500, 1e-3),
    (0.5, 5.0, 20, 1e-8),
    (0.001, 1.0, 1, 1e-4),
]


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), GRID)
def test_pld_and_rdp_equal_dp_accounting(rate, sigma, steps, delta):
    event, ledger = (
        PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)),
        ledger_of(PoissonGaussian(rate, sigma), steps),
    )
    theirs = PLDAccountant().compose(event, steps).get_epsilon(delta)
    assert price(ledger, delta).epsilon == pytest.approx(theirs, rel=1e-5, abs=1e-9)
    theirs = RdpAccountant().compose(event, steps).get_epsilon(delta)
    assert price(ledger, delta, "rdp").epsilon == pytest.approx(theirs, rel=1e-9)


def test_a_ledger_of_several_events_equals_dp_accounting():
    ledger = Ledger()
    theirs = PLDAccountant()
    for _ in range(3):  # taking turns: equal events are priced together
        for event, count in [(PoissonGaussian(0.02, 1.5), 50), (PoissonGaussian(0.1, 4.0), 10)]:
            ledger.record(event, count)
            theirs.compose(PoissonSampledDpEvent(event.sample_rate, GaussianDpEvent(event.noise_multiplier)), count)
    ledger.record(Gaussian(20.0), 4)
    theirs.compose(GaussianDpEvent(20.0), 4)
    assert price(ledger, 1e-5).epsilon == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-4)


@pytest.mark.parametrize("sigma", [2.0, 20.0])
def test_unsampled_gaussians_equal_dp_accounting(sigma):
    theirs = PLDAccountant().compose(GaussianDpEvent(sigma), 10).get_epsilon(1e-5)
    for event in (Gaussian(sigma), PoissonGaussian(1.0, sigma)):
        assert price(ledger_of(event, 10), 1e-5).epsilon == pytest.approx(theirs, rel=1e-4)


def test_shuffled_epochs_equal_dp_accounting_under_replace_special():
    theirs = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL).compose(GaussianDpEvent(8.0), 20)
    found = price(shuffled(8.0, 20), 1e-5)
    assert found.epsilon == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-4)
    assert found.relation == "zero_out"


def test_the_coarse_grid_is_a_slightly_larger_bound():
    for rate, sigma, steps, delta in GRID[:4]:
        ledger = ledger_of(PoissonGaussian(rate, sigma), steps)
        fine, coarse = price(ledger, delta), price(ledger, delta, coarse=True)
        assert fine.epsilon <= coarse.epsilon <= 1.02 * fine.epsilon
        assert coarse.is_bound


# Published values.


def test_mnist_example():
    ledger = ledger_of(PoissonGaussian(MNIST_RATE, 1.1), 14062)
    exact, limit = price(ledger, 1e-5), price(ledger, 1e-5, "gdp")
    assert 2.38 <= exact.epsilon <= 2.39
    assert exact.is_bound and exact.warning is None and exact.accountant == "pld"
    assert limit.epsilon == pytest.approx(2.32, abs=0.005)
    assert not limit.is_bound and "under-reports" in limit.warning


def test_the_central_limit_under_reports():
    ledger = ledger_of(PoissonGaussian(MNIST_RATE, 0.7), 45 * 60000 // 256)
    assert price(ledger, 1e-5, "gdp").epsilon == pytest.approx(5.07, abs=0.005)
    assert price(ledger, 1e-5).epsilon == pytest.approx(5.64, abs=0.005)


def test_gaussian_privacy_is_exact_without_sampling():
    found = price(ledger_of(Gaussian(5.0), 10), 1e-5, "gdp")
    assert found.is_bound and found.warning is None
    assert found.epsilon == price(ledger_of(Gaussian(5.0), 10), 1e-5).epsilon


def test_dp_mp():
    found = price(shuffled(8.0, 100), 1e-5, "zcdp")
    assert found.epsilon == pytest.approx(0.78125 + 2 * math.sqrt(0.78125 * math.log(1e5)))
    assert found.epsilon == pytest.approx(6.78, abs=0.005)
    assert found.is_bound


def test_zcdp_of_sampled_steps_is_a_bound_without_amplification_and_says_so():
    sampled = price(ledger_of(PoissonGaussian(0.1, 20.0), 100), 1e-5, "zcdp")
    assert sampled.epsilon == price(ledger_of(Gaussian(20.0), 100), 1e-5, "zcdp").epsilon
    assert sampled.is_bound and "no gain from sampling" in sampled.warning


@pytest.mark.parametrize(("sigma", "claim"), [(0.5, 11.6), (1, 5.30), (3, 1.66), (5, 0.98), (7, 0.70), (10, 0.49)])
def test_the_papers_claim(sigma, claim):
    found = claimed_by_paper([sigma + 1, sigma, sigma * 2] * 50, 1e-5)
    assert found.epsilon == pytest.approx(claim, abs=0.006)
    assert not found.is_bound and found.warning.startswith("unsound")
    assert found.accountant == "claimed_by_paper"


def test_the_papers_claim_of_nothing():
    assert claimed_by_paper([], 1e-5).epsilon == 0.0
    with pytest.raises(ValueError, match="noise_multiplier"):
        claimed_by_paper([1.0, 0.0], 1e-5)


# The filter.


def test_the_filter_sums_divergences_at_one_order():
    sigmas = [1.0, 2.0, 3.0]
    ledger = Ledger()
    theirs = RdpAccountant(orders=[6])
    for sigma in sigmas:
        ledger.record(AdaptiveGaussian(0.1, sigma), 10)
        theirs.compose(PoissonSampledDpEvent(0.1, GaussianDpEvent(sigma)), 10)
    found = price(ledger, 1e-5, "filter", filter_order=6)
    assert found.epsilon == pytest.approx(theirs.get_epsilon(1e-5))
    assert not found.is_bound and "budget" in found.warning


def test_the_filter_of_fixed_noise_is_a_bound():
    found = price(ledger_of(PoissonGaussian(0.01, 1.0), 1000), 1e-5, "filter")
    assert found.is_bound and found.warning is None
    assert found.epsilon >= price(ledger_of(PoissonGaussian(0.01, 1.0), 1000), 1e-5, "rdp").epsilon


@pytest.mark.parametrize("noise", [0.0, 1e-300, 1e-160])
def test_no_noise_costs_everything(noise):
    ledger = ledger_of(AdaptiveGaussian(0.1, 1.0), 5).with_event(AdaptiveGaussian(0.1, noise))
    assert math.isinf(price(ledger, 1e-5, "filter").epsilon)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "zcdp", "gdp"])
def test_only_the_filter_prices_adaptive_noise(accountant):
    ledger = ledger_of(PoissonGaussian(0.1, 1.0), 5).with_event(AdaptiveGaussian(0.1, 1.0))
    with pytest.raises(UnpriceableError, match=f"'{accountant}' cannot price AdaptiveGaussian.*'filter'"):
        price(ledger, 1e-5, accountant)


# Edges.


@pytest.mark.parametrize("accountant", ["pld", "rdp", "zcdp", "gdp", "filter"])
def test_an_empty_ledger_costs_nothing(accountant):
    found = price(Ledger(), 1e-5, accountant)
    assert found.epsilon == 0.0 and found.is_bound and found.relation == "add_or_remove"


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan, math.inf, "small"])
def test_delta_must_be_a_probability(delta):
    with pytest.raises(ValueError, match="delta must be"):
        price(Ledger(), delta)


def test_unknown_accountants_are_refused():
    with pytest.raises(ValueError, match="'prv' is unknown: use one of pld, rdp, zcdp, gdp, filter"):
        price(Ledger(), 1e-5, "prv")


@pytest.mark.parametrize("order", [1.0, 0.5, math.nan, math.inf])
def test_the_order_of_a_filter_must_be_above_one(order):
    with pytest.raises(ValueError, match="filter_order"):
        price(Ledger(), 1e-5, "filter", filter_order=order)


def test_where_the_fft_has_no_digits_left_renyi_divergences_answer():
    # A sample rate of nearly 1 is nearly the exact Gaussian; the FFT alone would report 4.47 here.
    ledger = ledger_of(PoissonGaussian(0.9999, math.sqrt(2e6)), 10**6)
    found = price(ledger, 1e-10)
    assert found.accountant == "rdp" and "digits" in found.warning and found.is_bound
    assert found.epsilon >= 0.999 * gaussian_epsilon(math.sqrt(0.5), 1e-10)


@pytest.mark.parametrize("sigma", [0.1, 0.01, 1e-3])
def test_little_noise_is_priced_without_exhausting_memory(sigma):
    found = price(ledger_of(PoissonGaussian(0.5, sigma), 3), 1e-5, coarse=True)
    exact = gaussian_epsilon(math.sqrt(3) / sigma, 1e-5)
    assert 0.2 * exact < found.epsilon <= price(ledger_of(PoissonGaussian(0.5, sigma), 3), 1e-5, "rdp").epsilon


@pytest.mark.parametrize("accountant", ["rdp", "filter"])
def test_what_overflows_is_not_free(accountant):
    """A divergence that is not a number proves nothing; dp_accounting takes it for epsilon 0."""
    assert price(ledger_of(AdaptiveGaussian(0.01, 1e-155), 10), 1e-5, "filter").epsilon == math.inf
    assert price(ledger_of(LineSearchStep(0.01, 1.0, 710.0), 1), 1e-5, "filter").epsilon > 100
    with pytest.raises(ValueError, match="beyond what can be computed with"):
        price(ledger_of(PoissonGaussian(0.01, 1e-155), 10), 1e-5, accountant)
    assert rdp_epsilon((2.0, 8.0), np.array([np.nan, np.nan]), 1e-5) == math.inf
    assert rdp_epsilon((2.0, 8.0), np.array([np.nan, 1.0]), 1e-5) == rdp_epsilon((8.0,), np.array([1.0]), 1e-5)


def test_tiny_losses_have_a_finer_grid():
    """Rounded to 1e-4 each, a hundred thousand losses of 1e-5 would cost three times what they do."""
    ledger = ledger_of(PoissonGaussian(1e-4, 10.0), 100_000)
    assert price(ledger, 1e-5).epsilon == pytest.approx(0.0075, abs=1e-4)
    assert price(ledger, 1e-5).epsilon < price(ledger, 1e-5, "rdp").epsilon


def test_more_steps_never_cost_less_where_the_accountant_changes():
    few, many = (price(ledger_of(PoissonGaussian(1e-4, 10.0), steps), 1e-5) for steps in (10**6, 10**6 + 1))
    assert (few.accountant, many.accountant) == ("pld", "rdp") and few.epsilon < many.epsilon


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("steps", [84_000, 96_000])
def test_a_huge_price_is_finite(steps):
    found = price(ledger_of(PoissonGaussian(0.1, 1.0), steps), 1e-3)
    assert found.accountant == "rdp" and math.isfinite(found.epsilon) and "priced by rdp" in found.warning


def test_orders_that_do_not_converge_are_left_out_quietly(caplog):
    with caplog.at_level(logging.WARNING):
        price(ledger_of(PoissonGaussian(0.1, 0.3), 10), 1e-5, "rdp")
    assert not caplog.records


def test_caching_changes_nothing():
    ledger = ledger_of(PoissonGaussian(0.01, 1.3), 700)
    prices = []
    for _ in range(2):
        poisson_gaussian_pld.cache_clear()
        _poisson_gaussian_rdp.cache_clear()
        prices += [price(ledger, 1e-5), price(ledger, 1e-5)]
        prices += [price(ledger, 1e-5, "rdp"), price(ledger, 1e-5, "rdp")]
        price(ledger_of(PoissonGaussian(0.01, 1.3), 900), 1e-5)
        prices += [price(ledger, 1e-5), price(ledger, 1e-5)]
    assert poisson_gaussian_pld.cache_info().hits > 0
    assert {found.epsilon for found in prices if found.accountant == "pld"} == {prices[0].epsilon}
    assert {found.epsilon for found in prices if found.accountant == "rdp"} == {prices[2].epsilon}


# Costs grow with every count, for every kind of event and every accountant that prices it.

Make = Callable[[float, float, int], Ledger]
KINDS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "poisson": (
        lambda rate, sigma, count: ledger_of(PoissonGaussian(rate, sigma), count),
        ("pld", "rdp", "zcdp", "gdp", "filter"),
    ),
    "gaussian": (
        lambda rate, sigma, count: ledger_of(Gaussian(sigma), count),
        ("pld", "rdp", "zcdp", "gdp", "filter"),
    ),
    "shuffled": (  # what counts is the number of epochs
        lambda rate, sigma, count: shuffled(sigma, count),
        ("pld", "rdp", "zcdp", "gdp", "filter"),
    ),
    "adaptive": (lambda rate, sigma, count: ledger_of(AdaptiveGaussian(rate, sigma), count), ("filter",)),
}


@pytest.mark.parametrize(("kind", "accountant"), [(kind, name) for kind, (_, names) in KINDS.items() for name in names])
@settings(max_examples=12, deadline=None)
@given(
    rate=st.floats(1e-3, 1.0),
    sigma=st.floats(0.7, 20.0),
    count=st.integers(1, 300),
    more=st.integers(1, 300),
)
def test_epsilon_strictly_increases_in_every_count(kind, accountant, rate, sigma, count, more):
    make, _ = KINDS[kind]
    few = price(make(rate, sigma, count), 1e-5, accountant, coarse=True).epsilon
    many = price(make(rate, sigma, count + more), 1e-5, accountant, coarse=True).epsilon
    # Below delta's own size a release is free; from there on, every count costs.
    assert many > few if few > 0 else many >= 0


@pytest.mark.parametrize(("kind", "accountant"), [(kind, name) for kind, (_, names) in KINDS.items() for name in names])
def test_one_more_release_costs_more(kind, accountant):
    make, _ = KINDS[kind]
    epsilons = [price(make(0.05, 1.0, count), 1e-5, accountant, coarse=True).epsilon for count in (50, 51, 52)]
    assert 0 < epsilons[0] < epsilons[1] < epsilons[2]


# New kinds: one class, no change to any accountant.


@pytest.fixture
def new_kinds():
    known = dict(EVENT_KINDS)
    yield
    EVENT_KINDS.clear()
    EVENT_KINDS.update(known)


def test_a_new_kind_with_only_a_renyi_curve(new_kinds):
    @dataclass(frozen=True)
    class HeavyTailed(Event, kind="heavy_tailed"):
        scale: float
        title: ClassVar[str] = "heavy-tailed noise"
        sampling: ClassVar[str] = "Everyone."

        def rdp(self, orders: Sequence[float]) -> np.ndarray:
            return np.asarray(orders) ** 2 / self.scale**2

    ledger = ledger_of(HeavyTailed(30.0), 5)
    assert 0 < price(ledger, 1e-5, "rdp").epsilon < price(ledger, 1e-5, "filter").epsilon
    for accountant in ("pld", "zcdp", "gdp"):
        with pytest.raises(UnpriceableError, match="HeavyTailed"):
            price(ledger, 1e-5, accountant)
    assert Ledger.from_json(ledger.to_json()) == ledger


def test_a_new_kind_with_a_privacy_loss_distribution_composes_by_its_count(new_kinds):
    @dataclass(frozen=True)
    class RandomizedResponse(Event, kind="randomized_response"):
        noise: float
        relation = "replace_one"
        title: ClassVar[str] = "randomized response"
        sampling: ClassVar[str] = "Everyone."

        def pld(self, interval: float):
            assert interval >= 1e-4, "of losses that nobody has bounded, a finer grid may have any number of points"
            return from_randomized_response(self.noise, 2, value_discretization_interval=interval)

    one = price(ledger_of(RandomizedResponse(0.5), 1), 1e-5).epsilon
    assert one == pytest.approx(math.log(3), abs=1e-3)
    # dp_accounting's PLDAccountant forgets the count here and says log 3 again.
    assert price(ledger_of(RandomizedResponse(0.5), 10), 1e-5).epsilon > 5 * one
    with pytest.raises(UnpriceableError, match="RandomizedResponse"):
        price(ledger_of(RandomizedResponse(0.5), 1), 1e-5, "rdp")
