"""A budget refuses the step that would exceed it, before it is taken, at next to no cost per step."""

import math

import pytest

from dphero.accounting import (
    AdaptiveGaussian,
    Budget,
    BudgetExhausted,
    Gaussian,
    Ledger,
    PoissonGaussian,
    ShuffledGaussian,
    UnpriceableError,
    budget,
    price,
)

STEP = PoissonGaussian(0.02, 2.0)


def spend(limit, ledger, events, most=10**6):
    """Releases the events in turn until the budget refuses; says how many were released."""
    released = 0
    with pytest.raises(BudgetExhausted):
        while released < most:
            event = events[released % len(events)]
            limit.check(ledger, event)
            ledger.record(event)
            released += 1
    return released


@pytest.fixture
def count_prices(monkeypatch):
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments)
        return price(*arguments, **options)

    monkeypatch.setattr(budget, "price", counted)
    return calls


def test_it_stops_exactly_at_the_budget(count_prices):
    limit, ledger = Budget(1.0, 1e-5), Ledger()
    expected = limit.remaining_steps(ledger, STEP)
    count_prices.clear()
    assert spend(limit, ledger, [STEP]) == expected > 300
    assert len(count_prices) < 60  # not one per step
    assert price(ledger, 1e-5).epsilon <= 1.0 < price(ledger.with_event(STEP), 1e-5).epsilon
    assert limit.remaining_steps(ledger, STEP) == 0


def test_refusing_changes_nothing_and_is_repeated():
    limit, ledger = Budget(1.0, 1e-5, "rdp"), Ledger()
    spend(limit, ledger, [STEP])
    before = ledger.copy()
    for _ in range(2):
        with pytest.raises(BudgetExhausted, match=r"budget of epsilon 1 at delta 1e-05 \(rdp\) is used up"):
            limit.check(ledger, STEP)
    assert ledger == before
    limit.check(Ledger(), STEP)  # another run


def test_what_was_released_before_counts():
    ledger = Ledger()
    ledger.record(Gaussian(10.0), 3)
    limit = Budget(1.0, 1e-5)
    remaining = limit.remaining_steps(ledger, STEP)
    assert 0 < remaining < limit.remaining_steps(Ledger(), STEP)
    assert price(ledger.with_event(STEP, remaining), 1e-5).epsilon <= 1.0
    assert price(ledger.with_event(STEP, remaining + 1), 1e-5).epsilon > 1.0


