"""Features: the normalisation's releases, that they are charged and calibrated for, and made once."""

import math
from pathlib import Path

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import chi2

from dphero import models
from dphero.accounting import BudgetExhausted, Gaussian, Ledger, PoissonGaussian
from dphero.methods import make
from dphero.methods.on_engine.feature_dp import ChannelNorm, Moments, release_mean_direction, release_moments
from dphero.noise import FastNoise
from tests.methods.image_task import finish, make_task, resumes_exactly, start, take

PRIVATE = {"normalisation": "private"}


class Watched(Moments):
    """Notes what would have been released without noise, and how far one example was said to move it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = []

    def release(self, total, bound, noise_multiplier):
        self.seen.append((total.clone(), bound))
        return super().release(total, bound, noise_multiplier)


def features(count: int = 400) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.1, 1.0, 5.0]).view(1, 3, 1, 1)
    return scale * (1 + torch.randn(count, 3, 2, 2, generator=generator))


@pytest.mark.parametrize("outlier", [1.0, 1e4, 1e-6])
def test_one_example_moves_no_sum_by_more_than_its_bound(outlier: float) -> None:
    data = features()
    data[0] *= outlier
    runs = []
    for part in (data, data[1:]):
        watched = Watched(FastNoise(1), Ledger())
        release_moments(part, 400, watched, 0.5, (None, None))  # so little that the bound below holds for every seed
        runs.append(watched.seen)
    for (with_it, bound), (without, other) in zip(*runs, strict=True):
        if other == bound:  # the bound is itself noisy, and may differ by a bin
            assert (with_it - without).norm() <= bound * (1 + 1e-12)
    assert [bound for _, bound in runs[0]][::2] == [1.0, 1.0]  # histograms
    bounds = [bound for _, bound in runs[0]][1::2]
    norms = [data.double().pow(power).flatten(2).mean(2).norm(dim=1) for power in (1, 2)]
    for bound, norm in zip(bounds, norms, strict=True):
        assert norm.quantile(0.2) < bound < norm.quantile(0.8)  # near the median, though N is small


def test_noise_has_the_deviation_that_is_charged() -> None:
    ledger, zeros = Ledger(), torch.zeros(20_000, dtype=torch.float64)
    found = Moments(FastNoise(3), ledger).release(zeros, 0.7, 8.0)
    assert dict(ledger.counts) == {Gaussian(8.0): 1}

    def fits(deviation: float) -> bool:
        return 1e-5 < chi2.cdf(float((found / deviation).square().sum()), len(zeros)) < 1 - 1e-5

    assert fits(8.0 * 0.7)
    assert not fits(8.0) and not fits(1.1 * 8.0 * 0.7) and not fits(8.0 * 0.7 / 1.1)


def test_two_releases_never_share_noise() -> None:
    moments = Moments(FastNoise(3), Ledger())
    first, second = (moments.release(torch.zeros(100), 1.0, 1.0) for _ in range(2))
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.5


def test_with_little_noise_channels_become_standard() -> None:
    data = features(2000)
    mean, variance = release_moments(data, 2000, Moments(FastNoise(1), Ledger()), 1e-6, (1e3, 1e3))
    norm = ChannelNorm(3)
    assert torch.equal(norm(data), data)  # changes nothing before
    norm.mean.copy_(mean)
    norm.variance.copy_(variance)
    spread, middle = torch.std_mean(norm(data), dim=(0, 2, 3))
    assert torch.allclose(middle, torch.zeros(3), atol=1e-3) and torch.allclose(spread, torch.ones(3), atol=1e-2)


def test_the_variance_stays_above_its_noise() -> None:
    data = torch.ones(100, 3, 2, 2)  # has none
    _, variance = release_moments(data, 100, Moments(FastNoise(1), Ledger()), 8.0, (2.0, 2.0))
    assert (variance >= 8.0 * 2.0 / 100).all()


def test_normalisation_and_training_share_the_budget() -> None:
    trainer = start("feature-dp", epsilon=3.0, epochs=4, options=PRIVATE)
    assert finish(trainer) > 0.75
    found = trainer.statement(1e-4).price
    assert 2.95 < found.epsilon <= 3.0 and found.is_bound
    counts = dict(trainer.ledger.counts)
    step = next(event for event in counts if isinstance(event, PoissonGaussian))
    assert counts == {Gaussian(8.0): 2, Gaussian(32.0): 2, step: trainer.steps}
    accountant = PLDAccountant()
    for deviation in (8.0, 8.0, 32.0, 32.0):
        accountant.compose(GaussianDpEvent(deviation))
    accountant.compose(PoissonSampledDpEvent(step.sample_rate, GaussianDpEvent(step.noise_multiplier)), trainer.steps)
    assert found.epsilon == pytest.approx(accountant.get_epsilon(1e-4), abs=2e-3)
    free = start("feature-dp", epsilon=3.0, epochs=4)
    assert step.noise_multiplier > free.engine.noise_multiplier  # paid for by more noise
    with pytest.raises(BudgetExhausted):
        take(trainer, 5)


def test_public_bounds_save_the_histograms() -> None:
    options = {**PRIVATE, "mean_bound": 1.0, "square_bound": 0.5, "normalisation_noise": 5.0}
    trainer = take(start("feature-dp", noise_multiplier=2.0, options=options), 1)
    assert Gaussian(5.0) in trainer.ledger.counts and trainer.ledger.steps == 3


@pytest.mark.parametrize(
    ("options", "before"),
    [
        pytest.param({}, 0, id="group, at once", marks=pytest.mark.slow),
        pytest.param({}, 3, id="group, later"),
        pytest.param(PRIVATE, 0, id="private, at once"),
        pytest.param(PRIVATE, 3, id="private, later", marks=pytest.mark.slow),
    ],
)
def test_resumes_exactly(options: dict, before: int, tmp_path: Path) -> None:
    resumes_exactly(lambda: start("feature-dp", noise_multiplier=2.0, options=options), tmp_path, before, 3)


def test_without_a_seed_a_killed_run_repeats_its_normalisation(tmp_path: Path) -> None:
    """The key is saved before the first release: what is drawn after a crash is what was drawn before."""
    first = start("feature-dp", noise_multiplier=2.0, options=PRIVATE, seed=None)
    first.save(tmp_path / "checkpoint.pt", {})
    again = start("feature-dp", noise_multiplier=2.0, options=PRIVATE, seed=None)
    again.load(tmp_path / "checkpoint.pt")
    means = [take(trainer, 1).normalisation[0].mean for trainer in (first, again)]
    assert torch.equal(*means)


def test_a_first_step_that_fails_does_not_release_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = start("feature-dp", noise_multiplier=2.0, options=PRIVATE)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(trainer, "loss", lambda *_: (_ for _ in ()).throw(RuntimeError))
        trainer.advance()
    assert trainer.step == 0 and trainer.ledger.steps == 4
    trainer._batches = None  # iterate over the loader anew, as it asks for
    trainer.advance()
    assert trainer.step == 1 and trainer.ledger.steps == 5


def test_secure_noise_is_honoured() -> None:
    runs = [take(start("feature-dp", noise_multiplier=2.0, options=PRIVATE, seed=None, secure=True), 1) for _ in "ab"]
    assert not torch.equal(runs[0].normalisation[0].mean, runs[1].normalisation[0].mean)


def test_released_weights_fit_into_a_new_network() -> None:
    trainer = take(start("feature-dp", noise_multiplier=2.0, options=PRIVATE), 1)
    fresh = make("feature-dp", PRIVATE).network(models.build("scatter-linear", (1, 8, 8), 10))
    fresh.load_state_dict(trainer.model.state_dict())
    images = torch.randn(5, 1, 8, 8)
    assert torch.equal(fresh(images), trainer.model.eval()(images))
    assert not torch.equal(fresh.head[0][0].mean, torch.zeros(81))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="give --model scatter-linear"):
        make_task("feature-dp", epsilon=3.0, model="digits")
    no_norm = models.FeatureModel(torch.nn.Identity(), torch.nn.Linear(4, 2))
    with pytest.raises(ValueError, match="there is none"):
        make("feature-dp", PRIVATE).network(no_norm)
    with pytest.raises(ValueError, match="out of reach"):
        start("feature-dp", epsilon=0.3, accountant="rdp", options={**PRIVATE, "normalisation_noise": 0.5})


@pytest.mark.parametrize(
    "options",
    [{"normalisation": "batch"}, {"normalisation_noise": 0}, {"mean_bound": -1.0}, {"square_bound": math.inf}],
)
def test_bad_options(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make("feature-dp", options)


CENTRED = {"centred": True, "normalisation_noise": 16.0}


@pytest.mark.parametrize("outlier", [1.0, 1e4, math.nan])
def test_one_example_moves_the_mean_of_directions_by_one_at_most(outlier: float) -> None:
    data = features()
    data[0] *= outlier
    sums = []
    for part in (data, data[1:]):
        watched = Watched(FastNoise(1), Ledger())
        release_mean_direction(part, torch.nn.Identity(), 400, watched, 2.0)
        sums += watched.seen
    (with_it, bound), (without, _) = sums
    assert bound == 1.0 and (with_it - without).norm() <= 1 + 1e-6


def test_centring_is_charged_and_calibrated_for() -> None:
    trainer = start("feature-dp", epsilon=2.0, options=CENTRED, epochs=1, lot=1437)
    features = trainer.train.tensors[0]
    data = torch.nn.functional.normalize(features.flatten(1))
    take(trainer, 1)
    assert trainer.ledger.counts[Gaussian(16.0)] == 1
    rows, error = trainer.train.tensors[0], trainer.normalisation[0].mean - data.mean(0)
    assert torch.equal(rows, trainer.normalisation(features))  # once, before the first step
    assert torch.allclose(rows.norm(dim=1), torch.ones(len(rows)), atol=1e-5)
    assert error.norm() * 1437 / 16 == pytest.approx(data.shape[1] ** 0.5, rel=0.25)  # the noise that is charged
    while not trainer.finished:
        trainer.advance()
    assert 1.9 < trainer.price(1e-4).epsilon <= 2.0


def test_centring_comes_after_a_private_normalisation_and_resumes(tmp_path: Path) -> None:
    both = {**CENTRED, **PRIVATE}
    trainer = start("feature-dp", epsilon=3.0, options=both)
    layers = [*trainer.normalisation, *trainer.module]
    assert [type(layer).__name__ for layer in layers] == ["ChannelNorm", "CentredRows", "Linear"]
    resumes_exactly(lambda: start("feature-dp", epsilon=3.0, options=both, averaging="late"), tmp_path, 2, 2)


def test_centring_is_for_a_linear_classifier() -> None:
    with pytest.raises(ValueError, match="linear classifier"):
        start("feature-dp", epsilon=3.0, model="scatter-cnn", options=CENTRED)
