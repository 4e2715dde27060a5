"""The privacy statement says who is protected, how well, by what, and what is left out."""

import json

import pytest

from dphero.accounting import (
    UNSOUND_AS_PUBLISHED,
    AdaptiveGaussian,
    Gaussian,
    Ledger,
    PoissonGaussian,
    ShuffledGaussian,
    UnpriceableError,
    price,
    statement,
)
from dphero.accounting.statement import round_up


@pytest.fixture
def ledger():
    ledger = Ledger()
    ledger.record(PoissonGaussian(0.01, 1.0), 200)
    return ledger


def test_the_text_says_everything(ledger):
    text = statement(ledger, 1e-5, unit="one patient").text
    for words in [
        "Protected unit: one patient.",
        "with one patient added or removed (add_or_remove)",
        "200 releases (sample rate 0.01, noise multiplier 1)",
        "Poisson sampling",
        "Number of noisy releases: 200.",
        "at delta = 1e-05, a proven upper bound",
        "privacy-loss distributions (pld)",
        "hyperparameter search",
        "outside the recorded releases",
        "preprocessing",
        "floating-point",
    ]:
        assert words in text
    assert "UNSOUND" not in text and "Warning" not in text


def test_epsilon_is_that_of_the_accountant_and_never_shrinks_in_print(ledger):
    found = statement(ledger, 1e-5, accountant="rdp")
    exact = price(ledger, 1e-5, "rdp").epsilon
    shown = float(found.text.split("epsilon = ")[1].split(" at")[0])
    assert exact <= shown <= exact + 1e-3
    assert found.price.epsilon == exact


@pytest.mark.parametrize("sigma", [0.002, 0.05, 0.0123, 1.0])
def test_a_large_epsilon_does_not_shrink_in_print_either(sigma):
    ledger = Ledger()
    ledger.record(Gaussian(sigma))
    exact = price(ledger, 1.2345678e-5).epsilon
    shown = float(statement(ledger, 1.2345678e-5).text.split("epsilon = ")[1].split(" at")[0])
    assert exact <= shown <= exact + 1e-3


def test_an_approximation_is_not_called_a_bound(ledger):
    text = statement(ledger, 1e-5, accountant="gdp").text
    assert "NOT a proven bound" in text and "Warning: a central-limit approximation" in text
    assert "changes at most by" not in text


def test_shuffled_epochs_are_described():
    ledger = Ledger()
    for epoch in range(3):
        ledger.record(ShuffledGaussian(8.0, epoch), 10)
    text = statement(ledger, 1e-5, accountant="zcdp").text
    assert "contributing nothing, the number of records public (zero_out)" in text
    assert "nothing is gained from sampling" in text and "epoch 0 to 2" in text


def test_the_published_recipe_is_labelled():
    ledger = Ledger()
    ledger.record(AdaptiveGaussian(0.01, 0.5), 10)
    ledger.record(AdaptiveGaussian(0.01, 0.7), 10)
    with pytest.raises(UnpriceableError):
        statement(ledger, 1e-5)
    found = statement(ledger, 1e-5, accountant="filter", notes=["Unsound as published: the noise is uneven."])
    assert found.label == UNSOUND_AS_PUBLISHED == "unsound as published"
    assert found.text.startswith("Privacy statement (UNSOUND AS PUBLISHED)")
    assert "noise multiplier 0.5 to 0.7" in found.text and "chosen from earlier outputs" in found.text
    assert "the noise is uneven" in found.text
    assert statement(ledger, 1e-5, accountant="filter").label is None


def test_nothing_is_promised_without_noise():
    ledger = Ledger()
    ledger.record(AdaptiveGaussian(0.01, 0.0))
    assert "nothing is guaranteed" in statement(ledger, 1e-5, accountant="filter").text


def test_an_empty_run_has_a_statement():
    assert "epsilon = 0 at delta" in statement(Ledger(), 1e-5).text


def test_dictionary_is_plain_json(ledger):
    found = statement(ledger, 1e-5, notes=("a remark",))
    data = json.loads(json.dumps(found.as_dict()))
    assert data["epsilon"] == found.price.epsilon and data["delta"] == 1e-5
    assert data["is_bound"] is True and data["accountant"] == "pld" and data["releases"] == 200
    assert data["notes"] == ["a remark"] and data["label"] is None
    assert data["text"] == found.text == str(found)


@pytest.mark.parametrize("value", [0.0, 1.0, 2.38168, 0.99999, 2.00004999, 1e-9])
def test_rounding_up(value):
    assert value <= round_up(value) <= value + 1.0001e-4
