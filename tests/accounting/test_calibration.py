"""Calibration: safe, tight, and clear where a target cannot be met."""

import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.mechanism_calibration import ExplicitBracketInterval, calibrate_dp_mechanism
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from dphero.accounting import (
    MAX_STEPS,
    CalibrationError,
    Ledger,
    PoissonGaussian,
    calibrate_noise_multiplier,
    calibrate_sample_rate,
    calibrate_steps,
    price,
)
from dphero.accounting.numerics.search import largest_count, safe_value


def epsilon(rate, sigma, steps, delta, accountant="pld"):
    ledger = Ledger()
    ledger.record(PoissonGaussian(rate, sigma), steps)
    return price(ledger, delta, accountant).epsilon


@pytest.mark.parametrize(
    ("target", "delta", "rate", "steps"),
    [
        (3.0, 1e-5, 256 / 60000, 14062),
        (1.0, 1e-5, 512 / 60000, 4687),
        (0.1, 1e-6, 0.001, 500),
        (10.0, 1e-5, 0.05, 200),
        (2.0, 1e-5, 1.0, 50),
        (5.0, 1e-5, 0.5, 1),
    ],
)
def test_noise_multiplier_is_safe_and_tight(target, delta, rate, steps):
    sigma = calibrate_noise_multiplier(target, delta, rate, steps)
    assert 0.999 * target <= epsilon(rate, sigma, steps, delta) <= target


def test_noise_multipliers_of_published_settings():
    assert calibrate_noise_multiplier(1.0, 1e-5, 512 / 60000, 4687) == pytest.approx(2.31, abs=0.01)
    assert calibrate_noise_multiplier(8.0, 1e-5, 1024 / 50000, 1464) == pytest.approx(0.80, abs=0.01)


@pytest.mark.parametrize(("target", "rate", "steps"), [(2.0, 0.01, 1000), (0.5, 0.1, 30)])
def test_noise_multiplier_equals_that_of_dp_accounting(target, rate, steps):
    theirs = calibrate_dp_mechanism(
        RdpAccountant,
        lambda sigma: SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps),
        target,
        1e-5,
        ExplicitBracketInterval(0.5, 100),
        tol=1e-4,
    )
    assert calibrate_noise_multiplier(target, 1e-5, rate, steps, "rdp") == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("accountant", ["rdp", "zcdp", "gdp", "filter"])
def test_every_accountant_calibrates(accountant):
    sigma = calibrate_noise_multiplier(3.0, 1e-5, 0.01, 1000, accountant)
    assert 0.999 * 3.0 <= epsilon(0.01, sigma, 1000, 1e-5, accountant) <= 3.0
    steps = calibrate_steps(3.0, 1e-5, 0.01, 25.0, accountant)
    assert epsilon(0.01, 25.0, steps, 1e-5, accountant) <= 3.0
    assert steps == MAX_STEPS or epsilon(0.01, 25.0, steps + 1, 1e-5, accountant) > 3.0


def test_steps_are_exact():
    steps = calibrate_steps(1.0, 1e-5, 0.01, 2.0)
    assert epsilon(0.01, 2.0, steps, 1e-5) <= 1.0 < epsilon(0.01, 2.0, steps + 1, 1e-5)


def test_sample_rate_is_safe_and_tight():
    rate = calibrate_sample_rate(1.0, 1e-5, 2.0, 500)
    assert 0.999 <= epsilon(rate, 2.0, 500, 1e-5) <= 1.0
    assert calibrate_sample_rate(1.0, 1e-5, 100.0, 10) == 1.0


@pytest.mark.parametrize("accountant", ["gdp", "filter"])
@settings(max_examples=30, deadline=None)
@given(target=st.floats(4, 20), rate=st.floats(1e-4, 1), steps=st.integers(1, 20000), delta=st.floats(1e-8, 1e-3))
def test_round_trips(accountant, target, rate, steps, delta):
    sigma = calibrate_noise_multiplier(target, delta, rate, steps, accountant)
    assert epsilon(rate, sigma, steps, delta, accountant) <= target
    assert calibrate_steps(target, delta, rate, sigma, accountant) >= steps
    assert calibrate_sample_rate(target, delta, sigma, steps, accountant) >= 0.998 * rate


