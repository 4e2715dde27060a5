"""DP-GED: divergences of Student-t noise against quadrature, the code book, the noise's law, a whole run."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from dphero.accounting import CalibrationError, Ledger, PoissonStudentT, price
from dphero.accounting.events.student_t import shift_log_moments, student_t_log_moments
from dphero.accounting.numerics.curves import poisson_gaussian_rdp
from dphero.gradients.batch import GradientBatch
from dphero.gradients.piece import Explicit
from dphero.mechanism.clipping import total
from dphero.methods import make
from dphero.methods.own_mechanism.dp_ged import encode, score, student_t
from tests.methods.digits_task import accuracy, resumes_exactly, start


def log_density(x: float, degrees: int) -> float:
    constant = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    return constant - (degrees + 1) / 2 * math.log1p(x * x / degrees)


def log_add(a: float, b: float) -> float:
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))


def integral(function, shift: float) -> float:
    pieces = [-np.inf, -10.0, 0.0, shift, shift + 10.0, np.inf]
    return sum(
        integrate.quad(function, a, b, epsabs=1e-14, epsrel=1e-11, limit=200)[0] for a, b in itertools.pairwise(pieces)
    )


@pytest.mark.parametrize(("degrees", "shift"), [(9, 0.05), (9, 1.0), (9, 6.0), (4, 0.7), (30, 2.0)])
def test_moments_agree_with_quadrature(degrees: int, shift: float) -> None:
    found = shift_log_moments(degrees, shift)
    for power in (2, 3, 10, 40):

        def powers(x: float, power: int = power) -> float:
            return math.exp(power * log_density(x - shift, degrees) + (1 - power) * log_density(x, degrees))

        value = integral(powers, shift)
        assert found[power] == pytest.approx(math.log(value), rel=1e-6)
    assert (found[:2] == 0).all()


@pytest.mark.parametrize(("scale", "rate", "order"), [(1.0, 0.1, 4), (0.8, 0.02, 12), (2.0, 0.5, 6)])
def test_sampled_divergence_agrees_with_quadrature_and_covers_both_directions(
    scale: float, rate: float, order: int
) -> None:
    charged = PoissonStudentT(rate, scale, 9, spacing=1.0, levels=1).rdp([order])[0]  # one coordinate, all of C
    shift = 1 / scale

    def log_mixture(x: float) -> float:
        return log_add(math.log1p(-rate) + log_density(x, 9), math.log(rate) + log_density(x - shift, 9))

    removing = integral(lambda x: math.exp(order * log_mixture(x) + (1 - order) * log_density(x, 9)), shift)
    adding = integral(lambda x: math.exp(order * log_density(x, 9) + (1 - order) * log_mixture(x)), shift)
    assert charged == pytest.approx(math.log(removing) / (order - 1), rel=1e-4)
    assert math.log(adding) / (order - 1) <= charged


def test_no_code_word_costs_more_than_is_charged() -> None:
    spacing, levels, scale = 0.1, 10, 1.0
    bounds = student_t_log_moments(9, scale, spacing, levels)
    single = {step: shift_log_moments(9, step * spacing / scale) for step in range(levels + 1)}
    random = np.random.default_rng(0)
    worst = np.zeros(len(bounds))
    for _ in range(300):
        word = np.abs(random.standard_t(1.5, size=30)).clip(max=10).round().astype(int)
        while (word**2).sum() > 1 / spacing**2:
            word[random.integers(30)] = 0
        worst = np.maximum(worst, sum(single[step] for step in word))
    assert (worst <= bounds).all()
    spread = 100 * single[1]  # a hundred coordinates of the smallest size: norm 1
    assert np.allclose(spread[2:6], bounds[2:6], rtol=1e-5)  # met at low orders
    # the norm alone says too little: all of it in one coordinate is cheaper at these orders
    assert (single[10][2:6] < 0.99 * bounds[2:6]).all()


def test_many_degrees_of_freedom_are_the_gaussian() -> None:
    orders = [2.0, 3.0, 8.0, 64.0]
    nearly = PoissonStudentT(0.05, 1.5, 100_000, spacing=0.5, levels=2).rdp(orders)
    assert np.allclose(nearly, poisson_gaussian_rdp(0.05, 1.5, orders), rtol=1e-2)


def test_orders_between_and_beyond() -> None:
    event = PoissonStudentT(0.05, 1.0, 9, 0.01, 64)
    between, above, beyond = event.rdp([2.5, 3.0, 200.0])
    assert between == above
    assert beyond == math.inf
    assert PoissonStudentT(0.05, 1.1, 9, 0.01, 64).rdp([3.0])[0] < above  # more noise costs less
    assert PoissonStudentT(0.04, 1.0, 9, 0.01, 64).rdp([3.0])[0] < above


def test_equal_variance_does_not_beat_gaussian_noise() -> None:
    """What the statement of flaws says: the variance of t₉ is 9/7 of its scale's square."""
    orders = [2.0, 4.0]
    student = PoissonStudentT(0.01, 1.0, 9, 0.001, 64).rdp(orders)
    assert (student > poisson_gaussian_rdp(0.01, math.sqrt(9 / 7), orders)).all()


