"""In every format, for the worst of inputs: no example adds more to a sum than the norm that it was clipped by."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dphero.geometry.dense import Dense
from dphero.geometry.diagonal import Diagonal
from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Geometry
from dphero.geometry.low_rank import LowRank
from dphero.gradients import combine as combining
from dphero.gradients import gram, patches
from dphero.gradients import outer as outers
from dphero.gradients.combine import combine
from dphero.gradients.convolution import Convolution, conv_piece
from dphero.gradients.outer import Bias, Outer
from dphero.gradients.patches import convolution_arguments
from dphero.gradients.piece import Explicit, Piece
from dphero.gradients.rows import Rows
from dphero.numerics.precision import matmul_tf32

N = 4
FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "_FEWEST", 8)


def plain(x: Tensor) -> Tensor:
    return x


def cancelling(x: Tensor) -> Tensor:
    """Positions in pairs that nearly cancel: what is left is far below the rounding of each."""
    half = x.shape[1] // 2
    x = x.clone()
    x[:, half : 2 * half] = -x[:, :half] * (1 + 2.0**-7)
    return x


def opposite(x: Tensor) -> Tensor:
    """Positions that cancel to nothing, in disorder: what is left is rounding alone, and depends on their order."""
    half = x.shape[1] // 2
    x = torch.cat([x[:, :half], -x[:, :half], 0 * x[:, 2 * half :]], 1)
    return x[:, torch.randperm(x.shape[1])]


def biased(x: Tensor) -> Tensor:
    """Positions of two sizes that largely cancel: all of one size are rounded alike, those of the other otherwise."""
    half = x.shape[1] // 2
    x = torch.ones_like(x)
    x[:, half : 2 * half] = -15 / 16
    return x


def dominated(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] *= 500
    return x


def empty(x: Tensor) -> Tensor:
    x = x.clone()
    x[1] = 0
    x[2, 1:] = 0
    return x


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": plain,
    "cancelling": cancelling,
    "opposite": opposite,
    "biased": biased,
    "dominated": dominated,
    "empty": empty,
    "tiny": lambda x: x * 1e-3,
    "huge": lambda x: x * 300,
}


def positions(kind: str, *shape: int) -> tuple[Tensor, Tensor]:
    """Left and right factors; where positions cancel, the right ones hardly differ."""
    n, length, k, m = shape
    left, right = torch.randn(n, length, k), torch.randn(n, length, m)
    if kind in ("cancelling", "opposite", "biased"):
        right = torch.randn(n, 1, m).expand(n, length, m) + 1e-2 * right * (kind == "cancelling")
    return INPUTS[kind](left), right.contiguous()


def outer(kind: str, dtype: torch.dtype, length: int, k: int, m: int) -> list[Piece]:
    left, right = (x.to(dtype) for x in positions(kind, N, length, k, m))
    weight = Outer(left, right)
    return [weight, Bias(weight)]


def mixed(kind: str, dtype: torch.dtype) -> list[Piece]:
    """An output gradient and an input of different formats."""
    left, right = positions(kind, N, 8, 40, 30)
    return [Outer(left.to(dtype), right)]


def rows(kind: str, dtype: torch.dtype) -> list[Piece]:
    return [Rows(torch.randint(0, 4, (N, 16)), positions(kind, N, 16, 30, 1)[0].to(dtype), 9)]


def tied(kind: str, dtype: torch.dtype) -> list[Piece]:
    """The rows take away what the products add."""
    left, right = (x.to(dtype) for x in positions(kind, N, 2, 9, 30))
    index = torch.tensor([0, 3]).expand(N, 2)
    left = torch.zeros_like(left).scatter_(2, index.unsqueeze(2), 1.0)
    return [combine([Rows(index, -right * (1 + 2.0**-7), 9), Outer(left, right)])]


def convolution(kind: str, dtype: torch.dtype, inner: int, outer: int, size: int) -> list[Piece]:
    delta = positions(kind, N, size * size, outer, 1)[0].mT.reshape(N, outer, size, size)
    padding = 0 if kind == "opposite" else 1  # where patches see an edge, they differ
    x = torch.randn(N, inner, *[size + 2 - 2 * padding] * 2)
    if kind in ("cancelling", "opposite", "biased"):
        x = torch.randn(N, inner, 1, 1).expand_as(x) + 1e-2 * x * (kind == "cancelling")
    arguments = convolution_arguments(torch.empty(outer, inner, 3, 3), 1, padding, 1, 1)
    return [conv_piece(x.to(dtype), delta.to(dtype), arguments)]


def formed_twice(kind: str, dtype: torch.dtype) -> list[Piece]:
    """A convolution whose gradients are formed for the norms and not kept, as on a GPU where they would take memory."""
    (piece,) = convolution(kind, dtype, 3, 5, 12)
    assert isinstance(piece, Convolution)
    piece.worth_keeping = lambda: False  # type: ignore[method-assign]
    return [piece]


def explicit(kind: str, dtype: torch.dtype) -> list[Piece]:
    return [Explicit(positions(kind, N, 5, 7, 1)[0].to(dtype))]


CASES: dict[str, Callable[[str, torch.dtype], list[Piece]]] = {
    "one position": lambda kind, dtype: outer(kind, dtype, 1, 12, 10),
    "positions by Gram": lambda kind, dtype: outer(kind, dtype, 16, 80, 60),
    "positions in blocks": lambda kind, dtype: outer(kind, dtype, 32, 80, 70),
    "positions formed": lambda kind, dtype: outer(kind, dtype, 32, 12, 10),
    "a wide output": lambda kind, dtype: outer(kind, dtype, 8, 90, 20),
    "two formats": mixed,
    "rows": rows,
    "tied": tied,
    "convolution by Gram": lambda kind, dtype: convolution(kind, dtype, 24, 24, 4),
    "convolution formed": lambda kind, dtype: convolution(kind, dtype, 3, 5, 12),
    "convolution formed twice": formed_twice,
    "explicit": explicit,
}


def factor(kind: str, size: int) -> Factor:
    if kind == "diagonal":
        return Diagonal(torch.rand(size) + 0.2)
    basis = torch.linalg.qr(torch.randn(size, size))[0]
    if kind == "dense":
        return Dense(basis, torch.linspace(0.3, 3.0, size))
    return LowRank(basis[:, :2], torch.tensor([4.0, 2.0] if kind == "strong" else [4.0, 0.2]), 0.7)


def shape_of(piece: Piece, kind: str) -> Geometry:
    if kind == "identity" or len(piece.shape) == 0:
        return Geometry(tuple(piece.shape))
    return Geometry(tuple(piece.shape), factor(kind, piece.shape[0]))


def excess(piece: Piece, geometry: Geometry) -> float:
    """By which factor an example adds more to the sum, in whitened space, than it was clipped to at most."""
    norms = piece.square_norms(geometry).double().sqrt() * (1 + piece.rounding)
    weights = torch.rand(N) * 0.9 + 0.1
    double = geometry.to(dtype=torch.float64)
    # what is left of everything where one example goes, less what rounds when all the others are added
    whole = piece.weighted_sum(weights).double()
    largest = 0.0
    for i in range(N):
        one = torch.zeros(N)
        one[i] = weights[i]
        alone = double.whiten(piece.weighted_sum(one).double()).norm()
        rest = double.whiten(whole - piece.weighted_sum(weights - one).double()).norm()
        rounds = 1e-5 * double.whiten(whole).norm() + 1e-4 * norms.max()
        most = norms[i] * weights[i] * (1 + 1e-5) + 1e-30
        largest = max(largest, float(alone / most), float((rest - rounds) / most))
    return largest


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("shape", ["identity", "strong", "weak", "dense"])
@pytest.mark.parametrize("case", CASES)
def test_no_example_adds_more_than_its_norm(case: str, shape: str, kind: str, dtype: str, short_products: None) -> None:
    torch.manual_seed(0)
    for piece in CASES[case](kind, FORMATS[dtype]):
        assert excess(piece, shape_of(piece, shape)) <= 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_no_example_adds_more_than_its_norm(case: str, tf32: bool) -> None:
    torch.set_default_device("cuda")
    try:
        with matmul_tf32(torch.empty(0), allow=tf32):  # whatever the user allows
            for shape, kind, dtype in itertools.product(("identity", "strong", "weak"), INPUTS, FORMATS.values()):
                torch.manual_seed(0)
                for piece in CASES[case](kind, dtype):
                    assert excess(piece, shape_of(piece, shape)) <= 1.0, (shape, kind, dtype)
    finally:
        torch.set_default_device("cpu")


@pytest.mark.parametrize("case", ["positions by Gram", "tied"])
def test_these_tests_can_fail(case: str, short_products: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight times a number, rounded to one number in bfloat16; weights that differ within one parameter."""
    torch.manual_seed(0)
    if case == "tied":
        monkeypatch.setattr(combining, "rounded_weights", lambda weights: weights)
    else:
        exact = outers.weighted_in_two
        monkeypatch.setattr(outers, "weighted_in_two", lambda x, w: (exact(x, w)[0], torch.zeros_like(x)))
    piece = CASES[case]("plain" if case == "tied" else "biased", torch.bfloat16)[0]
    assert excess(piece, shape_of(piece, "identity")) > 1.0


