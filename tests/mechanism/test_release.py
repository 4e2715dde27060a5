"""The release: the noise of a real step has the law that is charged for, and no example adds more than C."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero import BudgetExhausted
from dphero.accounting import AdaptiveGaussian, PoissonGaussian, ShuffledGaussian, UnpriceableError
from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.geometry import Digests, Geometry, identity
from dphero.geometry.low_rank import LowRank
from dphero.guidance import PCA, Block, History, Isotropic, Released
from dphero.guidance import pca as weights
from dphero.mechanism.clipped_sum import ClippedSum
from dphero.mechanism.lot_sum import LotSum
from dphero.mechanism.release import Mechanism
from tests.trainer import Training, network, training

SIGMA, CLIP, LOT = 1.7, 0.3, 12.0


def mechanism(run: Training) -> Mechanism:
    assert run.engine._run is not None
    return run.engine._run.mechanism


def clipped(it: Mechanism, sums: Mapping[str, Tensor]) -> ClippedSum:
    """Some sums, as if they had been clipped by what the mechanism clips by."""
    return ClippedSum(sums, bound=it.clipping.norm, geometry=it.norm_geometry, divisor=it.expected_lot)


def nothing(out: Tensor, label: Tensor) -> Tensor:
    return (out * 0).mean()


def wide(seed: int = 0) -> nn.Sequential:
    """Layers with room for statistics, whose weights have a spectrum with something to say."""
    module = network(seed, nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8), nn.Tanh())
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() > 1:
                p.mul_(torch.logspace(-1, 0.5, len(p))[:, None])
    return module


def test_room_taken_early_is_for_one_release() -> None:
    found = []
    for early in (False, True):
        it = mechanism(training(guidance="isotropic", seed=5))
        it.before_lot()
        if early:
            it.make_room()
        found.append([it.release(clipped(it, {})) for _ in range(2)])
    usual, (first, second) = found
    for name in first:
        assert torch.equal(first[name], usual[0][name]) and torch.equal(second[name], usual[1][name])
        assert first[name].untyped_storage().data_ptr() != second[name].untyped_storage().data_ptr()


def test_the_noise_is_bound_to_the_shape_in_hand() -> None:
    """Renewed before a lot, or read from a checkpoint: what is known early of a shape is not that of the one before."""
    it, other = (mechanism(training(wide(), guidance=PCA(refresh_every=2))) for _ in range(2))
    seen = []
    for step in range(5):
        it.before_lot()
        seen.append(it.shape.digest)
        assert seen[-1] == b"".join(Digests([*it.noise_geometry.values()]).found())
        it.release(clipped(it, {}))
        with torch.no_grad():
            it.shape._parameters["0.weight"].normal_(generator=torch.Generator().manual_seed(step))
    assert len(set(seen)) == 3 and other.shape.digest != seen[-1]
    other.load_state_dict(it.state_dict())
    assert other.shape.digest == seen[-1]


def test_room_of_a_lot_that_failed_is_given_back() -> None:
    it = mechanism(training(guidance="isotropic"))
    it.make_room()
    it.before_lot()
    assert it._room is None


# -- the noise of one real release ---------------------------------------------------------------------------

SHAPED: list[tuple[str, Any]] = [
    ("ellipsoid", PCA(exponent=0.5, floor=0.05)),
    ("ellipsoid", PCA(exponent=1.0, floor=0.1, side="both", scope="model")),
    ("ball", PCA(exponent=0.5, floor=0.05)),
    ("ellipsoid", PCA(exponent=0.5, floor=0.05, solver="subspace", components=3)),
    ("ellipsoid", PCA(exponent=-0.5, floor=0.05, solver="subspace", components=3, refresh_every=2)),
    ("ellipsoid", History(refresh_every=1, exponent=0.5)),
    ("ellipsoid", History("full", refresh_every=2, exponent=0.5)),
    ("ball", History.geoclip(refresh_every=1)),
    ("ellipsoid", "isotropic"),
]


def releases(mode: Any, guidance: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Train a little, so that history has something to say; then release lots in which nobody has a gradient.

    Returns:
        All the noise, in units of sigma C / B: as it was released, and whitened by the geometry of its step.
    """
    run = training(wide(), mechanism=mode, guidance=guidance, noise_multiplier=SIGMA, max_grad_norm=CLIP, **options)
    if not isinstance(guidance, str) and guidance.needs_gradients:
        run.steps(5)
    raw, whitened = [], []
    unit = SIGMA * CLIP / LOT
    for _ in range(8):
        shapes: dict[str, Any] = {}

        def note(out: Tensor, label: Tensor, shapes: dict[str, Any] = shapes) -> Tensor:
            shapes.update(mechanism(run).noise_geometry)
            return nothing(out, label)

        (gradient,) = run.steps(1, note)
        for name, noise in gradient.items():
            raw.append(noise.flatten() / unit)
            whitened.append(shapes[name].whiten(noise.double()).flatten() / unit)
    return torch.cat(raw).double().numpy(), torch.cat(whitened).numpy()


