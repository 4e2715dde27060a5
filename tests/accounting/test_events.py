"""Events: what they refuse, what they know, and that a new kind needs no change elsewhere."""

import math

import pytest

from dphero.accounting import (
    EVENT_KINDS,
    AdaptiveGaussian,
    Event,
    Gaussian,
    PoissonGaussian,
    ShuffledGaussian,
)

BAD_MULTIPLIERS = [0.0, -1.0, math.nan, math.inf, "much", None]
BAD_RATES = [0.0, -0.1, 1.0001, math.nan, math.inf, "often"]


@pytest.mark.parametrize("bad", BAD_MULTIPLIERS)
@pytest.mark.parametrize(
    "make",
    [Gaussian, lambda sigma: PoissonGaussian(0.1, sigma), lambda sigma: ShuffledGaussian(sigma, 0)],
)
def test_noise_multiplier_must_be_positive_and_finite(make, bad):
    with pytest.raises(ValueError, match="noise_multiplier must be"):
        make(bad)


@pytest.mark.parametrize("bad", BAD_RATES)
@pytest.mark.parametrize("kind", [PoissonGaussian, AdaptiveGaussian])
def test_sample_rate_must_be_a_probability(kind, bad):
    with pytest.raises(ValueError, match="sample_rate must be"):
        kind(bad, 1.0)


def test_errors_name_the_thing_the_value_and_the_way_out():
    with pytest.raises(ValueError, match=r"sample_rate .* got 2\.0: give the expected lot size divided by"):
        PoissonGaussian(2, 1.0)


@pytest.mark.parametrize("bad", [-1, 1.5, True, None])
def test_epoch_must_be_a_whole_number(bad):
    with pytest.raises(ValueError, match="epoch must be a whole number"):
        ShuffledGaussian(1.0, bad)


def test_only_an_adaptive_event_may_have_no_noise_and_then_its_divergence_is_infinite():
    assert math.isinf(AdaptiveGaussian(0.1, 0.0).rdp([8.0])[0])
    with pytest.raises(ValueError, match="noise_multiplier"):
        AdaptiveGaussian(0.1, -0.1)


def test_relations():
    assert PoissonGaussian(0.1, 1.0).relation == "add_or_remove"
    assert Gaussian(1.0).relation == "add_or_remove"
    assert AdaptiveGaussian(0.1, 1.0).relation == "add_or_remove"
    assert ShuffledGaussian(1.0, 0).relation == "zero_out"


def test_events_are_values():
    assert PoissonGaussian(0.1, 1) == PoissonGaussian(0.1, 1.0)
    assert len({Gaussian(1.0), Gaussian(1.0), Gaussian(2.0)}) == 2
    with pytest.raises(AttributeError):
        Gaussian(1.0).noise_multiplier = 2.0


@pytest.mark.parametrize(
    "event",
    [PoissonGaussian(0.1, 1.1), Gaussian(3.0), ShuffledGaussian(2.0, 7), AdaptiveGaussian(1e-3, 0.0)],
)
def test_dictionary_round_trip(event):
    assert Event.from_dict(event.to_dict()) == event


def test_unknown_kinds_and_fields_are_refused():
    with pytest.raises(ValueError, match="unknown event kind 'laplace': this version knows adaptive_gaussian"):
        Event.from_dict({"kind": "laplace"})
    with pytest.raises(ValueError, match="needs exactly"):
        Event.from_dict({"kind": "gaussian", "noise_multiplier": 1.0, "surprise": 2})
    with pytest.raises(ValueError, match="needs exactly"):
        Event.from_dict({"kind": "gaussian"})


def test_two_kinds_cannot_share_a_name():
    with pytest.raises(ValueError, match="already Gaussian"):
        type("Impostor", (Event,), {}, kind="gaussian")
    assert EVENT_KINDS["gaussian"] is Gaussian
