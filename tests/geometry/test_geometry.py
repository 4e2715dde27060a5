"""Geometry: whiten inverts colour, the noise has the covariance claimed, nothing singular gets through."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dphero.geometry.dense import Dense
from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Digests, Geometry, factor_from_state, identity
from dphero.geometry.low_rank import LowRank
from dphero.numerics.precision import matmul_tf32

DTYPES = [torch.float32, torch.float64]
KINDS = ["Scalar", "Diagonal", "Dense", "LowRank"]
CLOSE = {torch.float32: 3e-4, torch.float64: 1e-10}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def basis(size: int, rank: int, seed: int, dtype: torch.dtype) -> Tensor:
    square = torch.randn(size, rank, generator=generator(seed), dtype=torch.float64)
    return torch.linalg.qr(square)[0].to(dtype)


def scales(size: int, seed: int, dtype: torch.dtype) -> Tensor:
    return (0.3 + 2.0 * torch.rand(size, generator=generator(seed + 1), dtype=torch.float64)).to(dtype)


def make(kind: str, size: int, seed: int, dtype: torch.dtype) -> Factor:
    if kind == "Scalar" or (kind == "LowRank" and size == 1):
        return Scalar(size, float(scales(1, seed, dtype)))
    if kind == "Diagonal":
        return Diagonal(scales(size, seed, dtype))
    if kind == "Dense":
        return Dense(basis(size, size, seed, dtype), scales(size, seed, dtype))
    rank = 1 + seed % (size - 1)
    return LowRank(basis(size, rank, seed, dtype), scales(rank, seed, dtype), 0.7)


def explicit(factor: Factor, dtype: torch.dtype) -> Tensor:
    """The matrix A, from the definition alone."""
    if isinstance(factor, Scalar):
        return factor.scale * torch.eye(factor.size, dtype=dtype)
    if isinstance(factor, Diagonal):
        return factor.scales.diag()
    if isinstance(factor, LowRank):
        middle = (factor.scales / factor.rest).diag() - torch.eye(len(factor.scales), dtype=factor.dtype)
        outer = factor.basis @ middle @ factor.basis.T
        return factor.rest * (torch.eye(factor.size, dtype=factor.dtype) + outer)
    assert isinstance(factor, Dense)
    return factor.basis @ factor.scales.diag() @ factor.basis.T


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator(seed + 2), dtype=torch.float64).to(dtype)


factors = {
    "kind": st.sampled_from(KINDS),
    "size": st.integers(1, 12),
    "seed": st.integers(0, 10_000),
    "dtype": st.sampled_from(DTYPES),
    "batch": st.lists(st.integers(0, 3), max_size=2),
}


@settings(max_examples=120, deadline=None)
@given(**factors)
def test_factor_is_its_definition_on_both_axes(
    kind: str, size: int, seed: int, dtype: torch.dtype, batch: list[int]
) -> None:
    factor, tolerance = make(kind, size, seed, dtype), CLOSE[dtype]
    matrix = explicit(factor, dtype).double()
    x = randn(*batch, size, seed=seed, dtype=dtype)
    rows = randn(*batch, size, 3, seed=seed, dtype=dtype)
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(factor.colour(x).double(), x.double() @ matrix, **close)
    torch.testing.assert_close(factor.colour(rows, -2).double(), matrix @ rows.double(), **close)
    torch.testing.assert_close(factor.whiten(factor.colour(x)), x, **close)
    torch.testing.assert_close(factor.colour(factor.whiten(rows, -2), -2), rows, **close)
    torch.testing.assert_close(factor.square_norm(x), factor.whiten(x).square().sum(-1), **close)
    torch.testing.assert_close(factor.square_norm(rows, -2), factor.whiten(rows, -2).square().sum(-2), **close)
    torch.testing.assert_close(factor.variance().double(), (matrix @ matrix.T).diag(), **close)
    singular = torch.linalg.svdvals(matrix)
    assert factor.smallest == pytest.approx(float(singular.min()), rel=tolerance)
    assert factor.largest == pytest.approx(float(singular.max()), rel=tolerance)
    assert factor.colour(x).dtype == dtype and factor.whiten(x).shape == x.shape


@settings(max_examples=40, deadline=None)
@given(kind=factors["kind"], size=factors["size"], seed=factors["seed"], c=st.floats(1e-3, 1e3))
def test_scaled_multiplies_the_operator(kind: str, size: int, seed: int, c: float) -> None:
    factor = make(kind, size, seed, torch.float64)
    torch.testing.assert_close(explicit(factor.scaled(c), torch.float64), c * explicit(factor, torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_rank_is_the_dense_factor_it_represents(dtype: torch.dtype) -> None:
    full, v = basis(20, 20, 3, dtype), scales(4, 3, dtype)
    low = LowRank(full[:, :4], v, 0.5)
    dense = Dense(full, torch.cat([v, torch.full((16,), 0.5, dtype=dtype)]))
    x = randn(7, 20, seed=3, dtype=dtype)
    for method in ("colour", "whiten", "square_norm"):
        ours, theirs = getattr(low, method)(x), getattr(dense, method)(x)
        torch.testing.assert_close(ours, theirs, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert low.smallest == pytest.approx(dense.smallest, rel=1e-6)


@pytest.mark.parametrize("ratio", [3.0, 1e2, 1e3, 1e5])
def test_low_rank_norm_is_right_where_subtraction_would_cancel(ratio: float) -> None:
    factor = LowRank(basis(64, 4, 0, torch.float32), torch.full((4,), ratio), 1.0)
    x = (factor.basis @ randn(4, 1, seed=0, dtype=factor.basis.dtype)).squeeze(1).float()  # inside the span
    matrix = explicit(factor, torch.float64).double()
    truth = torch.linalg.solve(matrix, x.double()).square().sum()
    assert float(factor.square_norm(x)) == pytest.approx(float(truth), rel=1e-3)


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("kind", ["Dense", "LowRank"])
def test_ill_conditioned_factors_still_invert(kind: str, condition: float) -> None:
    # In plain float32, 1e6 leaves nothing of the inverse: the norm clipped would not be the one priced.
    v = torch.logspace(0, -math.log10(condition), 32)
    factor: Factor
    if kind == "Dense":
        factor = Dense(basis(32, 32, 1, torch.float32), v)
    else:
        factor = LowRank(basis(32, 8, 1, torch.float32), v[::4].contiguous(), 1 / condition)
    x = randn(100, 32, seed=1, dtype=torch.float64)
    error = (factor.whiten(factor.colour(x)) - x).norm() / x.norm()
    assert error < 1e-4
    assert factor.dtype == (torch.float32 if condition == 1e2 else torch.float64)
    assert factor.to(dtype=torch.float32).dtype == factor.dtype


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_singular_factors_are_refused(bad: float) -> None:
    v = torch.tensor([1.0, bad, 2.0])
    u = basis(3, 3, 0, torch.float32)
    with pytest.raises(ValueError, match="floor"):
        Dense(u, v)
    with pytest.raises(ValueError, match="floor"):
        Diagonal(v)
    with pytest.raises(ValueError, match="floor"):
        Scalar(3, bad)
    with pytest.raises(ValueError, match="floor"):
        LowRank(u[:, :2], v[:2], 1.0)
    with pytest.raises(ValueError, match="floor"):
        LowRank(u[:, :1], v[:1], bad)
    with pytest.raises(ValueError, match="floor"):
        Scalar(3).scaled(bad)


def test_numerically_singular_and_skewed_bases_are_refused() -> None:
    u = basis(8, 8, 0, torch.float64)
    with pytest.raises(ValueError, match="condition number"):
        Dense(u, torch.logspace(0, -14, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="orthonormal"):
        Dense(2 * u, torch.ones(8))
    with pytest.raises(ValueError, match="orthonormal"):
        LowRank(randn(8, 2, seed=0, dtype=torch.float32), torch.ones(2), 1.0)
    with pytest.raises(ValueError, match="cannot act"):
        Dense(u, torch.ones(8)).colour(torch.ones(7))


@pytest.mark.parametrize("kind", ["Dense", "LowRank"])
def test_a_known_defect_is_believed_and_judged_like_a_measured_one(kind: str) -> None:
    u, v = (
        basis(8, 8 if kind == "Dense" else 3, 0, torch.float32),
        torch.tensor([1.0, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]),
    )

    def made(u: Tensor, condition: float, defect: float | None) -> Factor:
        scales = v * 10 / condition
        scales[0] = 1.0
        if kind == "Dense":
            return Dense(u, scales, defect=defect)
        return LowRank(u, scales[:3], 1 / condition, defect=defect)

    assert made(u, 10.0, None).dtype == made(u, 10.0, 1e-6).dtype == torch.float32
    limit = 300.0 if kind == "Dense" else 75.0  # taking a low-rank inverse loses more
    assert made(u, limit, None).dtype == made(u, limit, 2.4e-7).dtype == torch.float32
    assert made(u, limit, 1e-6).dtype == torch.float64  # orthonormalised anew
    for bad in (0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="orthonormal"):
            made(u, 10.0, bad)
    with pytest.raises(ValueError, match="orthonormal"):
        made(1.1 * u, 10.0, None)
    # What a checkpoint says is not believed.
    state = made(1.1 * u, 10.0, 1e-7).state()
    with pytest.raises(ValueError, match="orthonormal"):
        factor_from_state(state)
    with pytest.raises(ValueError, match="no 'defect'"):
        factor_from_state({**state, "defect": 1e-7})


SHAPES = st.sampled_from([(), (1,), (6,), (4, 5), (1, 3), (3, 1), (5, 2, 3, 1)])
SIDES = st.sampled_from(["none", "left", "right", "both", "flat"])


def build(shape: tuple[int, ...], side: str, kind: str, seed: int, dtype: torch.dtype) -> Geometry:
    rows, columns = (shape[0] if shape else 1), math.prod(shape[1:])
    if side == "flat":
        return Geometry(shape, flat=make(kind, rows * columns, seed, dtype))
    left = make(kind, rows, seed, dtype) if side in ("left", "both") else None
    right = make(kind, columns, seed + 1, dtype) if side in ("right", "both") and len(shape) > 1 else None
    return Geometry(shape, left, right)


@settings(max_examples=150, deadline=None)
@given(shape=SHAPES, side=SIDES, **{k: v for k, v in factors.items() if k != "size"})
def test_geometry_is_one_operator(
    shape: tuple[int, ...], side: str, kind: str, seed: int, dtype: torch.dtype, batch: list[int]
) -> None:
    geometry, size = build(shape, side, kind, seed, dtype), math.prod(shape)
    close: dict[str, Any] = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype]}
    x = randn(*batch, *shape, seed=seed, dtype=dtype)
    operator = geometry.colour(torch.eye(size, dtype=dtype).reshape(size, *shape)).reshape(size, size)
    torch.testing.assert_close(operator, operator.T, **close)
    coloured = geometry.colour(x)
    torch.testing.assert_close(coloured.reshape(-1), (x.reshape(*batch, size) @ operator).reshape(-1), **close)
    torch.testing.assert_close(geometry.whiten(coloured), x, **close)
    whitened = geometry.whiten(x).reshape(*batch, size)
    torch.testing.assert_close(geometry.square_norm(x), whitened.square().sum(-1), **close)
    assert geometry.smallest == pytest.approx(float(torch.linalg.svdvals(operator).min()), rel=CLOSE[dtype])
    assert geometry.is_identity == (geometry.left is geometry.right is geometry.flat is None)
    tripled = geometry.scaled(3.0)
    torch.testing.assert_close(tripled.colour(x), 3.0 * coloured, **close)
    assert tripled.smallest == pytest.approx(3.0 * geometry.smallest, rel=CLOSE[dtype])


def test_kronecker_acts_as_left_times_matrix_times_right() -> None:
    geometry = build((4, 2, 3), "both", "Dense", 5, torch.float64)
    assert isinstance(geometry.left, Dense) and isinstance(geometry.right, Dense)
    x = randn(4, 2, 3, seed=1, dtype=torch.float64)
    expected = geometry.left.matrix @ x.reshape(4, 6) @ geometry.right.matrix
    torch.testing.assert_close(geometry.colour(x), expected.reshape(4, 2, 3))


@pytest.mark.parametrize("side", ["left", "both", "flat"])
def test_coloured_noise_has_the_covariance_it_claims(side: str) -> None:
    shape, count = (4, 3), 40_000
    geometry = build(shape, side, "LowRank", 11, torch.float64)
    operator = geometry.colour(torch.eye(12, dtype=torch.float64).reshape(12, *shape)).reshape(12, 12)
    claimed = operator @ operator.T
    z = torch.randn(count, *shape, generator=generator(0), dtype=torch.float64)

    def deviation(noise: Tensor) -> float:
        flat = noise.reshape(count, 12)
        root = torch.linalg.cholesky(claimed)
        white = torch.linalg.solve_triangular(root, flat.T, upper=False)
        return float((white @ white.T / count - torch.eye(12)).abs().max())

    limit = 5 * math.sqrt(2 / count)
    assert deviation(geometry.colour(z)) < limit
    assert deviation(geometry.colour(z) * 1.05) > limit  # the test has power
    assert deviation(z) > limit


@pytest.mark.parametrize("side", ["none", "left", "right", "both", "flat"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_round_trip_is_bitwise(kind: str, side: str) -> None:
    geometry = build((6, 4), side, kind, 21, torch.float32)
    buffer = io.BytesIO()
    torch.save(geometry.state(), buffer)
    buffer.seek(0)
    again = Geometry.from_state(torch.load(buffer, weights_only=True))
    x = randn(5, 6, 4, seed=4, dtype=torch.float32)
    assert torch.equal(geometry.colour(x), again.colour(x))
    assert torch.equal(geometry.whiten(x), again.whiten(x))
    assert geometry.smallest == again.smallest and geometry.shape == again.shape


def test_state_of_a_widened_factor_is_bitwise_too() -> None:
    factor = Dense(basis(16, 16, 2, torch.float32), torch.logspace(0, -6, 16))
    again = factor_from_state(factor.state())
    assert isinstance(again, Dense) and torch.equal(factor.matrix, again.matrix)


def test_half_precision_tensors_are_computed_in_float32() -> None:
    factor = LowRank(basis(8, 2, 0, torch.float32), torch.tensor([2.0, 3.0]), 1.0)
    x = randn(4, 8, seed=0, dtype=torch.bfloat16)
    assert factor.colour(x).dtype == torch.bfloat16
    assert factor.square_norm(x).dtype == torch.float32 == identity((8,)).square_norm(x).dtype
    assert Dense(torch.eye(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)).dtype == torch.float32


def test_to_changes_precision() -> None:
    geometry = build((6, 4), "both", "LowRank", 21, torch.float32).to(dtype=torch.float64)
    assert geometry.left is not None and geometry.left.dtype == torch.float64
    assert identity((3,)).to("cpu", torch.float64).is_identity


def test_errors_name_the_shape() -> None:
    with pytest.raises(ValueError, match="size 4, not 3"):
        Geometry((4, 2), left=Scalar(3))
    with pytest.raises(ValueError, match="no columns"):
        Geometry((4,), right=Scalar(1))
    with pytest.raises(ValueError, match="not both"):
        Geometry((4, 2), left=Scalar(4), flat=Scalar(8))
    with pytest.raises(ValueError, match=r"\(4, 2\).*\(2, 4\)"):
        identity((4, 2)).whiten(torch.ones(2, 4))
    with pytest.raises(ValueError, match="unknown kind"):
        factor_from_state({"kind": "Cubic"})


@pytest.mark.parametrize("condition", [5, 25, 50, 100, 400])
def test_low_rank_norms_are_not_too_small_along_any_direction(condition: float) -> None:
    """Along a strong direction the norm is a small difference of large terms; one too small would pass unclipped."""
    random = torch.Generator().manual_seed(int(condition))
    scales = torch.linspace(1, condition, 16)
    for _ in range(10):
        basis = torch.linalg.qr(torch.randn(256, 16, generator=random, dtype=torch.float64))[0].float()
        found = LowRank(basis, scales, 1.0).square_norm(basis.T.contiguous()).double().sqrt() * scales.double()
        assert found.min() > 1 - 1e-5 and found.max() < 1.01


def test_factors_compute_in_full_precision_inside_a_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    @contextmanager
    def watched(x: torch.Tensor, *, allow: bool) -> Iterator[None]:
        asked.append(allow)
        yield

    for module in ("factor", "low_rank"):
        monkeypatch.setattr(f"dphero.geometry.{module}.matmul_tf32", watched)
    basis = torch.linalg.qr(torch.randn(8, 8))[0]
    for factor in (Dense(basis, torch.linspace(1, 2, 8)), LowRank(basis[:, :3], torch.tensor([2.0, 3.0, 4.0]), 1.0)):
        for call in (factor.whiten, factor.colour, factor.square_norm, factor.colour_):
            for axis, shape in ((-1, (5, 8)), (-2, (8, 5))):
                asked.clear()
                call(torch.randn(shape), axis)
                assert asked == [False]


@pytest.mark.gpu
def test_a_dense_factor_is_its_own_inverse_whatever_the_user_allows() -> None:
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(200, 200, dtype=torch.float64))[0].float().cuda()
    with matmul_tf32(basis, allow=True):
        factor = Dense(basis, torch.linspace(0.1, 3.0, 200))
        gap = factor.matrix.double() @ factor.inverse.double() - torch.eye(200, device="cuda", dtype=torch.float64)
    assert float(gap.abs().max()) < 1e-4


def test_digests_tell_geometries_apart_and_nothing_else() -> None:
    """A weight and its bias share a factor, of which one mark is made: that it is shared must not show."""
    left = Dense(basis(5, 5, 0, torch.float32), scales(5, 0, torch.float32))
    again = factor_from_state({**left.state(), "basis": left.basis.clone()})
    shared = Digests([Geometry((5, 3), left=left), Geometry((5,), left=left), identity((5, 3))]).found()
    apart = Digests([Geometry((5, 3), left=left), Geometry((5,), left=again), identity((5, 3))]).found()
    assert shared == apart and len(set(shared)) == 3
    others = [Geometry((5, 3), left=left.scaled(1.0000002)), Geometry((5, 3), right=Scalar(3, 2.0)), identity((3, 5))]
    assert not set(Digests(others).found()) & set(shared)
    late = Digests([Geometry((5, 3), left=left)])
    assert late.found() == late.found() == shared[:1]