@pytest.mark.parametrize("mode, guidance", SHAPED, ids=lambda value: str(value)[:60])
def test_the_noise_has_covariance_sigma_c_a(mode: str, guidance: Any, same_noise: None) -> None:
    """A⁻¹ noise · B / (σ C) is N(0, I); a scale of 2/3 or 3/2, or another geometry, is noticed.

    Bound to the sums of the steps that come before, the noise would be another one wherever a last digit is.
    """
    raw, whitened = releases(mode, guidance)
    assert len(whitened) > 3900
    assert stats.kstest(whitened, "norm").pvalue > 0.01
    assert stats.kstest(whitened * 2 / 3, "norm").pvalue < 1e-9
    assert stats.kstest(whitened * 3 / 2, "norm").pvalue < 1e-9
    if guidance != "isotropic":
        assert stats.kstest(raw, "norm").pvalue < 1e-3  # it is not the isotropic noise
    neighbours = whitened[1:] * whitened[:-1]  # and no two coordinates belong together
    assert abs(neighbours.mean()) * math.sqrt(len(neighbours)) < 4


def test_the_directions_are_those_of_the_geometry() -> None:
    """Not only the scales: the noise of a weight has the covariance A A^T, entry by entry."""
    guidance = PCA(exponent=1.0, floor=0.05, refresh_every=10**6)
    run = training(wide(), guidance=guidance, noise_multiplier=SIGMA, max_grad_norm=CLIP)
    shape = mechanism(run).noise_geometry["2.weight"]
    noises = [gradient["2.weight"] for gradient in run.steps(150, nothing)]
    columns = torch.cat(noises, 1).double() * LOT / (SIGMA * CLIP)
    assert shape.left is not None
    upper = torch.triu_indices(24, 24, 1).unbind()

    def score(a: Tensor) -> float:
        """Mean square of the correlations of A⁻¹ noise, in units of their spread: 1 if A is right."""
        white = torch.linalg.solve(a, columns)
        return float(((white @ white.T)[upper] / math.sqrt(columns.shape[1])).square().mean())

    a = shape.left.colour(torch.eye(24, dtype=torch.float64))
    assert score(a) == pytest.approx(1, abs=4 * math.sqrt(2 / 276))
    assert score(a.flip(0).flip(1)) > 10  # the same scales along other directions


def test_ball_noise_covers_every_direction() -> None:
    """In mode ball the norms are plain and the weakest direction of the noise has the full sigma C."""
    run = training(wide(), mechanism="ball", guidance=PCA(exponent=1.0, floor=0.1))
    shapes = mechanism(run).noise_geometry.values()
    assert min(shape.smallest for shape in shapes) == pytest.approx(1)
    assert max(shape.left.largest for shape in shapes if shape.left is not None) > 2
    assert all(shape.is_identity for shape in mechanism(run).norm_geometry.values())


def test_adaptive_clipping_spends_a_part_of_the_noise_on_the_count() -> None:
    run = training(wide(), guidance="isotropic", clipping="adaptive", noise_multiplier=SIGMA, max_grad_norm=CLIP)
    noise, unit = [], []
    for _ in range(8):
        unit.append(mechanism(run).clipping.norm)
        (gradient,) = run.steps(1, nothing)
        noise.append(torch.cat([value.flatten() for value in gradient.values()]) / unit[-1])
    assert len(set(unit)) == 8  # the bound moves, and the noise with it
    count_noise = mechanism(run).clipping.count_noise
    assert count_noise is not None
    multiplier = (SIGMA**-2 - (2 * count_noise) ** -2) ** -0.5
    values = torch.cat(noise).double().numpy() * LOT / multiplier
    assert stats.kstest(values, "norm").pvalue > 0.01
    assert stats.kstest(values * multiplier / SIGMA, "norm").pvalue < 0.05 or multiplier / SIGMA < 1.05


