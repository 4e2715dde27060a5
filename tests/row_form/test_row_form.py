"""Row form: found where a function has it, and only there; norms by it are those of micro-batches, never too small."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphero.functional import pulled, unbatched
from dphero.functional.pulled import Pulled
from dphero.geometry.dense import Dense
from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.geometry import Geometry, identity
from dphero.geometry.low_rank import LowRank
from dphero.gradients.convolution import conv_piece
from dphero.gradients.outer import Outer
from dphero.gradients.patches import convolution_arguments
from dphero.gradients.piece import Explicit, Piece
from dphero.row_form.jacobian import _constants
from dphero.row_form.norms import pulled_square_norms
from dphero.row_form.products import (
    RowFactors,
    norms_need_no_gradient,
    relative_rounding,
)
from dphero.row_form.row_sums import RowSums
from tests.oracle.micro_batches import micro_batches, tapped
from tests.oracle.test_zoo import loss

Function = Callable[[Tensor, Tensor], Tensor]
"""From a weight of shape (8, 8, 3, 3), or (8, 8), and numbers of shape (8, 1, …)."""
AXES = (1, 2, 3)


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unbatched, "_LARGE", 0)
    monkeypatch.setattr(pulled, "_CPU_BUFFER", 2000)


def by_variance(w: Tensor, g: Tensor) -> Tensor:
    scale = torch.rsqrt(w.var(dim=AXES, keepdim=True, unbiased=False) * w[0].numel() + 1e-5)
    return (w - w.mean(dim=AXES, keepdim=True)) * scale


def by_var_mean(w: Tensor, g: Tensor) -> Tensor:
    variance, mean = torch.var_mean(w, dim=AXES, keepdim=True)
    return (w - mean) / (variance + 1e-4).sqrt() * g


def as_in_timm(w: Tensor, g: Tensor) -> Tensor:
    flat = F.batch_norm(w.reshape(1, 8, -1), None, None, weight=(g * 0.3).view(-1), training=True, momentum=0.0)
    return flat.reshape_as(w)


def length(w: Tensor) -> Tensor:
    return torch.linalg.vector_norm(w, dim=AXES, keepdim=True)


def in_place(w: Tensor, g: Tensor) -> Tensor:
    out = 2 * w
    flat = out.view(-1)
    flat.mul_(torch.arange(float(w.numel())).cos())
    return out


KEPT: dict[str, Function] = {
    "by variance": by_variance,
    "by var_mean": by_var_mean,
    "as in timm": as_in_timm,
    "by squares": lambda w, g: w * (w.pow(2).mean(AXES, keepdim=True) + 1e-3).rsqrt() * g.exp(),
    "flat": lambda w, g: ((w.flatten(1) - w.flatten(1).mean(1)[:, None]) / w.flatten(1).std(1)[:, None]).view_as(w),
    "normalised": lambda w, g: F.normalize(w.flatten(1), dim=1).reshape(w.shape),
    "weight norm": lambda w, g: torch._weight_norm(w, g, 0),
    "centred": lambda w, g: w - w.mean(AXES, keepdim=True).expand_as(w),
    "clipped norm": lambda w, g: w * (2.0 / length(w)).clamp(max=1.0),
    "a detached norm": lambda w, g: g * w / w.detach().norm(),
    "a constant mean": lambda w, g: -(1 - w / 3) * torch.arange(1.0, 9.0).view(8, 1, 1, 1).to(w),
}
LEFT: dict[str, Function] = {
    "exp": lambda w, g: w.exp() * 0.1,
    "softmax": lambda w, g: w.flatten(1).softmax(1).view_as(w) * g,
    "coupled rows": lambda w, g: (w.flatten(1) @ w.flatten(1).T @ w.flatten(1)).view_as(w) * 0.1,
    "a global mean": lambda w, g: w - w.mean(),
    "a mask": lambda w, g: w * (torch.arange(w.numel()).view(w.shape) % 3 > 0).to(w),
    "a detached copy": lambda w, g: (w + w.detach().cos()) / length(w + w.detach().cos()),
    "clamped": lambda w, g: w.clamp(-0.3, 0.3),
    "absolute mean": lambda w, g: w / w.abs().mean(AXES, keepdim=True),
    "another norm": lambda w, g: w / torch.linalg.vector_norm(w, 1, dim=AXES, keepdim=True),
    "columns": lambda w, g: w - w.mean((0, 2, 3), keepdim=True),
    "columns without axis": lambda w, g: w - w.mean((0, 2, 3)).view(8, 1, 1, 1),
    "turned": lambda w, g: w.transpose(0, 1) * g,
    "flipped in the row": lambda w, g: w + length(w.flip(3)) * w.flip(2),
    "cubes": lambda w, g: w.square() * w,
    "rows among each other": lambda w, g: w * length(w[[1, 0, 3, 2, 5, 4, 7, 6]]),
    "a constant of another kind": lambda w, g: w * torch.linspace(0.5, 1, 8).to(w).view(1, 8, 1, 1),
    "in place": in_place,
    "rounded": lambda w, g: torch.div(w, 0.01 + g * g, rounding_mode="trunc") * 0 + w * w.cos(),
}


class Own(nn.Module):
    def __init__(self, function: Function, positions: int) -> None:
        super().__init__()
        self.function, self.positions = function, positions
        self.weight = nn.Parameter(torch.randn(8, 8, 3, 3) * 0.2 + 0.05)
        self.gain = nn.Parameter(torch.rand(8, 1, 1, 1) + 0.5)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = F.conv2d(x, self.function(self.weight, self.gain), padding=1)
        return self.last(out.tanh().mean((2, 3)))


MIXED = ["low rank", "strong", "dense", "right", "both", "flat"]


def mixing(kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Geometry:
    """Return a geometry whose inverse does more than to scale rows."""
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    draw = torch.Generator().manual_seed(3)

    def basis(size: int) -> Tensor:
        return torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))[0]

    dense = Dense(basis(rows), torch.rand(rows, generator=draw) + 0.2)
    if kind == "low rank":
        made = Geometry(shape, left=LowRank(basis(rows)[:, :3], torch.tensor([3.0, 0.5, 2.0]), 1.0))
    elif kind == "strong":
        made = Geometry(shape, left=LowRank(basis(rows)[:, :3], torch.tensor([300.0, 20.0, 2.0]), 0.5))
    elif kind == "dense":
        made = Geometry(shape, left=dense)
    elif kind == "flat":
        made = Geometry(shape, flat=Diagonal(torch.rand(rows * columns, generator=draw) + 0.2))
    else:
        right = LowRank(basis(columns)[:, :4], torch.tensor([3.0, 0.5, 2.0, 7.0]), 1.0)
        made = Geometry(shape, left=dense if kind == "both" else None, right=right)
    return made.to(dtype=dtype)


class Calls:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = pulled_square_norms

        def counted(*args: object) -> Tensor:
            self.count += 1
            return original(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(pulled, "pulled_square_norms", counted)


def compare(model: nn.Module, x: Tensor, geometry: Geometry | None = None) -> None:
    shapes = {} if geometry is None else {"weight": geometry}
    expected = micro_batches(model, (x,), loss)
    found = tapped(model, (x,), loss, shapes)
    assert set(expected) >= set(found.pieces)
    largest = max(float(each.flatten(1).norm(dim=1).amax()) for each in expected.values()) / len(x)
    tolerance, room = (1e-9, 1e-9) if x.dtype == torch.float64 else (2e-3, 1e-4)
    for name, norms in found.square_norms.items():
        one = shapes.get(name, identity(tuple(expected[name].shape[1:])))
        # the tapped loss is a mean over all examples
        true = torch.stack([one.square_norm(each / len(x)) for each in expected[name]]).sqrt()
        size = float(true.amax()) + 1e-12
        assert bool((norms.sqrt() >= true * (1 - 1e-5) - 1e-7 * size).all()), name
        assert bool((norms.sqrt() <= true * (1 + tolerance) + room * largest).all()), name
        weights = torch.arange(1.0, len(x) + 1, dtype=norms.dtype).cos()
        total = torch.einsum("n,n...->...", weights, expected[name] / len(x))
        torch.testing.assert_close(found.pieces[name].weighted_sum(weights), total, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("size", [2, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KEPT)
def test_norms_by_row_form(name: str, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At few positions (Gram) and at many (formed)."""
    torch.manual_seed(0)
    calls = Calls(monkeypatch)
    compare(Own(KEPT[name], size).to(dtype), torch.randn(5, 8, size, size, dtype=dtype))
    assert calls.count >= 1


