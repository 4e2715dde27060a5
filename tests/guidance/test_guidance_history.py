"""Guidance by past noisy gradients: the known noise is taken out, whatever its shape was."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dphero.geometry.dense import Dense
from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.geometry import Geometry
from dphero.geometry.low_rank import LowRank
from dphero.guidance import Block, History, Released
from dphero.guidance.second_moments import Average, DenseMoment, DiagonalMoment, LeadingMoment, axis_noise


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def basis(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator(seed)))[0]


def spread(size: int, seed: int) -> Tensor:
    return 0.5 + 1.5 * torch.rand(size, generator=generator(seed))


def geometries(rows: int, columns: int) -> dict[str, Geometry | None]:
    shape, size = (rows, columns), rows * columns
    left, right = Dense(basis(rows, 1), spread(rows, 2)), Dense(basis(columns, 3), spread(columns, 4))
    return {
        "identity": None,
        "left": Geometry(shape, left=left),
        "right": Geometry(shape, right=right),
        "both": Geometry(shape, left, right),
        "diagonal": Geometry(shape, flat=Diagonal(spread(size, 5))),
        "scalar": Geometry(shape, flat=Scalar(size, 1.7)),
        "flat": Geometry(shape, flat=LowRank(basis(size, 6)[:, :4], torch.full((4,), 3.0), 0.8)),
    }


KINDS = list(geometries(2, 3))


def run(guidance: History, signal: Any, noise_scale: float, geometry: Geometry | None, steps: int) -> Released:
    """Feeds `steps` releases: signal(step) plus the noise that the geometry gives."""
    draw = generator(77)
    released = None
    for step in range(steps):
        clean = signal(step)
        z = torch.randn(clean.shape, generator=draw)
        noise = noise_scale * (z if geometry is None else geometry.colour(z))
        block = Block("w", torch.zeros(clean.shape), gradient=clean + noise, geometry=geometry)
        released = Released(step, (block,), noise_scale)
        guidance.observe(released)
    assert released is not None
    return released


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_noise_along_an_axis_is_the_average_over_the_other(kind: str, axis: Any) -> None:
    geometry = geometries(4, 6)[kind]
    size = 4 if axis == "rows" else 6
    noise = axis_noise(geometry, axis, torch.zeros(4, 6))
    unit = torch.eye(24).reshape(24, 4, 6)
    coloured = unit if geometry is None else geometry.colour(unit)  # E[Z Z^T] = sum over z = unit vectors
    views = coloured if axis == "rows" else coloured.mT
    expected = torch.einsum("nij,nkj->ik", views, views) / (24 // size)
    root = noise.root(torch.eye(size))
    torch.testing.assert_close(root.T @ root, expected, rtol=1e-4, atol=1e-4)
    assert noise.trace == pytest.approx(float(expected.trace()), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_diagonal_takes_the_known_noise_out(kind: str) -> None:
    rows, columns, geometry = 6, 8, geometries(6, 8)[kind]
    deviations = torch.where(torch.rand(rows, columns, generator=generator(0)) < 0.25, 2.0, 0.2)
    draw = generator(1)
    guidance = History("diagonal", exponent=1.0, floor=0.1, decay=0.9995)
    released = run(guidance, lambda _: deviations * torch.randn(rows, columns, generator=draw), 2.0, geometry, 4000)
    moment = guidance._moments["w"]
    assert isinstance(moment, DiagonalMoment)
    found, truth = moment.mean(), deviations.square().flatten()
    assert float((found - truth).abs().max()) < 2.5  # the noise alone has a variance between 1 and 36
    factor = guidance.geometry(released)["w"].flat
    assert isinstance(factor, Diagonal) and float(factor.scales.square().mean()) == pytest.approx(1.0, rel=1e-5)
    strong = truth > 1
    assert float(factor.scales[strong].mean()) > 3 * float(factor.scales[~strong].mean())


@pytest.mark.parametrize("kind", ["identity", "both", "diagonal", "flat"])
def test_full_recovers_the_directions_of_the_gradient(kind: str) -> None:
    # Noise ten times the signal's bulk: without the subtraction the noise's own directions would win.
    rows, columns, geometry = 5, 6, geometries(5, 6)[kind]
    direction = basis(30, 9)[:, 0]
    draw = generator(2)

    def signal(step: int) -> Tensor:
        return (2.0 * torch.randn((), generator=draw) * direction).reshape(rows, columns)

    guidance = History("full", exponent=0.5, decay=0.9995)
    released = run(guidance, signal, 1.0, geometry, 4000)
    factor = guidance.geometry(released)["w"].flat
    assert isinstance(factor, Dense)
    top = factor.basis[:, factor.scales.argmax()]
    assert abs(float(top @ direction)) > 0.95
    assert factor.largest > 2.5 * float(factor.scales.sort().values[-2])
    assert float(factor.variance().mean()) == pytest.approx(1.0, rel=1e-4)


def test_subtraction_is_what_does_it() -> None:
    geometry = Geometry((5, 6), flat=Diagonal(torch.linspace(0.3, 3.0, 30)))
    guidance = History("diagonal", exponent=1.0, floor=0.1)
    released = run(guidance, lambda _: torch.zeros(5, 6), 1.0, geometry, 500)
    blind = History("diagonal", exponent=1.0, floor=0.1)
    draw = generator(77)
    for step in range(500):
        noise = geometry.colour(torch.randn(5, 6, generator=draw))
        blind.observe(Released(step, (Block("w", torch.zeros(5, 6), gradient=noise, geometry=geometry),), 0.0))
    moment, unmoved = guidance._moments["w"].mean(), blind._moments["w"].mean()
    variance = torch.linspace(0.3, 3.0, 30).square()
    assert float((moment / variance).mean().abs()) < 0.1
    assert float((unmoved / variance).mean()) == pytest.approx(1.0, abs=0.1)
    scales = blind.geometry(released)["w"].flat.scales  # type: ignore[union-attr]
    assert float(scales[-5:].mean()) > 5 * float(scales[:5].mean())  # blind, it mistakes its own noise for signal


@pytest.mark.parametrize("kind", ["dense", "leading"])
@pytest.mark.parametrize("features", ["rows", "columns"])
def test_large_blocks_get_a_factor_along_the_features(kind: str, features: Any) -> None:
    size, other, strong = 96, 40, 3
    shape = (size, other) if features == "rows" else (other, size)
    directions = basis(size, 3)[:, :strong]
    colour = LowRank(basis(size, 8)[:, :5], torch.full((5,), 2.0), 0.9)
    geometry = Geometry(shape, **{"left" if features == "rows" else "right": colour})
    draw = generator(4)

    def signal(step: int) -> Tensor:
        x = 1.5 * directions @ torch.randn(strong, other, generator=draw)
        return x if features == "rows" else x.T

    exact_up_to = 100 if kind == "dense" else 50
    guidance = History("full", exponent=0.5, exact_up_to=exact_up_to, max_full=1000, components=5)
    z = torch.randn(200, *shape, generator=generator(6))
    for step in range(200):
        gradient = signal(step) + geometry.colour(z[step])
        block = Block("w", torch.zeros(shape), features=features, gradient=gradient, geometry=geometry)
        released = Released(step, (block, Block("b", torch.zeros(shape[0]), shares="w")), 1.0)
        guidance.observe(released)
    assert isinstance(guidance._moments["w"], DenseMoment if kind == "dense" else LeadingMoment)
    found = guidance.geometry(released)
    factor = found["w"].left if features == "rows" else found["w"].right
    assert isinstance(factor, Dense if kind == "dense" else LowRank)
    leading = factor.basis[:, factor.scales.argsort(descending=True)[:strong]]
    assert float(torch.linalg.svdvals(leading.T @ directions).min()) > 0.98
    assert ("b" in found) == (features == "rows")
    if "b" in found:
        assert found["b"].left is factor
    values = guidance._moments["w"].spectrum("w").values.sort(descending=True).values
    torch.testing.assert_close(values[:strong], torch.full((strong,), 2.25).double(), rtol=0.2, atol=0.0)


def test_small_blocks_and_their_biases_have_their_own_covariance() -> None:
    blocks = (
        Block("w", torch.zeros(4, 5), gradient=torch.ones(4, 5)),
        Block("b", torch.zeros(4), shares="w", gradient=torch.ones(4)),
        Block("norm", torch.zeros(4), plain=True, gradient=torch.ones(4)),
        Block("idle", torch.zeros(4, 4)),
    )
    for kind in ("full", "diagonal"):
        guidance = History(kind)
        released = Released(1, blocks, 0.1)
        assert guidance.geometry(released) == {}  # nothing seen yet: isotropic
        guidance.observe(released)
        found = guidance.geometry(released)
        assert set(found) == {"w", "b"} and found["b"].flat is not None and found["w"].flat is not None


def test_all_noise_is_isotropic() -> None:
    guidance = History("full", decay=0.9)
    released = Released(0, (Block("w", torch.zeros(3, 3), gradient=torch.zeros(3, 3)),), 1.0)
    guidance.observe(released)
    factor = guidance.geometry(released)["w"].flat
    assert factor is not None and factor.smallest == pytest.approx(1.0) and factor.largest == pytest.approx(1.0)


def test_model_scope_weighs_every_coordinate_once() -> None:
    draw = generator(0)
    blocks = (
        Block("small", torch.zeros(6), gradient=0.1 * torch.randn(6, generator=draw)),
        Block("large", torch.zeros(40, 50), gradient=torch.randn(40, 50, generator=draw)),
    )
    released = Released(0, blocks, 1e-6)
    for kind in ("diagonal", "full"):
        guidance = History(kind, scope="model")
        guidance.observe(released)
        found = guidance.geometry(released)
        power = {}
        for name, geometry in found.items():
            unit = torch.eye(math.prod(geometry.shape)).reshape(-1, *geometry.shape)
            power[name] = float(geometry.colour(unit).square().sum())
        assert sum(power.values()) == pytest.approx(2006, rel=1e-4)
        assert power["small"] / 6 < 0.7 * power["large"] / 2000


def test_centring_takes_out_a_steady_gradient() -> None:
    steady = torch.tensor([5.0, 0.0, 0.0, 0.0])
    draw = generator(3)

    def signal(step: int) -> Tensor:
        return steady + torch.tensor([0.0, 1.0, 0.0, 0.0]) * torch.randn((), generator=draw)

    plain, centred = History(decay=0.999), History(decay=0.999, centred=True)
    for guidance in (plain, centred):
        run(guidance, signal, 0.5, None, 2000)
    assert float(plain._moments["w"].mean()[0]) == pytest.approx(25.0, rel=0.05)
    moments = centred._moments["w"].mean()
    torch.testing.assert_close(moments, torch.tensor([0.0, 1.0, 0.0, 0.0]), rtol=0.15, atol=0.05)


def test_echo_is_the_variance_left_in_the_mean() -> None:
    draw = generator(0)
    average = Average(0.9)
    for _ in range(7):
        average.add(torch.randn(200_000, generator=draw))
    assert float(average.mean().var()) == pytest.approx(average.echo(), rel=0.02)
    first = Average(0.9)
    first.add(torch.ones(1))
    assert float(first.mean()) == pytest.approx(1.0) and first.echo() == pytest.approx(1.0)


def test_presets() -> None:
    adaclip, geoclip = History.adaclip(), History.geoclip()
    assert (adaclip.kind, adaclip.exponent, adaclip.centred, adaclip.scope) == (
        "diagonal",
        0.25,
        True,
        "model",
    )
    assert (geoclip.kind, geoclip.exponent, geoclip.decay, geoclip.mean_decay) == ("full", 0.25, 0.999, 0.99)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
@pytest.mark.parametrize("shape", [(7,), (20, 30), (150, 20)])
def test_state_resumes_bitwise(kind: Any, shape: tuple[int, ...]) -> None:
    def make() -> History:
        return History(kind, centred=True, max_full=500, components=4)

    def feed(guidance: History, steps: range) -> Tensor:
        for step in steps:
            gradient = torch.randn(shape, generator=generator(step))
            released = Released(step, (Block("w", torch.zeros(shape), gradient=gradient),), 0.3)
            guidance.observe(released)
        return guidance.geometry(released)["w"].whiten(torch.ones(shape))

    straight, first, second = make(), make(), make()
    feed(first, range(5))
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(feed(straight, range(10)), feed(second, range(5, 10)))
    with pytest.raises(ValueError, match="decay"):
        History(kind, decay=0.5, centred=True, max_full=500, components=4).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    "wrong", [{"kind": "half"}, {"scope": "all"}, {"floor": 0.0}, {"decay": 1.0}, {"refresh_every": 0}]
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        History(**wrong)