def test_the_noisy_count_has_the_noise_that_is_charged() -> None:
    """In lots that are empty: the count of nobody is released too."""
    run = training(clipping="adaptive", noise_multiplier=SIGMA, sample_rate=1e-9, dataset_size=None)
    clipping = mechanism(run).clipping
    seen: list[float] = []
    clipping.adapt = lambda count, lot: seen.append(count)  # type: ignore[method-assign]
    run.steps(600)
    assert clipping.count_noise is not None
    scores = np.array(seen) / clipping.count_noise
    assert stats.kstest(scores, "norm").pvalue > 0.01
    assert stats.kstest(scores * 2 / 3, "norm").pvalue < 1e-3
    assert stats.kstest(scores * 3 / 2, "norm").pvalue < 1e-3


# -- what one example adds ------------------------------------------------------------------------------------

_QUIET = 1e-7


@settings(max_examples=25)
@given(
    clipping=st.sampled_from(["flat", "per_layer", "automatic", "adaptive"]),
    guidance=st.sampled_from(["isotropic", "pca", "history"]),
    mode=st.sampled_from(["ellipsoid", "ball"]),
    size=st.floats(-4, 6),
    bound=st.floats(0.01, 10),
)
def test_one_example_adds_at_most_c_in_the_whitened_space(
    clipping: str, guidance: str, mode: Any, size: float, bound: float
) -> None:
    """Through the whole engine: a lot of one example, with almost no noise."""
    one = TensorDataset(torch.randn(1, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([1]))
    run = training(
        wide(), dataset=one, clipping=clipping, guidance=guidance, mechanism=mode, max_grad_norm=bound,
        noise_multiplier=_QUIET, sample_rate=1.0, expected_batch_size=4.0, dataset_size=None,
    )  # fmt: skip
    for _ in range(2):
        bound, shapes = mechanism(run).clipping.norm, dict(mechanism(run).norm_geometry)
        run.optimizer.zero_grad()
        ((x, y),) = [next(iter(run.loader))]
        (10.0**size * F.cross_entropy(run.module(x), y)).backward()
        added = run.gradients()
        whitened = {name: shapes[name].whiten(value.double()) * 4 for name, value in added.items()}
        total = math.sqrt(sum(float(value.square().sum()) for value in whitened.values()))
        assert total <= bound * (1 + 1e-4)
        if size > 2:
            assert total >= bound * 0.5


class Positions(nn.Module):
    """A layer applied at every position: its per-example norm comes from Gram matrices."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("bias", [False, True])
def test_positions_that_cancel_do_not_hide_a_gradient(bias: bool) -> None:
    """An adversary's example: terms so large, and so nearly opposite, that rounding hides what is left of them."""
    worst = 0.0
    for power in range(2, 8):
        generator = torch.Generator().manual_seed(power)
        for _ in range(4):
            first, rest = (torch.randn(1, 1, 64, generator=generator) * 10**power for _ in range(2))
            one = TensorDataset(torch.cat([first, 1e-4 * rest - first], 1), torch.randn(1, 64, generator=generator))
            run = training(
                Positions(bias), dataset=one, guidance="isotropic", noise_multiplier=1e-9, sample_rate=1.0,
                expected_batch_size=1.0, dataset_size=None,
            )  # fmt: skip
            (added,) = run.steps(1, lambda out, direction: (out * direction[:, None]).sum((1, 2)).mean())
            worst = max(worst, math.sqrt(sum(float(value.double().square().sum()) for value in added.values())))
    assert worst <= 1 + 1e-4


@pytest.mark.parametrize("lot", [5.0, 12.0, 50.0])
def test_the_divisor_is_public(lot: float) -> None:
    """The same lot, released with another public B, is the same sum divided by that B."""
    run = training(
        guidance="isotropic", noise_multiplier=_QUIET, sample_rate=0.2, expected_batch_size=lot, dataset_size=None
    )
    reference = training(
        guidance="isotropic", noise_multiplier=_QUIET, sample_rate=0.2, expected_batch_size=1.0, dataset_size=None
    )
    found, expected = run.steps(1)[0], reference.steps(1)[0]
    for name in found:
        torch.testing.assert_close(found[name] * lot, expected[name])


@pytest.mark.usefixtures("same_noise")
def test_a_release_is_the_clipped_sum_plus_the_noise() -> None:
    """Against micro-batches of one: the same seed with and without gradients differs by the clipped sum alone."""
    private, noise = training(guidance="isotropic"), training(guidance="isotropic")
    (found,), (zero,) = private.steps(1), noise.steps(1, nothing)
    module, (x, y) = network(), (part.as_subclass(Tensor) for part in next(iter(training(guidance="isotropic").loader)))
    expected = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for i in range(len(x)):
        module.zero_grad()
        F.cross_entropy(module(x[i : i + 1]), y[i : i + 1]).backward()
        size = math.sqrt(sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None))
        for name, p in module.named_parameters():
            assert p.grad is not None
            expected[name] += p.grad * min(1.0, 1.0 / size)
    for name in expected:
        torch.testing.assert_close((found[name] - zero[name]) * LOT, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("same_noise")
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sum_under_shaped_noise_comes_out_as_it_went_in(side: str) -> None:
    """Releases of a sum and of zeros, under the same noise, differ by the sum."""
    module = wide()
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    sums = {name: torch.randn(shape, generator=torch.Generator().manual_seed(5)) for name, shape in shapes.items()}
    released = []
    for factor in (0.0, 1.0):
        guidance = PCA(side=side, exact_up_to=4, components=3)
        run = training(copy.deepcopy(module), guidance=guidance, noise_multiplier=SIGMA, max_grad_norm=CLIP, seed=3)
        it = mechanism(run)
        given = {name: factor * value for name, value in sums.items()}
        assert not all(shape.is_identity for shape in it.noise_geometry.values())
        released.append(it.release(clipped(it, given)))
    for name, value in sums.items():
        torch.testing.assert_close(released[1][name] - released[0][name], value, rtol=1e-4, atol=1e-5)


def test_noise_never_repeats() -> None:
    for secure in (False, True):
        run = training(secure=secure) if secure else training()
        vectors = [torch.cat([g.flatten() for g in step.values()]) for step in run.steps(12, nothing)]
        assert len({tuple(vector.tolist()) for vector in vectors}) == 12
        table = np.corrcoef(torch.stack(vectors).double().numpy())
        assert np.abs(table[np.triu_indices(12, 1)]).max() < 0.5


# -- what may be released --------------------------------------------------------------------------------------


def test_a_lot_is_released_only_once_and_only_as_it_was_clipped() -> None:
    it = mechanism(training(wide(), max_grad_norm=CLIP))
    zeros = {name: torch.zeros(shape.shape) for name, shape in it.norm_geometry.items()}
    right: dict[str, Any] = {"bound": CLIP, "geometry": it.norm_geometry, "divisor": LOT}
    lot = ClippedSum(zeros, **right)
    it.release(lot)
    with pytest.raises(RuntimeError, match="released before"):
        it.release(lot)
    for wrong, words in (
        ({"bound": 2 * CLIP}, "clipped to 0.6, the noise is for 0.3"),
        ({"divisor": 1.0}, "divided by 1, the noise by 12"),
        ({"geometry": dict(it.norm_geometry)}, "another geometry"),
    ):
        with pytest.raises(RuntimeError, match=words):
            it.release(ClippedSum(zeros, **{**right, **wrong}))
    assert it.ledger.steps == it.releases == 1  # what is refused costs nothing


def test_a_clipped_sum_has_a_bound_and_a_geometry() -> None:
    shapes, w = {"w": identity((2, 3))}, torch.zeros(2, 3)
    for sums, options in (
        ({"w": w}, {"geometry": None}),
        ({"w": w.T}, {}),
        ({"v": w}, {}),
        ({"w": w}, {"bound": 0.0}),
        ({"w": w}, {"bound": math.nan}),
        ({"w": w}, {"divisor": math.inf}),
    ):
        with pytest.raises(ValueError):
            ClippedSum(sums, **{"bound": 1.0, "geometry": shapes, "divisor": 1.0, **options})  # type: ignore[arg-type]
    ClippedSum({}, bound=1.0, geometry=None, divisor=1.0)  # a lot of nobody


def test_bound_and_geometry_stay_within_a_lot() -> None:
    run = training(physical_batch_size=2, guidance="pca")
    batches = iter(run.loader)
    x, y = next(batches)
    F.cross_entropy(run.module(x), y).backward()
    mechanism(run).shape.refresh(1, 1.0)
    with pytest.raises(RuntimeError, match="changed within a lot"):
        x, y = next(batches)
        F.cross_entropy(run.module(x), y).backward()
    assert run.engine.ledger.steps == 0


# -- what is charged -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, event",
    [
        ({}, PoissonGaussian(0.2, 1.3)),
        ({"mechanism": "ball"}, PoissonGaussian(0.2, 1.3)),
        ({"clipping": "adaptive"}, PoissonGaussian(0.2, 1.3)),
        ({"physical_batch_size": 2}, PoissonGaussian(0.2, 1.3)),
        ({"sample_rate": 1e-9, "dataset_size": None}, PoissonGaussian(1e-9, 1.3)),  # every lot is empty
    ],
)
def test_every_release_is_charged_once(options: dict[str, Any], event: PoissonGaussian) -> None:
    run = training(noise_multiplier=1.3, **options)
    assert run.engine.ledger.steps == 0
    run.steps(7)
    assert dict(run.engine.ledger.counts) == {event: 7}


