"""GDP: the central-limit price stands beside the true one, and never in its place."""

import pytest

from dphero.accounting import Ledger, PoissonGaussian, price
from tests.methods.digits_task import accuracy, start


@pytest.mark.parametrize(
    ("noise_multiplier", "epochs", "claimed", "true"),
    [(1.3, 15, 0.83, 0.86), (1.1, 60, 2.32, 2.38), (0.7, 45, 5.07, 5.64)],
)
def test_the_published_runs(noise_multiplier: float, epochs: int, claimed: float, true: float) -> None:
    ledger = Ledger()
    ledger.record(PoissonGaussian(256 / 60000, noise_multiplier), epochs * 60000 // 256)
    approximate, bound = price(ledger, 1e-5, "gdp"), price(ledger, 1e-5)
    assert approximate.epsilon == pytest.approx(claimed, abs=0.006) and not approximate.is_bound
    assert bound.epsilon == pytest.approx(true, abs=0.006) and bound.is_bound


def test_both_prices_of_one_run() -> None:
    trainer = start("gdp", epsilon=3.0, epochs=5.0)
    while not trainer.finished:
        trainer.advance()
    statement = trainer.statement(1e-4)
    assert statement.price.accountant == "pld" and statement.price.is_bound
    assert 2.95 < statement.price.epsilon <= 3.0
    others = trainer.compared_prices(1e-4)
    central, renyi = others["claimed by the central limit theorem"], others["Rényi divergences"]
    assert central == price(trainer.ledger, 1e-4, "gdp") and not central.is_bound
    assert central.epsilon < statement.price.epsilon < renyi.epsilon
    assert accuracy(trainer) > 0.5  # seeds give 0.55 to 0.6


def test_the_approximation_cannot_become_the_headline() -> None:
    with pytest.raises(ValueError, match="leave --accountant gdp out"):
        start("gdp", epsilon=3.0, accountant="gdp")
