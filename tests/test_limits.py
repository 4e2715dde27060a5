"""A limit belongs to the engine and to its checkpoints: no way around leads past it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dphero import BudgetExhausted, PrivacyEngine
from dphero.accounting import Budget
from dphero.engine.account import Account
from tests.trainer import Training, training

DELTA = 1e-5


def begin(engine: PrivacyEngine | None = None, **options: Any) -> Training:
    return training(engine=engine or PrivacyEngine(accountant="rdp"), **options)


def price(releases: int) -> float:
    run = begin(seed=None)
    run.steps(releases)
    return run.engine.get_epsilon(DELTA)


@pytest.fixture(scope="module")
def three() -> float:
    """A limit that three releases keep, and four do not."""
    return price(3) * 1.0001


def go_on(run: Training, most: int = 20) -> int:
    """Release until it is refused; return how many releases the engine has made in all."""
    with pytest.raises(BudgetExhausted):
        run.steps(most)
    return run.engine.ledger.steps


def test_a_limit_outlives_detach(three: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_again() -> Training:
        run = begin()
        run.engine.limit(three, DELTA)
        run.steps(2)
        run.engine.detach()
        return begin(run.engine, seed=8)

    assert go_on(train_again()) == 3
    monkeypatch.setattr(Account, "budget_for", lambda self, accountant: None)  # without the guard
    again = train_again()
    again.steps(6)
    assert again.engine.get_epsilon(DELTA) > three


@pytest.mark.parametrize("own", [None, 1.0, 5.0], ids=["no limit", "the same", "a larger one"])
def test_a_limit_goes_with_the_checkpoint(
    own: float | None, three: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin()
    run.engine.limit(three, DELTA)
    run.steps(2)
    run.engine.save(tmp_path / "run.pt")

    def resumed() -> Training:
        run = begin()
        if own is not None:
            run.engine.limit(three * own, DELTA)
        run.engine.load(tmp_path / "run.pt")
        return run

    assert go_on(resumed()) == 3
    if own != 1.0:
        monkeypatch.setattr(Account, "stricter_budget", lambda self, saved: self.budget)  # without the guard
        again = resumed()
        again.steps(3)
        assert again.engine.get_epsilon(DELTA) > three


def test_a_smaller_limit_of_ones_own_holds(three: float, tmp_path: Path) -> None:
    run = begin()
    run.engine.limit(3 * three, DELTA)
    run.steps(2)
    run.engine.save(tmp_path / "run.pt")
    resumed = begin()
    resumed.engine.limit(three, DELTA)
    resumed.engine.load(tmp_path / "run.pt")
    assert go_on(resumed) == 3
    resumed.engine.save(tmp_path / "later.pt")
    later = begin()
    later.engine.load(tmp_path / "later.pt")
    assert go_on(later) == 3


def test_limits_at_different_deltas_are_refused(three: float, tmp_path: Path) -> None:
    run = begin()
    run.engine.limit(three, DELTA)
    run.engine.save(tmp_path / "run.pt")
    other = begin()
    other.engine.limit(three, 1e-6)
    with pytest.raises(ValueError, match="neither is the stricter one"):
        other.engine.load(tmp_path / "run.pt")
    assert other.engine.steps == 0


def test_a_limit_that_is_raised_later_is_noted(three: float) -> None:
    run = begin()
    run.engine.limit(three, DELTA)
    run.engine.limit(2 * three, DELTA)  # nothing was released yet
    assert "limit" not in run.engine.statement(DELTA).text
    run.steps(1)
    run.engine.limit(three, DELTA)
    assert "limit" not in run.engine.statement(DELTA).text
    run.engine.limit(3 * three, DELTA)
    assert "The limit was raised from" in run.engine.statement(DELTA).text
    assert isinstance(run.engine._account.budget, Budget)


def test_noise_that_is_set_anew_after_releases_is_noted(tmp_path: Path) -> None:
    """What the bound is then worth: it may have been chosen by what had come out."""
    run = begin()
    run.steps(2)
    run.engine.detach()
    assert "set anew" not in begin(run.engine, seed=8).engine.statement(DELTA).text
    run.engine.detach()
    again = begin(run.engine, seed=9, noise_multiplier=0.5)
    again.steps(1)
    text = again.engine.statement(DELTA).text
    assert "set anew after 2 releases (σ 1.0, q 0.2; then σ 0.5, q 0.2)" in text and "not proven" in text
    again.engine.save(tmp_path / "run.pt")
    later = begin(seed=9, noise_multiplier=0.5)
    later.engine.load(tmp_path / "run.pt")
    assert "set anew after 2 releases" in later.engine.statement(DELTA).text