def test_round_trip_on_the_default_accountant():
    sigma = calibrate_noise_multiplier(2.0, 1e-5, 0.02, 300)
    assert 300 <= calibrate_steps(2.0, 1e-5, 0.02, sigma) <= 302
    assert calibrate_sample_rate(2.0, 1e-5, sigma, 300) == pytest.approx(0.02, rel=1e-3)


def test_unreachable_targets_say_what_could_be_reached():
    with pytest.raises(CalibrationError, match="one step alone costs 5"):
        calibrate_steps(1.0, 1e-5, 1.0, 0.95, "zcdp")
    with pytest.raises(CalibrationError, match=r"even noise multiplier 1e\+06 costs"):
        calibrate_noise_multiplier(1e-9, 1e-5, 0.1, 1000, "zcdp")
    with pytest.raises(CalibrationError, match="even sample rate 1e-09 costs"):
        calibrate_sample_rate(1.0, 1e-5, 1.0, 1000, "zcdp")


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_targets_must_be_positive(bad):
    with pytest.raises(ValueError, match="epsilon must be"):
        calibrate_noise_multiplier(bad, 1e-5, 0.1, 10)
    with pytest.raises(ValueError, match="epsilon must be"):
        calibrate_steps(bad, 1e-5, 0.1, 1.0)
    with pytest.raises(ValueError, match="epsilon must be"):
        calibrate_sample_rate(bad, 1e-5, 1.0, 10)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((1.0, 0.0, 0.1, 10), "delta"),
        ((1.0, 1.0, 0.1, 10), "delta"),
        ((1.0, 1e-5, 1.5, 10), "sample_rate"),
        ((1.0, 1e-5, 0.1, 0), "steps"),
        ((1.0, 1e-5, 0.1, -3), "steps"),
        ((1.0, 1e-5, 0.1, 2.5), "steps"),
    ],
)
def test_arguments_are_checked(arguments, name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        calibrate_noise_multiplier(*arguments)


@given(threshold=st.integers(0, 5000), guess=st.integers(0, 10**6), before=st.integers(0, 10**5))
def test_largest_count_finds_any_threshold(threshold, guess, before):
    calls = 0

    def cost(count):
        nonlocal calls
        calls += 1
        return math.sqrt(before + count)

    target = math.sqrt(before + threshold + 0.5)
    assert largest_count([cost], target, guess, 4000, before) == min(threshold, 4000)
    assert calls < 40


@given(threshold=st.integers(0, 5000), guess=st.integers(0, 10**4))
def test_largest_count_of_a_cost_that_jumps(threshold, guess):
    assert largest_count([lambda n: 0.0 if n <= threshold else math.inf], 1.0, guess, 4000) == min(threshold, 4000)


@given(power=st.floats(0.1, 5), target=st.floats(1e-3, 1e3), guess=st.floats(1e-3, 1e3))
def test_safe_value_is_safe_and_tight(power, target, guess):
    found = safe_value(
        [lambda x: 0.9 * x**-power, lambda x: x**-power],
        target,
        guess,
        safest=1e40,
        riskiest=1e-40,
        tolerance=1e-3,
    )
    assert 0.999 * target <= found**-power <= target


def test_safe_value_at_the_ends():
    ends = {"safest": 1.0, "riskiest": 100.0, "tolerance": 1e-3}
    assert safe_value([lambda x: x], 1000.0, 5.0, **ends) == 100.0
    assert safe_value([lambda x: x], 0.5, 5.0, **ends) is None
    assert safe_value([lambda x: 0.0 if x < 50 else math.inf], 1.0, 99.0, **ends) == pytest.approx(50)