def test_code_words_lie_in_the_book_and_within_the_clip_norm() -> None:
    trainer = start("dp-ged", noise_multiplier=1.0, lot=350, epochs=1.0)
    clip, unit, levels = 0.3, 0.004, 20
    seen = []
    for row in range(6):
        for _, batch, _ in trainer.gradients(torch.tensor([row])):
            before = total(batch.square_norms).sqrt().item()
            codes, clipped = encode(batch, clip, unit, levels)
            assert clipped == int(before > clip)
            word = torch.cat([code.flatten() for code in codes.values()]).double()
            steps = word / unit
            assert torch.allclose(steps, steps.round(), atol=1e-4)
            assert steps.abs().max() <= levels + 1e-4
            assert word.norm() <= clip
            assert word.norm() > 0.5 * min(clip, before)
            seen.append(steps.abs().max().item())
    assert max(seen) > levels - 0.5  # some coordinate was cut to the last level


@pytest.mark.parametrize("unit", [0.05, 0.16, 0.19])
def test_encoding_never_lengthens_a_gradient(unit: float) -> None:
    gradients = torch.full((1, 100), 0.1)  # norm 1; rounded to the nearest, 0.16 would make it 1.6
    batch = GradientBatch(1, {"w": Explicit(gradients)}, {"w": torch.ones(1)})
    assert encode(batch, 1.0, unit, 100)[0]["w"].norm() <= 1 + 1e-6


def test_a_gradient_that_is_no_number_has_the_word_zero() -> None:
    trainer = start("dp-ged", noise_multiplier=1.0, lot=350, epochs=1.0)
    trainer.task.train.tensors[0][1] = math.nan
    (both,) = [encode(batch, 0.3, 0.004, 20)[0] for _, batch, _ in trainer.gradients(torch.tensor([0, 1]))]
    (alone,) = [encode(batch, 0.3, 0.004, 20)[0] for _, batch, _ in trainer.gradients(torch.tensor([0]))]
    assert all(torch.allclose(both[name], alone[name], atol=1e-6) for name in alone)


def test_noise_follows_the_student_law() -> None:
    trainer = start("dp-ged", noise_multiplier=1.0, lot=350, epochs=1.0)
    drawn = [torch.cat([part.flatten() for part in student_t(trainer, 9).values()]) for _ in range(30)]
    assert not torch.equal(drawn[0], drawn[1])
    sample = torch.cat(drawn).numpy()
    assert stats.kstest(sample, stats.t(9).cdf).pvalue > 1e-3
    assert stats.kstest(sample, stats.norm.cdf).pvalue < 1e-3
    assert stats.kstest(sample * 0.9, stats.t(9).cdf).pvalue < 1e-3


def test_released_noise_has_the_scale_that_is_charged() -> None:
    trainer = start("dp-ged", noise_multiplier=3.0, lot=350, epochs=1.0, clip=1e-3, options={"denoise": "none"})
    found = []
    for _ in range(4):
        trainer.advance()
        found.append(torch.cat([parameter.grad.flatten() for parameter in trainer.parameters.values()]))
    sample = (torch.cat(found) * 350 / (3.0 * 1e-3)).numpy()
    # the clipped sum is 350 · 1e-3 / √750 a coordinate at most: small against 3e-3 only where examples disagree
    assert np.median(np.abs(sample)) > stats.t(9).ppf(0.75) * 0.9


def test_denoising_keeps_small_signals_and_takes_the_tails() -> None:
    scale, signal = 2.0, 0.05
    noise = scale * np.random.default_rng(0).standard_t(9, 1_000_000)
    plain = torch.from_numpy(noise + signal)
    denoised = score(plain, scale, 9)
    assert denoised.mean().item() == pytest.approx(signal, abs=5 * 2.2 / math.sqrt(1e6))
    assert denoised.var() < 0.96 * plain.var()  # 1.2 against 1.286 of the scale's square
    assert denoised.abs().max() <= scale * 2.01


def test_a_run_is_calibrated_and_learns() -> None:
    trainer = start("dp-ged", epsilon=6.0, epochs=12.0)
    assert trainer.price(1e-4).epsilon == 0
    while not trainer.finished:
        trainer.advance()
    assert 0.995 * 6 < trainer.price(1e-4).epsilon <= 6.0
    assert trainer.ledger.steps == trainer.steps
    assert "Student-t" in trainer.statement(1e-4).text
    assert accuracy(trainer) > 0.7  # 0.73 to 0.77 by seed
    ledger = Ledger()
    ledger.record(trainer.event, trainer.steps)
    assert price(Ledger.from_json(ledger.to_json()), 1e-4, "rdp") == trainer.price(1e-4)


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    resumes_exactly("dp-ged", tmp_path, noise_multiplier=2.0, epochs=20.0)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="degrees must be at least 3"):
        make("dp-ged", {"degrees": 2})
    with pytest.raises(ValueError, match="unit must be at most 1"):
        make("dp-ged", {"unit": 3.0})
    with pytest.raises(ValueError, match="denoise must be one of"):
        make("dp-ged", {"denoise": "median"})
    with pytest.raises(ValueError, match="priced by rdp, not by accountant 'zcdp'"):
        start("dp-ged", epsilon=1.0, accountant="zcdp")
    with pytest.raises(CalibrationError, match="out of reach"):
        start("dp-ged", epsilon=1e-6)
    with pytest.raises(ValueError, match=r"noise multiplier 1e-06 is too small for 'dp-ged': below 0\.05"):
        start("dp-ged", noise_multiplier=1e-6)
    with pytest.raises(ValueError, match="spacing must be above 0 and at most 1, got 2"):
        PoissonStudentT(0.1, 1.0, 9, 2.0, 3)