def test_an_interrupted_release_uses_its_number_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while noise is drawn: the charge stands, the lot is over, and training goes on."""
    run = training()
    run.steps(2)
    noise = mechanism(run).noise
    draw = type(noise)._draw

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(noise), "_draw", interrupted)
    lot = run.loader.lots.next
    with pytest.raises(KeyboardInterrupt):
        run.steps(1)
    monkeypatch.setattr(type(noise), "_draw", draw)
    assert all(p.grad is None for p in run.module.parameters())
    assert run.loader.lots.next == lot + 1
    run.steps(2)
    assert run.engine.ledger.steps == 5 and run.engine.steps == 5
    run.engine._run.state_dict()  # type: ignore[union-attr]  # and can be saved


def test_a_lot_that_guidance_has_seen_does_not_come_again() -> None:
    class Nervous(History):
        def observe(self, released: Released) -> None:
            raise OSError("no space left")

    run = training(guidance=Nervous())
    for lot in range(3):
        assert run.loader.lots.next == lot
        with pytest.raises(OSError, match="no space"):
            run.steps(1)
    assert run.engine.ledger.steps == 3


@pytest.mark.parametrize("bad", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_batch_that_fails_half_way_is_not_left_out(bad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught and passed over, it would take its lot-mates' part in the sum along: one example, many times C."""
    run = training(physical_batch_size=4)
    add, calls = LotSum.add, []

    def fail_once(self: LotSum, *args: Any, **options: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise bad
        add(self, *args, **options)

    def epoch() -> None:
        for x, y in run.loader:
            run.optimizer.zero_grad()
            try:
                F.cross_entropy(run.module(x), y).backward()
                run.optimizer.step()
            except bad:
                continue

    monkeypatch.setattr(LotSum, "add", fail_once)
    with pytest.raises(RuntimeError, match="handed out but not back-propagated"):
        epoch()
    assert run.engine.ledger.steps == 0
    x, y = next(iter(run.loader))  # anew: the lot is whole again
    F.cross_entropy(run.module(x), y).backward()


def test_a_batch_that_failed_cannot_be_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of it may be in the sum already."""
    run = training()
    x, y = next(iter(run.loader))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(LotSum, "add", lambda *_: (_ for _ in ()).throw(MemoryError()))
        F.cross_entropy(run.module(x), y).backward()
    with pytest.raises(RuntimeError, match=r"spoiled by an error.*anew"):
        F.cross_entropy(run.module(x), y).backward()
    run.steps(1)
    assert run.engine.ledger.steps == 1


def test_a_guidance_may_write_into_what_it_gave_away() -> None:
    """Norms are taken and noise is shaped at different times: both must see the same shape."""
    scales = torch.ones(48)
    basis = torch.linalg.qr(torch.randn(8, 2))[0]
    for factor in (Diagonal(scales), LowRank(basis, torch.tensor([2.0, 3.0]), 0.5)):
        x = torch.randn(4, factor.size)
        before = factor.whiten(x)
        scales.fill_(0.1)
        basis.zero_()
        assert torch.equal(factor.whiten(x), before)


def test_a_shape_in_which_rounding_would_show_is_refused() -> None:
    """A float32 sum of many gradients along the strongest direction is off, by rounding, in the weakest one too."""
    model = nn.Sequential(nn.Linear(6, 6))
    torch.manual_seed(0)
    with torch.no_grad():
        model[0].weight.copy_(torch.linalg.qr(torch.randn(6, 6))[0] * torch.logspace(-4, 0, 6))
    sharp = PCA(exponent=1.0, floor=0.0)
    with pytest.raises(ValueError, match=r"'0.weight' would be .* times stronger.*floor.*float64"):
        training(copy.deepcopy(model), guidance=sharp)
    training(copy.deepcopy(model), guidance=PCA(exponent=1.0, floor=0.1))
    training(copy.deepcopy(model), guidance=sharp, mechanism="ball")  # the sum is clipped to a ball


def test_a_shape_that_becomes_too_uneven_later_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    """The budget may be half spent by then: training goes on, with the shape before it."""
    model = nn.Sequential(nn.Linear(6, 6))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(6))
    run = training(model, guidance=PCA(exponent=1.0, floor=1e-9, refresh_every=2, solver="eigh"), max_grad_norm=1e-9)
    before = mechanism(run).noise_geometry
    with torch.no_grad():
        model[0].weight.copy_(torch.ones(6, 6))
    run.steps(5)
    assert mechanism(run).noise_geometry is before
    assert "stays as it was" in caplog.text and "'0.weight' would be" in caplog.text


@pytest.mark.parametrize("guidance", [PCA(refresh_every=2), History("full", refresh_every=2)], ids=["pca", "history"])
def test_the_loop_may_run_under_autocast(guidance: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        run = training(guidance=guidance)
        run.steps(5, lambda out, y: F.cross_entropy(out.float(), y))
    assert run.engine.steps == 5


@pytest.mark.parametrize(
    "options",
    [
        {"guidance": PCA(refresh_every=2, solver="subspace", components=2)},
        {"guidance": History("full", refresh_every=2), "clipping": "adaptive"},
        {"secure": True},
    ],
)
def test_a_default_device_is_for_the_users_own_tensors(options: Any) -> None:
    """With "cuda", as some set it: here "meta", which has no data, stands for any but the model's."""
    run = training(**options)
    torch.set_default_device("meta")
    try:
        run.steps(5)
    finally:
        torch.set_default_device(None)
    assert run.engine.steps == 5


def test_a_shuffled_epoch_is_charged_without_amplification() -> None:
    run = training(sampling="shuffle", noise_multiplier=2.0, dataset_size=None)
    run.steps(7)  # five lots an epoch
    assert dict(run.engine.ledger.counts) == {ShuffledGaussian(2.0, 0): 5, ShuffledGaussian(2.0, 1): 2}
    assert run.engine.get_epsilon(1e-5) > training(noise_multiplier=2.0).engine.get_epsilon(1e-5)
    assert "zero_out" in run.engine.statement(1e-5).text


def test_the_event_is_recorded_before_the_noise_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that fails half-way is paid for: never the other way round."""
    run = training()

    def fail(*args: Any, **options: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(mechanism(run).noise, "fill", fail)
    with pytest.raises(MemoryError):
        run.steps(1)
    assert run.engine.ledger.steps == 1 and run.engine.steps == 1  # its number is used up
    assert all(p.grad is None for p in run.module.parameters())


def test_a_lot_beyond_the_budget_is_refused_before_it_is_drawn() -> None:
    run = training()
    run.engine.limit(run_price(run, 3) * 1.0001, 1e-5)
    run.steps(3)
    weights = run.weights()
    for _ in range(2):
        with pytest.raises(BudgetExhausted, match="used up: 3 releases"):
            run.steps(1)
    assert run.engine.steps == 3
    assert all(torch.equal(weights[name], value) for name, value in run.weights().items())


def run_price(run: Training, steps: int) -> float:
    from dphero.accounting import Ledger, price

    ledger = Ledger()
    ledger.record(mechanism(run).next_event(), steps)
    return price(ledger, 1e-5).epsilon


# -- the recipe as published ------------------------------------------------------------------------------------


def lenet() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
        )  # fmt: skip


def published(**options: Any) -> Training:
    generator = torch.Generator().manual_seed(0)
    images = TensorDataset(torch.randn(40, 1, 28, 28, generator=generator), torch.arange(40) % 10)
    return training(
        lenet(), dataset=images, mechanism="published", guidance=PCA(exponent=1.0, floor=0.0), unsound=True,
        noise_multiplier=4.0, expected_batch_size=8, **options,
    )  # fmt: skip


def test_the_published_recipe_is_priced_by_its_weakest_direction() -> None:
    run = published()
    assert run.engine.get_epsilon(1e-5) == 0
    weakest = []
    for _ in range(2):
        shapes = mechanism(run).noise_geometry.values()
        weakest.append(min(shape.smallest for shape in shapes))
        run.steps(1)
    assert max(weakest) < 0.1  # at initialisation already
    assert list(run.engine.ledger.counts) == [
        AdaptiveGaussian(0.2, 4.0 * smallest) for smallest in dict.fromkeys(weakest)
    ]
    claimed = training(noise_multiplier=4.0)
    claimed.steps(2)
    assert run.engine.get_epsilon(1e-5) > 100 * claimed.engine.get_epsilon(1e-5)
    with pytest.raises(UnpriceableError, match="use accountant 'filter'"):
        run.engine.get_epsilon(1e-5, accountant="pld")


def test_the_published_recipe_is_labelled() -> None:
    run = published()
    run.steps(1)
    statement = run.engine.statement(1e-5)
    assert statement.label == "unsound as published"
    assert "UNSOUND AS PUBLISHED" in statement.text.splitlines()[0]
    assert not statement.price.is_bound and statement.price.accountant == "filter"
    run.engine.detach()
    assert run.engine.statement(1e-5).label == "unsound as published"  # the label outlives the run


def test_a_limit_on_the_published_recipe_is_a_filter() -> None:
    run = published()
    run.engine.limit(1e7, 1e-5)
    run.steps(2)
    statement = run.engine.statement(1e-5)
    assert statement.price.is_bound and statement.price.epsilon == 1e7  # only its size was fixed in advance
    assert 0 < run.engine.get_epsilon(1e-5) < 1e7
    late = published()
    late.steps(1)
    with pytest.raises(RuntimeError, match="before the first step"):
        late.engine.limit(1e7, 1e-5)
    small = published()
    small.engine.limit(1.0, 1e-5)
    with pytest.raises(BudgetExhausted):
        small.steps(1)


def test_the_published_recipe_needs_consent() -> None:
    for guidance in (PCA(exponent=1.0, floor=0.0), "isotropic"):
        with pytest.raises(ValueError, match=r"true ε is far above the claimed one.*unsound=True"):
            training(mechanism="published", guidance=guidance)
    with pytest.raises(ValueError, match="Poisson"):
        training(mechanism="published", unsound=True, sampling="shuffle")
    sound = training(unsound=True)  # consent alone changes nothing
    assert mechanism(sound).mode == "ellipsoid"


def test_guidance_for_unknown_parameters_is_refused() -> None:
    class Wrong(PCA):
        def geometry(self, released: Any) -> Any:
            return {"nobody": identity((1,))}

    with pytest.raises(ValueError, match="unknown parameters"):
        training(guidance=Wrong())


@pytest.mark.parametrize("begins", [False, True])
def test_guidance_may_begin_one_lot_before_it_is_asked(begins: bool) -> None:
    calls: list[tuple[str, int]] = []

    class Ahead(Isotropic):
        refresh_every = 3

        def prepare(self, released: Released) -> bool:
            calls.append(("prepare", released.step))
            return begins

        def geometry(self, released: Released) -> dict[str, Geometry]:
            calls.append(("geometry", released.step))
            return {"0.weight": Geometry((8, 6), left=Scalar(8, 1.0 + len(calls)))}

    run = training(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), guidance=Ahead())
    it, seen = mechanism(run), []
    for _ in range(7):
        run.steps(1)
        seen.append(it.noise_geometry["0.weight"].smallest)
    asked = (2, 5) if begins else (3, 6)  # in the release of the lot that it was told about, or before the next lot
    assert calls == [("geometry", 0), ("prepare", 2), ("geometry", asked[0]), ("prepare", 5), ("geometry", asked[1])]
    assert seen == [2.0] * 3 + [4.0] * 3 + [6.0]  # from lot 3 and 6 on, whenever it was made


@pytest.mark.parametrize("ahead", [False, True])
def test_weights_are_decomposed_when_they_are_asked_for_or_a_step_ahead(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ahead:  # as on a GPU
        monkeypatch.setattr(weights, "_AHEAD", ("cpu",))
    run = training(guidance=PCA(refresh_every=3, solver="eigh", exponent=1.0))
    known: list[Tensor] = [run.module[0].weight.detach().clone()]
    for _ in range(4):
        run.steps(1)
        known.append(run.module[0].weight.detach().clone())
    factor = mechanism(run).noise_geometry["0.weight"].left
    for step, weight in enumerate(known):
        again = PCA(solver="eigh", exponent=1.0).geometry(Released(0, (Block("w", weight),), 1.0))["w"].left
        assert torch.allclose(factor.matrix, again.matrix, rtol=1e-4, atol=1e-5) == (step == 3 - ahead), step


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("solver", ["subspace", "eigh"])
def test_weights_that_cannot_be_decomposed_spoil_no_release(
    solver: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ahead:  # as on a GPU: found out during a release, which is whole; the next is not begun
        monkeypatch.setattr(weights, "_AHEAD", ("cpu",))
    module = network(0, nn.Linear(8, 140), nn.Tanh(), nn.Linear(140, 8))
    run = training(module, guidance=PCA(refresh_every=3, solver=solver))
    run.steps(2)
    good = module[2].weight.detach().clone()
    with torch.no_grad():
        module[2].weight[0, 0] = math.nan
    run.steps(1)
    with pytest.raises(ValueError, match="diverged"):
        run.steps(1)
    assert run.engine.ledger.steps == 3 == mechanism(run).releases
    with torch.no_grad():
        module[2].weight.copy_(good)
    run.steps(3)
    assert run.engine.ledger.steps == 6


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("before", [2, 3, 4])
def test_a_checkpoint_carries_what_was_made_ahead(before: int, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if at_once:  # as on a GPU
        monkeypatch.setattr(weights, "_AHEAD", ("cpu",))
    unbroken, saved, resumed = (training(guidance=PCA(refresh_every=3), seed=1) for _ in range(3))
    unbroken.steps(8)
    saved.steps(before)
    assert (mechanism(saved).shape._next is not None) == (before == 3 and at_once)
    buffer = io.BytesIO()
    torch.save(saved.engine._attached.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    if before != 3:  # as in checkpoints from before geometries were made ahead
        del state["mechanism"]["next_geometry"]
    resumed.engine._attached.load_state_dict(state)
    saved.steps(8 - before)
    resumed.steps(8 - before)
    for name, value in unbroken.module.state_dict().items():
        assert torch.equal(value, saved.module.state_dict()[name]), name
        assert torch.equal(value, resumed.module.state_dict()[name]), name


# -- the grid of short formats ---------------------------------------------------------------------------------------


def lattice_guesses(rounded_before: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Release a sum of 0.3 C or nothing in bfloat16, 20 times; count how often the grid of the output tells which.

    Noise of type bfloat16 lies on a grid that is coarse where it is large. Where noise and sum nearly cancel, the
    output is small and its own grid fine: it then shows the sum, up to the coarse grid.
    """
    if rounded_before:
        monkeypatch.setattr("dphero.numerics.one_piece.at_least_single", lambda dtype: dtype)
    right = 0
    for trial in range(20):
        module = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 3)).bfloat16()
        run = training(module, guidance="isotropic", noise_multiplier=1.0, max_grad_norm=1.0, seed=trial)
        it, truth = mechanism(run), trial % 2 == 0
        candidate = 0.3 / LOT
        sums = {name: torch.full(p.shape, candidate * truth) for name, p in it._parameters.items()}
        released = it.release(clipped(it, sums))
        flat = torch.cat([value.flatten() for value in released.values()]).double()
        noise = (flat[flat.abs() < candidate / 8] - candidate) * 2**13  # were the sum there; in units of its grid
        guess = bool(((noise - noise.round()).abs() < 0.1).double().mean() > 0.6)
        right += guess == truth
        assert all(value.dtype == torch.bfloat16 for value in released.values())
    return right


def test_the_grid_of_bfloat16_does_not_show_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lattice_guesses(False, monkeypatch) <= 15
    assert lattice_guesses(True, monkeypatch) == 20  # without the guard


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("guidance", ["isotropic", "pca", "history"])
def test_noise_is_drawn_shaped_and_added_in_single_precision(
    secure: bool, guidance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rounded to the parameter's own type once, at the end."""
    module = network().bfloat16()
    options = {"secure": True} if secure else {"seed": 3}
    run = training(module, dataset=short_data(), guidance=guidance, **options)
    filled: list[torch.dtype] = []
    fill = run.engine._attached.mechanism.noise.fill

    def watched(tensors: Any, *arguments: Any, **options: Any) -> None:
        filled.extend(tensor.dtype for tensor in tensors.values())
        fill(tensors, *arguments, **options)

    monkeypatch.setattr(run.engine._attached.mechanism.noise, "fill", watched)
    steps = run.steps(3)
    assert set(filled) == {torch.float32}
    assert all(gradient.dtype == torch.bfloat16 for step in steps for gradient in step.values())


def short_data() -> TensorDataset:
    x, y = training().loader.dataset.tensors  # type: ignore[attr-defined]
    return TensorDataset(x.bfloat16(), y)
