"""IPA-RF: the price of the filter, who is charged, who leaves, and that nobody learns of it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from dphero.accounting import CalibrationError, IndividualFilter, Ledger, UnpriceableError, price
from dphero.methods import make
from dphero.methods.own_mechanism.ipa_rf import Plan, costs
from tests.methods.digits_task import TRAINING, accuracy, digits, make_task, resumes_exactly, start

FULL = {"lot": TRAINING, "epochs": 20.0, "clip": 0.5, "lr": 2.0}


@pytest.mark.parametrize(("rate", "order"), [(1.0, 8), (0.02, 2), (0.02, 8), (0.3, 31)])
def test_a_step_costs_what_dp_accounting_says_of_the_examples_own_norm(rate: float, order: int) -> None:
    norms = np.array([0.0, 1e-6, 0.01, 0.3, 1.0])
    sigma = 1.3
    found = costs(rate, order, norms / sigma)
    for norm, cost in zip(norms[2:], found[2:], strict=True):
        event = PoissonSampledDpEvent(rate, GaussianDpEvent(sigma / norm))
        assert cost == pytest.approx(RdpAccountant(orders=[order]).compose(event).rdp[0], rel=1e-8)
    assert found[0] == 0
    assert 0 < found[1] < 1e-9  # no norm is too small to be charged


def test_the_filter_is_worth_what_the_conversion_of_its_one_order_says() -> None:
    ledger = Ledger()
    ledger.record(IndividualFilter(order=8, divergence=1.5))
    expected = 1.5 + math.log(7 / 8) - (math.log(1e-5) + math.log(8)) / 7
    assert price(ledger, 1e-5, "rdp").epsilon == pytest.approx(expected, rel=1e-12)
    assert price(ledger, 1e-5, "filter", filter_order=8).epsilon == pytest.approx(expected, rel=1e-12)
    assert price(ledger, 1e-5, "filter", filter_order=9).epsilon == math.inf  # nothing is known above the order
    with pytest.raises(UnpriceableError):
        price(ledger, 1e-5, "pld")
    assert Ledger.from_json(ledger.to_json()) == ledger


@pytest.mark.parametrize("rate", [1.0, 0.02])
def test_planned_noise_makes_full_norm_steps_worth_epsilon(rate: float) -> None:
    plan = Plan.for_epsilon(3.0, 1e-5, rate, full_steps=50)
    accountant = RdpAccountant(orders=[plan.order])
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(plan.noise_multiplier)), 50)
    assert accountant.get_epsilon(1e-5) == pytest.approx(3.0, rel=1e-6)
    back = Plan.for_noise(plan.noise_multiplier, 1e-5, rate, full_steps=50)
    assert back.order == plan.order
    assert back.size == pytest.approx(plan.size, rel=1e-6)


def test_the_whole_run_costs_its_target_and_learns() -> None:
    trainer = start("ipa-rf", epsilon=5.0, **{**FULL, "epochs": 40.0}, options={"full_norm_share": 0.9})
    assert trainer.price(1e-4).epsilon == 0
    while not trainer.finished:
        trainer.advance()
    found = trainer.price(1e-4)
    assert found.is_bound
    assert found.epsilon == pytest.approx(5.0, rel=1e-9)
    assert found.epsilon <= 5.0
    assert "Rényi filter" in trainer.statement(1e-4).text
    assert accuracy(trainer) > 0.75


def test_everybody_is_charged_drawn_or_not_and_nobody_beyond_the_filter() -> None:
    settings = {"lot": TRAINING // 20, "epochs": 0.5, "clip": 2.6, "lr": 1e-3}  # half of the norms are below 2.6
    trainer = start("ipa-rf", noise_multiplier=1.0, **settings, options={"full_norm_share": 0.9})
    trainer.advance()
    assert (trainer._spent > 0).all()
    while not trainer.finished:
        trainer.advance()
    assert (trainer._spent <= trainer.plan.size).all()
    assert 0 < int((~trainer._active).sum()) < TRAINING  # some have left, and some have spent less


def test_nobody_leaves_before_the_worst_case_is_reached() -> None:
    trainer = start("ipa-rf", epsilon=2.0, **{**FULL, "epochs": 6.0, "clip": 1e-4}, options={"full_norm_share": 0.5})
    for _ in range(3):
        trainer.advance()
    assert trainer._active.all()  # three of six steps at full norm, exactly what was planned
    trainer.advance()
    assert not trainer._active.any()
    trainer.advance()  # only noise is left, and it is released all the same


def gradients_after(steps: int, label: int) -> list[torch.Tensor]:
    """The gradients of each step when example 0 has a certain (wrong) label."""
    task = make_task(records=100, noise_multiplier=0.5, lot=100, epochs=10.0, clip=0.05, lr=1e-6, momentum=0.0)
    task.train.tensors[1][0] = label
    trainer = make("ipa-rf", {"full_norm_share": 0.3}).start(task)
    found = []
    for _ in range(steps):
        trainer.advance()
        found.append(torch.cat([p.grad.flatten() for p in trainer.module.parameters()]))
    return found


def test_an_example_counts_until_its_budget_is_used_up_and_then_no_more() -> None:
    one, other = gradients_after(5, label=1), gradients_after(5, label=7)
    assert all(not torch.allclose(a, b, atol=1e-6) for a, b in zip(one[:3], other[:3], strict=True))
    # the weights hardly moved, so what is left of a difference is the example itself: it left after three steps
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one[3:], other[3:], strict=True))


def test_what_is_recorded_does_not_depend_on_the_data() -> None:
    ledgers = []
    for shift in (0.0, 5.0):
        task = make_task(epsilon=1.0, **FULL)
        task.train.tensors[0].add_(shift)
        trainer = make("ipa-rf").start(task)
        step = [trainer.advance() for _ in range(3)][-1]
        ledgers.append(trainer.ledger)
        assert step.loss.numel() == 1
        assert all(not isinstance(value, torch.Tensor) or value.dim() == 0 for value in dataclasses.astuple(step))
    assert ledgers[0] == ledgers[1]
    assert ledgers[0].steps == 1


def test_a_gradient_that_is_no_number_counts_and_costs_nothing() -> None:
    task = make_task(records=50, noise_multiplier=1.0, lot=50, epochs=3.0)
    task.train.tensors[0][7] = math.nan
    trainer = make("ipa-rf").start(task)
    trainer.advance()
    assert trainer._spent[7] == 0
    assert (trainer._spent[:7] > 0).all()
    assert all(p.isfinite().all() for p in trainer.module.parameters())


def test_noise_has_the_deviation_that_is_charged() -> None:
    task = make_task(noise_multiplier=3.0, lot=350, epochs=10.0, clip=0.2)
    task.train.tensors[0].fill_(math.nan)  # no example counts: what is left is the noise
    trainer = make("ipa-rf").start(task)
    found = []
    for _ in range(10):
        trainer.advance()
        found += [parameter.grad.flatten() * 350 / (3.0 * 0.2) for parameter in trainer.module.parameters()]
    sample = torch.cat(found).numpy()
    assert stats.kstest(sample, stats.norm.cdf).pvalue > 1e-3
    assert stats.kstest(sample * 0.9, stats.norm.cdf).pvalue < 1e-3


@pytest.mark.parametrize(("lot", "epochs"), [(TRAINING, 10.0), (280, 2.0)])
def test_a_resumed_run_goes_on_exactly(lot: int, epochs: float, tmp_path: Path) -> None:
    options = {"full_norm_share": 0.7}  # examples leave after the interruption
    resumes_exactly("ipa-rf", tmp_path, epsilon=3.0, lot=lot, epochs=epochs, options=options)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="full_norm_share must be above 0 and at most 1"):
        make("ipa-rf", {"full_norm_share": 1.5})
    with pytest.raises(ValueError, match="give --epsilon or --noise-multiplier"):
        start("ipa-rf")
    with pytest.raises(ValueError, match="leave --clipping out"):
        start("ipa-rf", epsilon=1.0, clipping="adaptive")
    with pytest.raises(ValueError, match="priced by rdp, not by accountant 'filter'"):
        start("ipa-rf", epsilon=1.0, accountant="filter")
    with pytest.raises(ValueError, match="priced by rdp, not by accountant 'zcdp'"):
        start("ipa-rf", epsilon=1.0, accountant="zcdp")
    with pytest.raises(ValueError, match="takes no --seed"):
        start("ipa-rf", epsilon=1.0, secure=True)
    with pytest.raises(CalibrationError, match="out of reach"):
        start("ipa-rf", epsilon=1e-9)
    with pytest.raises(ValueError, match="order must be above 1"):
        IndividualFilter(order=1.0, divergence=1.0)


def test_digits_are_where_the_test_expects_them() -> None:
    assert len(digits()[0]) > TRAINING