@pytest.mark.parametrize("size", [2, 12])
@pytest.mark.parametrize("name", ["as in timm", "by squares"])
@pytest.mark.parametrize("factor", [Scalar(8, 3.0), Diagonal(torch.arange(1.0, 9.0))], ids=["scalar", "diagonal"])
def test_scales_of_rows(factor: Diagonal | Scalar, name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    calls = Calls(monkeypatch)
    compare(Own(KEPT[name], size), torch.randn(5, 8, size, size), Geometry((8, 8, 3, 3), left=factor))
    assert calls.count >= 2


@pytest.mark.parametrize("size", [2, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["as in timm", "by squares", "weight norm", "centred"])
@pytest.mark.parametrize("kind", MIXED)
def test_geometries_that_mix_what_is_in_rows(
    kind: str, name: str, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    calls = Calls(monkeypatch)
    compare(
        Own(KEPT[name], size).to(dtype), torch.randn(5, 8, size, size, dtype=dtype), mixing(kind, (8, 8, 3, 3), dtype)
    )
    assert calls.count >= 1


@pytest.mark.parametrize("kind", ["low rank", "dense", "flat"])
@pytest.mark.parametrize("size", [2, 12])
def test_gains_whose_noise_has_a_shape(size: int, kind: str) -> None:
    torch.manual_seed(0)
    model, x = Own(KEPT["weight norm"], size), torch.randn(5, 8, size, size)
    geometry = mixing(kind, (8, 1, 1, 1))
    expected = micro_batches(model, (x,), loss)["gain"] / len(x)
    norms = tapped(model, (x,), loss, {"gain": geometry}).square_norms["gain"].sqrt()
    true = torch.stack([geometry.square_norm(each) for each in expected]).sqrt()
    assert bool((norms >= true * (1 - 1e-5)).all())
    torch.testing.assert_close(norms, true, rtol=1e-3, atol=1e-4 * float(true.amax()))


@pytest.mark.parametrize("name", LEFT)
def test_other_functions_are_pulled_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    calls = Calls(monkeypatch)
    compare(Own(LEFT[name], 4), torch.randn(5, 8, 4, 4))
    assert calls.count == 0


SQUARE: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "rows": (True, lambda w: w / w.norm(dim=1, keepdim=True)),
    "normalised": (True, lambda w: F.normalize(w, dim=1)),
    "columns": (False, lambda w: w / w.norm(dim=0, keepdim=True)),
    "normalised columns": (False, lambda w: F.normalize(w, dim=0)),
    "columns by broadcasting": (False, lambda w: w / w.norm(dim=1)),
    "columns, then rows": (False, lambda w: w / w.norm(dim=0)[:, None]),
    "turned": (False, lambda w: (w / w.norm(dim=1, keepdim=True)).T),
    "chosen rows": (False, lambda w: (w / w.norm(dim=1, keepdim=True))[torch.arange(16).flip(0)]),
    "twice": (True, lambda w: F.normalize(w / w.norm(dim=1, keepdim=True) + 0.1 * w.mean(1, keepdim=True))),
    "each with all": (False, lambda w: (w[:, :, None] * w.flip(1)[:, None, :]).sum(2)),
    "low rank": (False, lambda w: w[:, :4] @ w[:4] + w),
}


class Square(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.function(self.weight)).tanh()


@pytest.mark.parametrize("shape", [(5, 16), (5, 3, 16), (5, 20, 16)], ids=["one", "few", "many"])
@pytest.mark.parametrize("name", SQUARE)
def test_square_matrices(name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where shapes do not tell rows from columns."""
    torch.manual_seed(0)
    calls = Calls(monkeypatch)
    kept, function = SQUARE[name]
    compare(Square(function), torch.randn(shape))
    assert bool(calls.count) == kept


def pieces(positions: int) -> dict[str, Piece]:
    torch.manual_seed(1)
    x, delta = torch.randn(6, 4, positions, positions), torch.randn(6, 8, positions, positions)
    weight = torch.empty(8, 4, 3, 3)
    convolution = conv_piece(x, delta, convolution_arguments(weight, 1, 1, 1, 1))
    outer = Outer(torch.randn(6, positions, 8), torch.randn(6, positions, 36))
    explicit = Explicit(torch.randn(6, 8, 4, 3, 3))
    return {"convolution": convolution, "outer": outer, "explicit": explicit}


OTHERS = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda w: w.exp(),
    "tanh": lambda w: w.tanh(),
    "flip": lambda w: w.flip(1),
    "one mean for all": lambda w: w - w.mean(),
    "one length for all": lambda w: w / w.norm(),
    "means of columns": lambda w: w - w.mean(0),
    "other rows": lambda w: w + 1e-3 * w[OTHERS],
    "lengths of other rows": lambda w: w * w.norm(dim=1, keepdim=True)[OTHERS],
    "half a mean": lambda w: w - w[:, :18].mean(1, keepdim=True),
    "absolute numbers": lambda w: w / w.abs().mean(1, keepdim=True),
}


@pytest.mark.parametrize("positions", [1, 2, 12])
@pytest.mark.parametrize("kind", ["convolution", "outer", "explicit"])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("alike", [False, True])
def test_a_form_that_is_wrong_makes_no_norm_too_small(alike: bool, name: str, kind: str, positions: int) -> None:
    torch.manual_seed(1)
    leaf = torch.randn(1, 36).expand(8, 36) + 0.1 if alike else torch.randn(8, 36)
    leaf = leaf.clone().requires_grad_()
    inner = pieces(positions)[kind]
    value = WRONG[name](leaf.view(8, 36)).view(inner.shape)
    true = Pulled(value, leaf, pieces(positions)[kind], 6, contextlib.nullcontext).instantiate()
    for geometry in [identity((8, 36)), *(mixing(kind, (8, 36)) for kind in MIXED)]:
        found = Pulled(value, leaf, inner, 6, contextlib.nullcontext, RowSums(inner, 6, leaf))
        norms = found.square_norms(geometry).sqrt()
        assert bool((norms >= geometry.whiten(true).flatten(1).norm(dim=1)).all())
    if name != "other rows":
        assert bool(found.weighted_sum(torch.ones(6)).isnan().all())  # nobody trains with it


@pytest.mark.parametrize("positions", [1, 12])
@pytest.mark.parametrize(
    "geometry", [identity((8, 36)), *(mixing(kind, (8, 36)) for kind in MIXED)], ids=["identity", *MIXED]
)
def test_a_broken_form_shows(geometry: Geometry, positions: int) -> None:
    """These tests can fail: s, B and E are all needed, in each kind of geometry."""
    torch.manual_seed(0)
    leaf = torch.randn(8, 36, requires_grad=True)
    inner = pieces(positions)["outer"]
    found = Pulled(F.normalize(leaf), leaf, inner, 6, contextlib.nullcontext, RowSums(inner, 6, leaf))
    true = geometry.whiten(found.instantiate()).flatten(1).norm(dim=1)

    def off() -> float:
        return float((found.square_norms(geometry).sqrt() / true - 1).abs().amax())

    assert off() < 2e-3
    right = found._map
    assert right is not None and right.block is not None
    shorter = right.block.clone()
    shorter[:, 2, 2] *= 0.99
    whole = right.block.clone()
    whole[:, :2, :2] = right.block[:, 2:, 2:] * torch.eye(2)
    for broken in (
        right._replace(block=shorter, along=right.along * 0.99),
        right._replace(block=whole, along=torch.zeros_like(right.along)),
    ):
        found._map = broken
        assert off() > 5e-3


@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("kind", ["convolution", "outer"])
def test_what_is_taken_from_factors(kind: str, positions: int) -> None:
    piece = pieces(positions)[kind]
    assert norms_need_no_gradient(piece)
    gradients = pieces(positions)[kind].instantiate().flatten(2).double()
    vectors, scales = torch.randn(8, 36), torch.rand(8)
    factors = RowFactors(piece, vectors)
    along = torch.stack([gradients.sum(2) / 6, (gradients * vectors).sum(2)], 2).transpose(0, 1)
    torch.testing.assert_close(factors.products()[0].double(), along, rtol=1e-4, atol=1e-4)
    scaled = gradients * scales[:, None]
    squares = factors.square_norms(factors.scaled(scales)).double()
    torch.testing.assert_close(squares, scaled.square().sum((1, 2)), rtol=1e-3, atol=1e-4)
    assert bool((factors.lengths(torch.ones(8)) * (1 + 1e-5) >= gradients.flatten(1).norm(dim=1)).all())
    assert bool((factors.lengths(scales) * (1 + 1e-5) >= scaled.flatten(1).norm(dim=1)).all())
    assert 0 < relative_rounding(piece) < 1e-4


@pytest.mark.parametrize("constant", [0.0, 0.7, 1e-20])
def test_rows_without_a_direction(constant: float) -> None:
    """Rows of one number each: only means can be taken out of them."""
    torch.manual_seed(0)
    leaf = torch.full((8, 4, 3, 3), constant, requires_grad=True)
    value = 2 * (leaf - leaf.mean((1, 2, 3), keepdim=True))
    inner = pieces(2)["convolution"]
    found = Pulled(value, leaf, inner, 6, contextlib.nullcontext, RowSums(inner, 6, leaf))
    norms = found.square_norms(identity((8, 4, 3, 3))).sqrt()
    true = found.instantiate().flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, true, rtol=1e-3, atol=0)
    assert bool((norms >= true * (1 - 1e-6)).all())


@pytest.mark.parametrize("near", [0.0, 1e-12, 1e-7, 1e-3])
@pytest.mark.parametrize("kind", ["dense", "none"])
def test_weights_like_the_numbers_that_they_are_examined_with(kind: str, near: float) -> None:
    """Nothing that is at right angles to the weights is left of these; what is found must not be nothing."""
    torch.manual_seed(0)
    shape = torch.Size((8, 36))
    leaf = (3 * _constants(torch.empty(shape)).scattered + near * torch.randn(shape) + 0.1).requires_grad_()
    geometry = identity(shape) if kind == "none" else mixing(kind, shape)
    for inner in pieces(2).values():
        value = F.normalize(leaf).view(inner.shape)
        found = Pulled(value, leaf, inner, 6, contextlib.nullcontext, RowSums(inner, 6, leaf))
        norms, true = found.square_norms(geometry).sqrt(), geometry.whiten(found.instantiate())
        assert bool(((norms >= true.flatten(1).norm(dim=1)) | norms.isnan()).all())


def test_what_is_not_finite_stays_so() -> None:
    torch.manual_seed(0)
    leaf = torch.randn(8, 36, requires_grad=True)
    gradients = torch.randn(4, 8, 36)
    gradients[1, 2, 3], gradients[2, 0, 0], gradients[3] = torch.inf, torch.nan, 1e30
    inner = Explicit(gradients)
    found = Pulled(F.normalize(leaf), leaf, inner, 4, contextlib.nullcontext, RowSums(inner, 4, leaf))
    assert found.square_norms(identity((8, 36))).isfinite().tolist() == [True, False, False, False]


@pytest.mark.parametrize("shape", ["none", *MIXED])
@pytest.mark.parametrize("positions", [1, 12])
@pytest.mark.parametrize("kind", ["radial", "constant", "mixed"])
def test_norms_are_never_too_small_where_nearly_nothing_is_left(kind: str, positions: int, shape: str) -> None:
    """Of gradients along the weights, or all of one value, nothing remains but rounding."""
    torch.manual_seed(0)
    n, rows = 16, 8
    geometry = identity((rows, 36)) if shape == "none" else mixing(shape, (rows, 36))
    leaf = (torch.randn(1, 36).expand(rows, 36) + 0.1).clone().requires_grad_()
    weight = F.normalize((leaf - leaf.mean(1, keepdim=True)).detach(), dim=1)
    right = torch.randn(n, positions, 1) * torch.ones(36)
    if kind != "constant":
        right = right * (kind == "mixed") + torch.randn(n, positions, 1) * weight[:1]
    right, left = right + 1e-6 * torch.randn_like(right), torch.randn(n, positions, rows)

    def of(leaf: Tensor, *, by_rows: bool) -> Pulled:
        centred = leaf - leaf.mean(1, keepdim=True)
        inner = Outer(left.to(leaf.dtype), right.to(leaf.dtype))
        sums = RowSums(inner, n, leaf) if by_rows else None
        return Pulled(centred / centred.norm(dim=1, keepdim=True), leaf, inner, n, contextlib.nullcontext, sums)

    found = of(leaf, by_rows=True)
    pulled_back = torch.stack([of(leaf, by_rows=True).weighted_sum(one) for one in torch.eye(n)])
    norms = found.square_norms(geometry).sqrt()
    in_closed_form = torch.stack([found.weighted_sum(one) for one in torch.eye(n)])
    for sums in (pulled_back, in_closed_form):
        assert bool((geometry.whiten(sums).flatten(1).norm(dim=1) <= norms).all())
    exact = of(leaf.detach().double().requires_grad_(), by_rows=False).instantiate()
    true = geometry.to(dtype=torch.float64).whiten(exact).flatten(1).norm(dim=1)
    assert bool((true <= norms).all())
    loose = 0.02 * right.flatten(1).norm(dim=1) * left.flatten(1).norm(dim=1) / geometry.smallest
    assert bool((norms <= true + loose).all())


@pytest.mark.parametrize("shape", ["none", *MIXED])
@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_rows_of_very_different_sizes(scale: float, shape: str) -> None:
    """In weights, in gradients, and in what the function makes of them."""
    torch.manual_seed(0)
    geometry = identity((8, 36)) if shape == "none" else mixing(shape, (8, 36))
    spread = torch.logspace(-3, 3, 8).view(8, 1)
    leaf = (torch.randn(8, 36) * spread).requires_grad_()
    for positions in (1, 3):
        left, right = torch.randn(6, positions, 8) * spread.flip(0).view(8) * scale, torch.randn(6, positions, 36)

        def of(leaf: Tensor, left: Tensor, right: Tensor, *, by_rows: bool) -> Pulled:
            inner = Outer(left.to(leaf.dtype), right.to(leaf.dtype))
            value = leaf * (leaf.square().mean(1, keepdim=True) + 1e-8).rsqrt() + leaf.mean(1, keepdim=True)
            sums = RowSums(inner, 6, leaf) if by_rows else None
            return Pulled(value, leaf, inner, 6, contextlib.nullcontext, sums)

        norms = of(leaf, left, right, by_rows=True).square_norms(geometry).sqrt().double()
        exact = of(leaf.detach().double().requires_grad_(), left, right, by_rows=False).instantiate()
        true = geometry.to(dtype=torch.float64).whiten(exact).flatten(1).norm(dim=1)
        assert bool((norms >= true).all()) and bool((norms <= true * 1.05).all())
