"""SAS-DP: the price of a search, the law of its test, the filter, the noise that falls."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld.privacy_loss_distribution import from_two_probability_mass_functions
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from dphero.accounting import BudgetExhausted, CalibrationError, Ledger, LineSearchStep, UnpriceableError, price
from dphero.accounting.events.line_search import poisson_pure_rdp
from dphero.accounting.renyi import filter_divergence
from dphero.methods import make
from tests.methods.digits_task import accuracy, make_task, resumes_exactly, start

PLAIN = {"momentum": 0.0, "epochs": 20.0}
ORDERS = [2.0, 3.5, 8.0, 64.0]


@pytest.mark.parametrize(("rate", "epsilon"), [(1.0, 1.0), (0.3, 0.5), (0.01, 2.0), (0.01, 1e-4)])
def test_a_search_costs_at_most_what_amplified_pure_privacy_costs(rate: float, epsilon: float) -> None:
    amplified = math.log1p(rate * math.expm1(epsilon))
    found = poisson_pure_rdp(rate, epsilon, ORDERS)
    bound = [min(amplified, order * amplified**2 / 2) for order in ORDERS]
    assert (found <= np.array(bound) * (1 + 1e-9)).all()
    assert (found >= np.array(bound) / 8).all()  # and no price is given away


@pytest.mark.parametrize(("rate", "epsilon"), [(0.2, 1.0), (0.05, 3.0)])
def test_no_private_mechanism_costs_more_than_a_search(rate: float, epsilon: float) -> None:
    random = np.random.default_rng(1)
    charged = poisson_pure_rdp(rate, epsilon, ORDERS)
    nearest = np.zeros(len(ORDERS))
    for outcomes in (2, 2, 3, 5) * 50:
        without = random.dirichlet(np.ones(outcomes) * 0.5) + 1e-12
        factor = np.exp(epsilon * np.sign(random.normal(size=outcomes)) * (random.random(outcomes) < 0.9))
        with_it = without * factor / (without * factor).sum()
        if np.abs(np.log(with_it / without)).max() > epsilon:
            continue
        mixed = (1 - rate) * without + rate * with_it
        for place, order in enumerate(ORDERS):
            both = [(mixed**order * without ** (1 - order)).sum(), (without**order * mixed ** (1 - order)).sum()]
            assert math.log(max(both)) / (order - 1) <= charged[place] + 1e-12
            nearest[place] = max(nearest[place], math.log(max(both)) / (order - 1) / charged[place])
    assert (nearest > 0.2).all()


def test_randomised_response_meets_the_price_exactly() -> None:
    rate, epsilon, order = 0.1, 1.5, 5.0
    rare = 1 / (1 + math.exp(epsilon))
    without = {0: rare, 1: 1 - rare}
    mixed = {0: (1 - rate) * rare + rate * (1 - rare), 1: (1 - rate) * (1 - rare) + rate * rare}
    exact = math.log(sum(mixed[j] ** order * without[j] ** (1 - order) for j in without)) / (order - 1)
    assert poisson_pure_rdp(rate, epsilon, [order])[0] == pytest.approx(exact, rel=1e-9)
    logs = [{outcome: math.log(value) for outcome, value in law.items()} for law in (without, mixed)]
    pld = from_two_probability_mass_functions(*logs)
    assert pld.get_epsilon_for_delta(0) == pytest.approx(math.log1p(rate * math.expm1(epsilon)), abs=2e-4)


def test_a_step_costs_the_sum_and_is_priced_by_the_filter_alone() -> None:
    event = LineSearchStep(0.05, 1.2, 0.4)
    gradient = RdpAccountant(orders=ORDERS).compose(PoissonSampledDpEvent(0.05, GaussianDpEvent(1.2))).rdp
    assert np.allclose(event.rdp(ORDERS), np.array(gradient) + poisson_pure_rdp(0.05, 0.4, ORDERS), rtol=1e-9)
    assert np.allclose(LineSearchStep(0.05, 1.2, 0.0).rdp(ORDERS), gradient, rtol=1e-9)
    ledger = Ledger()
    ledger.record(event)
    for accountant in ("pld", "rdp", "zcdp"):
        with pytest.raises(UnpriceableError):
            price(ledger, 1e-5, accountant)


def test_a_search_is_the_sparse_vector_technique() -> None:
    """Threshold noise F/ε₁ once, query noise 2F/ε₂ for each trial, the first success ends it."""
    trainer = start("sas-dp", noise_multiplier=2.0, **PLAIN, options={"loss_clip": 3.0, "trials": 4})
    trainer.search_epsilon = 1.0  # ε₁ = ε₂ = 1/2
    trainer.release({}, 1.0, LineSearchStep(0.25, 1.0, 0.0))
    for parameter in trainer.parameters.values():
        parameter.grad.zero_()
    random, taken = np.random.default_rng(0), []
    for _ in range(200):
        noise, losses = random.laplace(size=5).tolist(), random.normal(scale=10, size=5).tolist()
        answers = iter(losses)
        trainer._laplace = lambda count, loss, noise=noise: noise[:count]
        trainer._clipped_loss = lambda rows, answers=answers: next(answers)
        passed = [losses[0] - losses[k] + noise[k] * 2 * 3.0 / 0.5 >= noise[0] * 3.0 / 0.5 for k in range(1, 5)]
        expected = passed.index(True) if any(passed) else 3  # the smallest if none passes
        assert trainer._search(torch.arange(3), std=1.0) == pytest.approx(4 * 0.5 * 0.5**expected)
        assert len(list(answers)) == 3 - expected  # nothing is asked after the first success
        taken.append(expected)
    assert set(taken) == {0, 1, 2, 3}


def test_laplace_noise_is_laplace() -> None:
    trainer = start("sas-dp", noise_multiplier=2.0, **PLAIN)
    sample = np.array(trainer._laplace(20_000, torch.zeros(3)))
    assert stats.kstest(sample, stats.laplace.cdf).pvalue > 1e-3
    assert stats.kstest(sample * 0.9, stats.laplace.cdf).pvalue < 1e-3
    assert trainer._laplace(3, torch.zeros(3)) != trainer._laplace(3, torch.ones(3))


def test_an_example_moves_a_query_by_at_most_the_loss_clip() -> None:
    task = make_task(noise_multiplier=2.0, **PLAIN)
    trainer = make("sas-dp", {"loss_clip": 0.5}).start(task)

    def clipped(rows: torch.Tensor) -> float:
        return trainer._clipped_loss(trainer._losses(rows))

    alone = clipped(torch.arange(5))
    for bad in (1e6, math.nan, math.inf):
        task.train.tensors[0][7] = bad
        assert alone <= clipped(torch.tensor([0, 1, 2, 3, 4, 7])) <= alone + 0.5
    assert clipped(torch.arange(0)) == 0


def test_search_and_gradient_have_lots_of_their_own_and_the_model_is_left_alone() -> None:
    trainer = start("sas-dp", noise_multiplier=2.0, **PLAIN, options={"search_every": 1})
    asked, rows = [], trainer.rows
    trainer.rows = lambda lot: asked.append(lot) or rows(lot)
    trainer.advance()
    trainer.advance()
    assert asked == [0, 1, 2, 3]
    assert sorted(rows(0).tolist()) != sorted(rows(1).tolist())
    before = [parameter.clone() for parameter in trainer.module.parameters()]
    trainer._search(rows(9), std=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.module.parameters(), strict=True))


def test_the_filter_ends_the_run_before_it_is_exceeded() -> None:
    trainer = start("sas-dp", epsilon=3.0, **PLAIN, options={"raise_by": 0.2, "direction": 1.0})
    first = trainer.noise_multiplier
    with pytest.raises(BudgetExhausted):
        while not trainer.finished:
            trainer.advance()
    assert 0 < trainer.step < trainer.steps
    assert trainer.ledger.steps == trainer.step
    order = trainer.budget.filter_order
    spent = filter_divergence(trainer.ledger.counts, order)
    following = filter_divergence({LineSearchStep(0.25, trainer.noise_multiplier, 0.0): 1}, order)
    search = filter_divergence({LineSearchStep(0.25, 1e6, 2.0): 1}, order)
    assert spent <= trainer.filter_size < spent + following + search
    assert trainer.noise_multiplier == pytest.approx(first * 1.2 ** (1 - trainer.step))
    found = trainer.price(1e-4)
    assert (found.epsilon, found.is_bound) == (pytest.approx(3.0, rel=1e-9), True)
    assert found.epsilon <= 3.0
    assert trainer.statement(1e-4).price == found
    assert trainer.compared_prices(1e-4)["spent from the filter"].epsilon <= 3.0


def test_noise_falls_only_when_gradients_disagree() -> None:
    trainer = start("sas-dp", noise_multiplier=2.0, **PLAIN, options={"direction": -1.0})
    for _ in range(3):
        trainer.advance()
    assert trainer.noise_multiplier == 2.0
    trainer.method = make("sas-dp", {"direction": 0.5})
    gradient = [torch.ones_like(parameter) for parameter in trainer.parameters.values()]
    for sign, falls in ((1.0, False), (-1.0, True)):
        trainer.before = gradient
        trainer.hand_over({n: sign * torch.ones_like(p) for n, p in trainer.parameters.items()})
        before = trainer.noise_multiplier
        trainer._follow_direction()
        assert (trainer.noise_multiplier < before) == falls


def test_all_planned_steps_and_searches_fit_in_at_constant_noise() -> None:
    trainer = start("sas-dp", epsilon=6.0, **PLAIN, options={"raise_by": 0.0, "first_noise": 1.0})
    assert trainer.price(1e-4).epsilon == 0
    while not trainer.finished:
        trainer.advance()
    spent = trainer.compared_prices(1e-4)["spent from the filter"].epsilon
    assert 0.995 * 6 < spent <= trainer.price(1e-4).epsilon <= 6.0
    assert accuracy(trainer) > 0.6


def test_noise_without_a_target_fixes_the_filter_by_the_plan() -> None:
    trainer = start("sas-dp", noise_multiplier=2.0, **PLAIN, options={"raise_by": 0.0})
    while not trainer.finished:
        trainer.advance()
    assert trainer.step == trainer.steps
    spent = trainer.compared_prices(1e-4)["spent from the filter"].epsilon
    assert spent <= trainer.price(1e-4).epsilon == pytest.approx(spent, rel=1e-3)


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    options = {"search_every": 2, "direction": 0.5, "raise_by": 0.01}
    resumes_exactly("sas-dp", tmp_path, epsilon=5.0, **PLAIN, options=options)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="use --optimizer sgd and --momentum 0"):
        start("sas-dp", epsilon=1.0, momentum=0.9)
    with pytest.raises(ValueError, match="search_share must be above 0 and below 1, got 1"):
        make("sas-dp", {"search_share": 1.0})
    with pytest.raises(ValueError, match="direction is a cosine"):
        make("sas-dp", {"direction": 2.0})
    with pytest.raises(ValueError, match="trials must be a whole number"):
        make("sas-dp", {"trials": 0})
    with pytest.raises(ValueError, match="no option 'shrinkage'"):
        make("sas-dp", {"shrinkage": 0.5})
    with pytest.raises(CalibrationError, match="out of reach"):
        start("sas-dp", epsilon=1e-9, **PLAIN)
    with pytest.raises(ValueError, match="search_epsilon must be at least 0"):
        LineSearchStep(0.1, 1.0, -1.0)