def test_a_saved_and_loaded_ledger_goes_on_where_it_was():
    limit, ledger = Budget(1.0, 1e-5, "rdp"), Ledger()
    expected = limit.remaining_steps(ledger, STEP)
    for _ in range(expected // 2):
        limit.check(ledger, STEP)
        ledger.record(STEP)
    resumed = Ledger.from_json(ledger.to_json())
    assert spend(limit, resumed, [STEP]) == expected - expected // 2
    assert spend(Budget(1.0, 1e-5, "rdp"), ledger, [STEP]) == expected - expected // 2


def test_a_ledger_that_grew_elsewhere_is_not_taken_on_trust():
    limit, ledger = Budget(1.0, 1e-5, "rdp"), Ledger()
    limit.check(ledger, STEP)
    ledger.record(Gaussian(0.5), 3)
    with pytest.raises(BudgetExhausted):
        limit.check(ledger, STEP)


def test_events_that_take_turns_are_still_cheap_to_check(count_prices):
    other = PoissonGaussian(0.02, 6.0)
    limit, ledger = Budget(1.0, 1e-5), Ledger()
    released = spend(limit, ledger, [STEP, other])
    assert released > 500
    assert len(count_prices) < 250
    assert price(ledger, 1e-5).epsilon <= 1.0


def test_shuffled_epochs():
    limit, ledger = Budget(6.79, 1e-5, "zcdp"), Ledger()
    with pytest.raises(BudgetExhausted):
        for step in range(2000):
            event = ShuffledGaussian(8.0, step // 10)
            limit.check(ledger, event)
            ledger.record(event)
    assert ledger.steps == 1000  # 100 epochs of 10 batches: rho 0.78125


def test_shuffled_epochs_whose_noise_changes_back_and_forth():
    limit, ledger = Budget(6.79, 1e-5, "zcdp"), Ledger()
    with pytest.raises(BudgetExhausted):
        for step in range(2000):
            event = ShuffledGaussian((8.0, 9.0)[step % 2], step // 10)
            limit.check(ledger, event)
            ledger.record(event)
    assert ledger.steps == 1000  # each epoch is charged its least noise, 8


def test_every_bound_has_its_own_limit():
    remaining = {name: Budget(1.0, 1e-5, name).remaining_steps(Ledger(), STEP) for name in ("pld", "rdp", "gdp")}
    assert remaining["rdp"] < remaining["pld"] < remaining["gdp"]


def test_a_single_step_may_be_too_much():
    limit = Budget(0.1, 1e-5)
    assert limit.remaining_steps(Ledger(), Gaussian(1.0)) == 0
    with pytest.raises(BudgetExhausted, match="0 releases cost 0"):
        limit.check(Ledger(), Gaussian(1.0))


def test_adaptive_noise_needs_the_filter():
    with pytest.raises(UnpriceableError, match="use accountant 'filter'"):
        Budget(1.0, 1e-5).check(Ledger(), AdaptiveGaussian(0.1, 1.0))


def test_a_filter_admits_adaptive_noise_up_to_its_size(monkeypatch):
    calls = 0
    divergence = budget.filter_divergence

    def counted(*arguments):
        nonlocal calls
        calls += 1
        return divergence(*arguments)

    monkeypatch.setattr(budget, "filter_divergence", counted)
    limit, ledger = Budget(4.0, 1e-5, "filter"), Ledger()
    events = [AdaptiveGaussian(0.02, 1.0 + 0.01 * step) for step in range(7)]
    released = spend(limit, ledger, events)
    assert 100 < released < 5000
    assert calls < 4 * released  # the past is not summed again at every step
    spent, promised = limit.spent(ledger), limit.guarantee(ledger)
    assert 3.9 < spent.epsilon <= 4.0 and not spent.is_bound
    assert promised.epsilon == 4.0 and promised.is_bound and promised.warning is None
    beyond = price(ledger.with_event(events[released % 7]), 1e-5, "filter", filter_order=limit.filter_order)
    assert beyond.epsilon > 4.0


def test_a_filter_refuses_a_step_without_noise():
    with pytest.raises(BudgetExhausted):
        Budget(1e6, 1e-5, "filter").check(Ledger(), AdaptiveGaussian(0.1, 0.0))


def test_a_filter_also_counts_fixed_noise():
    limit, ledger = Budget(4.0, 1e-5, "filter"), Ledger()
    spend(limit, ledger, [PoissonGaussian(0.02, 1.0), AdaptiveGaussian(0.02, 2.0)])
    assert limit.spent(ledger).epsilon <= 4.0


def test_what_fixed_noise_guarantees_is_what_it_spent():
    ledger = Ledger()
    ledger.record(STEP, 10)
    limit = Budget(1.0, 1e-5)
    assert limit.guarantee(ledger) == limit.spent(ledger) == price(ledger, 1e-5)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0.0, 1e-5), {}, "epsilon must be"),
        ((math.nan, 1e-5), {}, "epsilon must be"),
        ((1.0, 1.0), {}, "delta must be"),
        ((1.0, 1e-5, "prv"), {}, "unknown"),
        ((1.0, 1e-5, "filter"), {"filter_order": 1.0}, "filter_order"),
    ],
)
def test_arguments_are_checked_before_the_run(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        Budget(*arguments, **options)


@pytest.mark.parametrize("epsilon", [1e-18, 0.1, 3.0, 1e6])
def test_an_order_is_found_for_every_budget(epsilon):
    order = Budget(epsilon, 1e-5, "filter").filter_order
    assert 2 <= order <= 256 and order == int(order)