@pytest.mark.parametrize("size", [(11,), (9, 8), (5, 4, 6)])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2), (3, 1, 1)])
def test_a_sum_by_short_products_is_that_of_rounded_weights(
    size: tuple[int, ...],
    stride: int,
    padding: int,
    dilation: int,
    short_products: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patches, "_CPU_BUFFER", 1 << 9)  # some examples at a time
    torch.manual_seed(0)
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(size)]
    x, weight = torch.randn(7, 4, *size).bfloat16(), torch.randn(6, 4, *[3, 2, 2][: len(size)])
    out = convolve(x.float(), weight, None, stride, padding, dilation)
    delta, weights = torch.randn_like(out).bfloat16(), torch.rand(7)
    arguments = convolution_arguments(weight, stride, padding, dilation, 1)
    piece = conv_piece(x, delta, arguments)
    assert piece.rounding > 0
    rounded = weights.bfloat16().double()
    weight = weight.double().requires_grad_()
    out = convolve(x.double(), weight, None, stride, padding, dilation)
    (expected,) = torch.autograd.grad(out, weight, delta.double() * rounded.view(-1, *[1] * (out.dim() - 1)))
    torch.testing.assert_close(piece.weighted_sum(weights).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", ["identity", "strong", "dense"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "tied"])
def test_room_is_small_where_nothing_cancels(case: str, shape: str, dtype: str, short_products: None) -> None:
    for number in range(len(CASES[case]("plain", FORMATS[dtype]))):
        torch.manual_seed(0)
        formed = CASES[case]("plain", FORMATS[dtype])[number]
        geometry = shape_of(formed, shape)
        truth = geometry.whiten(formed.instantiate()).flatten(1).norm(dim=1)
        torch.manual_seed(0)
        norms = CASES[case]("plain", FORMATS[dtype])[number].square_norms(geometry).sqrt()
        assert bool((norms <= truth * 1.01).all())
