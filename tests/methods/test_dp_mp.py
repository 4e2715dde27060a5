"""DP-MP: the published figures and the true ones, the schedules, the split of epochs, validation within a budget."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from scipy import stats

from dphero.accounting import (
    BudgetExhausted,
    CalibrationError,
    Ledger,
    PoissonGaussian,
    ShuffledFilter,
    ShuffledGaussian,
    UnpriceableError,
    price,
)
from dphero.accounting.numerics.curves import gaussian_delta
from dphero.methods import make
from dphero.methods.own_mechanism.noise_schedules import relative_noise
from tests.methods.digits_task import accuracy, make_task, resumes_exactly, start


def published(parts: int, pca: bool) -> Ledger:
    """100 epochs at σ = 8 with tensors noised apart, and the PCA at σ = 16 as an epoch of one batch."""
    ledger = Ledger()
    if pca:
        ledger.record(ShuffledGaussian(16.0, epoch=0))
    for epoch in range(1, 101):
        ledger.record(ShuffledGaussian(8.0 / math.sqrt(parts), epoch), count=100)
    return ledger


def test_published_epsilon_and_the_one_that_charges_everything() -> None:
    assert price(published(1, False), 1e-5, "zcdp").epsilon == pytest.approx(6.78, abs=0.005)
    assert price(published(2, True), 1e-5, "zcdp").epsilon == pytest.approx(10.05, abs=0.005)
    exact = price(published(1, False), 1e-5, "pld").epsilon  # 100 epochs at σ = 8 are one release at μ = 10/8
    assert gaussian_delta(1.25, exact) == pytest.approx(1e-5, rel=1e-6)
    poisson = Ledger()
    poisson.record(PoissonGaussian(0.01, 8.0), 10_000)
    assert price(poisson, 1e-5, coarse=True).epsilon == pytest.approx(0.44, abs=0.01)


def test_schedules_are_the_published_ones() -> None:
    def noise(schedule: str, epoch: int) -> float:
        return 10 * relative_noise(schedule, make("dp-mp", {"schedule": schedule}).rate, 10, 100)[epoch]

    assert noise("constant", 50) == 10
    assert noise("time", 50) == pytest.approx(10 / (1 + 0.0281 * 50))
    assert noise("exponential", 50) == pytest.approx(10 * math.exp(-0.0138 * 50))
    assert [noise("step", e) for e in (9, 10, 25)] == pytest.approx([10, 7.008, 10 * 0.7008**2])
    assert noise("polynomial", 0) == pytest.approx(10)
    assert noise("polynomial", 50) == pytest.approx(8 * 0.5**3.53 + 2)
    for schedule in ("time", "exponential", "step", "polynomial"):
        values = [noise(schedule, epoch) for epoch in range(100)]
        assert values == sorted(values, reverse=True)
        assert values[-1] > 0


@pytest.mark.parametrize("schedule", ["constant", "time", "exponential", "step", "polynomial"])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_the_noise_of_every_schedule_is_calibrated(schedule: str, per_tensor: bool) -> None:
    options = {"schedule": schedule, "per_tensor": per_tensor}
    trainer = start("dp-mp", epsilon=4.0, epochs=7.5, options=options)
    for epoch, sigma in enumerate(trainer.noise_multipliers):
        trainer.ledger.record(trainer.event(sigma, epoch), 3)
    assert len(trainer.noise_multipliers) == 8  # the half epoch is paid for as a whole one
    assert 0.999 * 4 < trainer.price(1e-4).epsilon <= 4.0
    mu_squared = sum((2 if per_tensor else 1) / sigma**2 for sigma in trainer.noise_multipliers)
    assert gaussian_delta(math.sqrt(mu_squared), 4.0) <= 1e-4 * (1 + 1e-9)


def test_a_run_pays_once_an_epoch_and_learns() -> None:
    trainer = start("dp-mp", epsilon=8.0, epochs=10.0)
    while not trainer.finished:
        trainer.advance()
    assert trainer.ledger.steps == trainer.steps == 40
    assert sum(trainer.ledger.charges().values()) == 10
    assert 0.995 * 8 < trainer.price(1e-4).epsilon <= 8.0
    assert trainer.compared_prices(1e-4)["zCDP"].epsilon == pytest.approx(price(trainer.ledger, 1e-4, "zcdp").epsilon)
    assert "contributing nothing" in trainer.statement(1e-4).text
    assert accuracy(trainer) > 0.7


def test_every_example_is_in_one_batch_of_an_epoch() -> None:
    trainer = start("dp-mp", noise_multiplier=4.0, lot=300, epochs=2.0)
    assert trainer.lots_per_epoch == 5
    for first in (0, 5):
        rows = torch.cat([trainer.rows(lot) for lot in range(first, first + 5)])
        assert rows.sort().values.tolist() == list(range(1400))


def gradients(trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in trainer.parameters.items()}


def test_tensors_noised_apart_are_clipped_apart_and_all_charged() -> None:
    trainer = start("dp-mp", noise_multiplier=4.0, clip=0.1, epochs=1.0, options={"per_tensor": True})
    assert trainer.parts == 2
    for row in range(5):
        sums, _, clipped = trainer.clipped_sum(torch.tensor([row]), trainer.clipping)
        for layer in ("0", "2"):
            norm = math.sqrt(sum(sums[f"{layer}.{name}"].square().sum() for name in ("weight", "bias")))
            assert norm == pytest.approx(0.1, rel=1e-4)
        assert clipped == 1
    trainer.advance()
    (event,) = trainer.ledger.counts
    assert event == ShuffledGaussian(4.0 / math.sqrt(2), 0)
    claimed = trainer.compared_prices(1e-4)["as the published code counts"]
    assert not claimed.is_bound
    assert claimed.epsilon < trainer.price(1e-4).epsilon


def test_noise_has_the_deviation_that_is_charged() -> None:
    settings = {"noise_multiplier": 5.0, "clip": 0.2, "lot": 350, "epochs": 2.0, "lr": 1e-9, "momentum": 0.0}
    found = []
    for seed in range(2, 12):
        trainer = start("dp-mp", **settings, options={"schedule": "constant"}, seed=seed)
        sums, _, _ = trainer.clipped_sum(trainer.rows(0), trainer.clipping)
        trainer.advance()
        found += [
            ((gradient * 350 - sums[name]) / (5.0 * 0.2)).flatten() for name, gradient in gradients(trainer).items()
        ]
    sample = torch.cat(found).numpy()
    assert stats.kstest(sample, stats.norm.cdf).pvalue > 1e-3
    assert stats.kstest(sample * 0.9, stats.norm.cdf).pvalue < 1e-3


# -- validation -------------------------------------------------------------------------------------------


def test_validation_spends_a_budget_that_was_fixed_before() -> None:
    options = {"schedule": "validation", "decay": 0.5, "checks": 1}
    trainer = start("dp-mp", epsilon=3.0, epochs=12.0, options=options)
    assert trainer.price(1e-4).epsilon == 0
    rho, sigmas = trainer.rho, []
    with pytest.raises(BudgetExhausted):
        while not trainer.finished:
            trainer.advance()
            if trainer.step % trainer.lots_per_epoch == 1:
                sigmas.append(trainer.sigma)
    assert trainer.sigma < sigmas[0]
    assert sum(1 / (2 * sigma**2) for sigma in sigmas) == pytest.approx(trainer.spent)
    assert trainer.spent <= rho < trainer.spent + 1 / (2 * trainer.sigma**2)
    assert trainer.ledger.counts == {ShuffledFilter(rho): 1}
    assert 0.999 * 3 < trainer.price(1e-4).epsilon <= 3.0
    ledger = Ledger()
    ledger.record(ShuffledGaussian(math.sqrt(1 / (2 * rho)), 0))
    assert trainer.price(1e-4).epsilon == pytest.approx(price(ledger, 1e-4, "rdp").epsilon, rel=1e-9)
    with pytest.raises(UnpriceableError):
        price(trainer.ledger, 1e-4, "pld")


def test_validation_examples_are_not_trained_on_and_their_count_is_noisy() -> None:
    runs = []
    for blank in (False, True):
        task = make_task(noise_multiplier=4.0, epochs=4.0)
        trainer = make("dp-mp", {"schedule": "validation", "validation_share": 0.1}).start(task)
        assert trainer.held_out == 140
        if blank:
            task.train.tensors[0][trainer.order[-140:]] = 0
        for _ in range(trainer.lots_per_epoch):
            trainer.advance()
        runs.append((trainer, torch.cat([p.flatten() for p in trainer.module.parameters()])))
    assert torch.equal(runs[0][1], runs[1][1])  # the same weights, whatever the held-out examples are
    trainer = runs[0][0]
    noises = []
    for _ in range(300):
        trainer.accuracies.clear()
        trainer._check()
        noises.append(trainer.accuracies[0] * 140 - trainer._count())
    assert stats.kstest(noises, stats.norm(scale=4.0).cdf).pvalue > 1e-3
    assert stats.kstest(noises, stats.norm(scale=2.5).cdf).pvalue < 1e-3


def test_those_held_out_are_drawn_at_random_and_all_others_are_trained_on(tmp_path: Path) -> None:
    options = {"schedule": "validation", "validation_share": 0.2}
    first, again, other, fresh = (start("dp-mp", epsilon=3.0, seed=seed, options=options) for seed in (1, 1, 2, None))
    held_out = [set(trainer.order[-280:].tolist()) for trainer in (first, again, other, fresh)]
    assert held_out[0] == held_out[1] and not held_out[0] & held_out[2] == held_out[0] == held_out[3]
    ranks = torch.tensor(sorted(held_out[0])) / 1400  # digits or a folder of classes: not the last rows
    assert stats.kstest(ranks, "uniform").pvalue > 1e-3
    trained = torch.cat([first.rows(lot) for lot in range(first.lots_per_epoch)])
    assert sorted(trained.tolist()) == sorted(set(range(1400)) - held_out[0])
    fresh.save(tmp_path / "checkpoint.pt", {})
    resumed = start("dp-mp", epsilon=3.0, seed=None, options=options)
    resumed.load(tmp_path / "checkpoint.pt")
    assert torch.equal(resumed.order, fresh.order)


def test_older_runs_go_on_with_the_rows_that_they_held_out() -> None:
    trainer = start("dp-mp", epsilon=3.0, options={"schedule": "validation"})
    trainer.restore({name: value for name, value in trainer.state().items() if name != "order"})
    assert trainer.order.tolist() == list(range(1400)) and int(trainer.rows(0).max()) < 1330


def test_noise_falls_when_accuracy_has_stopped_rising() -> None:
    trainer = start("dp-mp", noise_multiplier=1e-3, epochs=4.0, options={"schedule": "validation", "checks": 2})
    counts = iter([10, 20, 30, 40, 35, 35])
    trainer._count = lambda: next(counts)
    sigmas = []
    for _ in range(6):
        trainer._check()
        sigmas.append(trainer.sigma)
    assert sigmas == pytest.approx([1e-3] * 5 + [0.9e-3])


@pytest.mark.parametrize("schedule", ["step", "validation"])
def test_a_resumed_run_goes_on_exactly(schedule: str, tmp_path: Path) -> None:
    options = {"schedule": schedule, "checks": 1, "period": 1}
    resumes_exactly("dp-mp", tmp_path, half=7, epsilon=5.0, epochs=6.0, options=options)


def test_what_validation_has_seen_and_spent_is_saved(tmp_path: Path) -> None:
    options = {"schedule": "validation", "decay": 0.5, "checks": 1}
    trainer, resumed = (start("dp-mp", epsilon=8.0, epochs=8.0, options=options) for _ in range(2))
    for _ in range(2 * trainer.lots_per_epoch):
        trainer.advance()
    trainer.save(tmp_path / "checkpoint.pt", {})
    resumed.load(tmp_path / "checkpoint.pt")
    assert len(trainer.accuracies) == 2
    assert (resumed.accuracies, resumed.sigma, resumed.spent) == (trainer.accuracies, trainer.sigma, trainer.spent)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="schedule must be one of"):
        make("dp-mp", {"schedule": "cosine"})
    with pytest.raises(ValueError, match="a factor of at most 1, got 2"):
        make("dp-mp", {"schedule": "step", "decay": 2.0})
    with pytest.raises(ValueError, match="validation_share must be below 1"):
        make("dp-mp", {"validation_share": 1.0})
    with pytest.raises(ValueError, match="number of records itself must be public"):
        start("dp-mp", epsilon=1.0, dataset_size=2000)
    with pytest.raises(ValueError, match="number of records is private unless you say otherwise"):
        start("dp-mp", epsilon=1.0, dataset_size=None)
    with pytest.raises(ValueError, match="priced by rdp or zcdp, not by accountant 'gdp'"):
        start("dp-mp", epsilon=1.0, accountant="gdp", options={"schedule": "validation"})
    with pytest.raises(CalibrationError, match="out of reach"):
        start("dp-mp", epsilon=1e-12, accountant="zcdp")
