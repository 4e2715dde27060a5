"""Pieces against explicit per-example gradients, for random shapes, geometries and combinations."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dphero.geometry.dense import Dense
from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.factor import Factor, InnerProducts
from dphero.geometry.geometry import Geometry, identity
from dphero.geometry.low_rank import LowRank
from dphero.gradients import combine as combining
from dphero.gradients import outer as outers
from dphero.gradients.batch import GradientBatch
from dphero.gradients.combine import combine
from dphero.gradients.convolution import conv_piece
from dphero.gradients.outer import Bias, Outer
from dphero.gradients.patches import convolution_arguments
from dphero.gradients.piece import Explicit, Piece
from dphero.gradients.rows import Rows
from dphero.hooks.tape import Tape
from dphero.numerics.partial_norms import rank_one_norms

KINDS = ["outer", "rows", "explicit"]
seeds = st.integers(0, 10_000)
sizes = st.integers(1, 5)
lengths = st.sampled_from([1, 2, 3, 17])
factors = st.sampled_from([None, "scalar", "diagonal", "dense", "low_rank"])


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def factor(kind: str | None, size: int) -> Factor | None:
    scales = torch.rand(size, dtype=torch.float64) + 0.5
    if kind is None or (kind == "low_rank" and size < 2):
        return None
    if kind == "scalar":
        return Scalar(size, 1.7)
    if kind == "diagonal":
        return Diagonal(scales)
    basis = torch.linalg.qr(randn(size, size))[0]
    return Dense(basis, scales) if kind == "dense" else LowRank(basis[:, :1], scales[:1], 0.6)


geometries = st.one_of(
    st.tuples(factors, factors, st.none()), st.tuples(st.none(), st.none(), st.sampled_from(["diagonal", "dense"]))
)


def geometry(shape: torch.Size, kinds: tuple[str | None, str | None, str | None]) -> Geometry:
    rows, columns = shape[0], shape[1:].numel()
    left, right, flat = kinds
    return Geometry(
        tuple(shape),
        factor(left, rows),
        factor(right, columns) if len(shape) > 1 else None,
        factor(flat, rows * columns),
    )


def piece(kind: str, n: int, length: int, rows: int, columns: int) -> tuple[Piece, Tensor]:
    """A piece of the kind, and its gradients by definition."""
    right = randn(n, length, columns)
    if kind == "explicit":
        return Explicit(right[:, :1].expand(n, rows, columns)), right[:, :1].expand(n, rows, columns)
    if kind == "rows":
        index = torch.randint(0, rows, (n, length))
        one_hot = torch.nn.functional.one_hot(index, rows).double()
        return Rows(index, right, rows), torch.einsum("ntk,ntm->nkm", one_hot, right)
    left = randn(n, length, rows)
    return Outer(left, right), torch.einsum("ntk,ntm->nkm", left, right)


def agree(found: Piece, gradients: Tensor, shape: Geometry) -> None:
    """Compare every answer of a piece with the gradients; sums before norms, and after them."""
    n = len(gradients)
    weights = torch.rand(n, dtype=torch.float64)
    norms = shape.whiten(gradients).reshape(n, -1).square().sum(1)
    keep = torch.rand(n) > 0.4
    keep[0] = True
    assert found.shape == gradients.shape[1:]
    for part, mask in ((found, slice(None)), (found, slice(None)), (found.take(keep), keep)):
        torch.testing.assert_close(
            part.weighted_sum(weights[mask]), torch.einsum("n,n...->...", weights[mask], gradients[mask])
        )
        torch.testing.assert_close(part.square_norms(shape), norms[mask])
        torch.testing.assert_close(
            part.weighted_sum(weights[mask]), torch.einsum("n,n...->...", weights[mask], gradients[mask])
        )
    late = found.take(keep)  # after norms were taken
    torch.testing.assert_close(late.square_norms(shape), norms[keep])
    torch.testing.assert_close(found.instantiate(), gradients)


@settings(max_examples=60)
@given(st.sampled_from(KINDS), sizes, lengths, sizes, sizes, geometries, seeds)
def test_each_kind(kind: str, n: int, length: int, rows: int, columns: int, kinds: tuple, seed: int) -> None:
    torch.manual_seed(seed)
    found, gradients = piece(kind, n, length, rows, columns)
    agree(found, gradients, geometry(gradients.shape[1:], kinds))


@settings(max_examples=60)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4), sizes, lengths, sizes, sizes, geometries, seeds)
def test_combinations(names: list[str], n: int, length: int, rows: int, columns: int, kinds: tuple, seed: int) -> None:
    torch.manual_seed(seed)
    parts = [piece(kind, n, length, rows, columns) for kind in names]
    gradients = torch.stack([part[1] for part in parts]).sum(0)
    agree(combine([part[0] for part in parts]), gradients, geometry(gradients.shape[1:], kinds))


@settings(max_examples=40)
@given(st.sampled_from(KINDS), sizes, st.integers(1, 3), lengths, sizes, sizes, geometries, seeds)
def test_folds(kind: str, n: int, fold: int, length: int, rows: int, columns: int, kinds: tuple, seed: int) -> None:
    torch.manual_seed(seed)
    found, gradients = piece(kind, n * fold, length, rows, columns)
    gradients = gradients.reshape(n, fold, rows, columns).sum(1)
    agree(found.folded(fold), gradients, geometry(gradients.shape[1:], kinds))


@settings(max_examples=40)
@given(sizes, st.integers(1, 3), lengths, sizes, sizes, factors, st.booleans(), seeds)
def test_a_bias_beside_its_weight(
    n: int, fold: int, length: int, rows: int, columns: int, kind: str | None, weight_first: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    left, right = randn(n * fold, length, rows), randn(n * fold, length, columns)
    outer = Outer(left, right)
    bias = Bias(outer).folded(fold)
    shape = Geometry((rows,), factor(kind, rows))
    if weight_first:
        outer.square_norms(Geometry((rows, columns), shape.left))
    agree(bias, left.reshape(n, -1, rows).sum(1), shape)


@settings(max_examples=60)
@given(sizes, st.lists(st.tuples(sizes, sizes, factors, factors, st.booleans(), st.booleans()), min_size=1), seeds)
def test_layers_of_one_position_together(n: int, layers: list, seed: int) -> None:
    """Each norm is what it is alone, whatever stands beside it: weights, their biases, biases of frozen weights."""
    torch.manual_seed(seed)
    found, expected = {}, {}
    for number, (rows, columns, left, right, has_weight, shares) in enumerate(layers):
        outer, gradients = piece("outer", n, 1, rows, columns)
        assert isinstance(outer, Outer)
        shape = geometry(outer.shape, (left, right, None))
        beside = Geometry((rows,), shape.left if shares else factor(left, rows))
        if has_weight:
            found[f"{number}.weight"] = outer.lengths(shape)
            expected[f"{number}.weight"] = shape.whiten(gradients).flatten(1).square().sum(1)
        found[f"{number}.bias"] = Bias(outer).lengths(beside)
        expected[f"{number}.bias"] = beside.whiten(outer.left[:, 0]).square().sum(1)
    for name, norms in rank_one_norms(found).items():
        torch.testing.assert_close(norms, expected[name])


@pytest.mark.parametrize("kind", [Explicit, Outer])
def test_a_piece_with_norms_of_its_own_is_asked_for_them(kind: type) -> None:
    """A user's piece may allow for more than the kind that it is made from."""

    class Careful(kind):  # type: ignore[misc]
        def square_norms(self, geometry: Geometry) -> Tensor:
            return super().square_norms(geometry) + 9.0

    left, right = randn(4, 3), randn(4, 5)
    made = Careful(left, right) if kind is Outer else Careful(torch.einsum("nk,nm->nkm", left, right))
    found: list[GradientBatch] = []
    tape = Tape(4, {"w": identity((3, 5))}, found.append)
    tape.expect(["w"])
    tape.deliver("w", made)
    tape._finish()
    expected = left.square().sum(1) * right.square().sum(1) + 9.0
    torch.testing.assert_close(found[0].square_norms["w"], expected)


@settings(max_examples=40)
@given(sizes, st.integers(1, 2), st.integers(1, 3), st.integers(0, 1), st.integers(1, 2), geometries, seeds)
def test_convolutions(n: int, groups: int, kernel: int, padding: int, stride: int, kinds: tuple, seed: int) -> None:
    torch.manual_seed(seed)
    x = randn(n, 2 * groups, 6, 5).requires_grad_()
    weight = randn(3 * groups, 2, kernel, kernel).requires_grad_()
    out = torch.nn.functional.conv2d(x, weight, None, stride, padding, 1, groups)
    delta = torch.randn_like(out)
    per_example = [torch.autograd.grad(out[i], weight, delta[i], retain_graph=True)[0] for i in range(n)]
    arguments = convolution_arguments(weight.detach(), stride, padding, 1, groups)
    make: Callable[[], Piece] = lambda: conv_piece(x.detach(), delta, arguments)  # noqa: E731
    gradients = torch.stack(per_example)
    shape = geometry(gradients.shape[1:], kinds)
    weights = torch.rand(n, dtype=torch.float64)
    torch.testing.assert_close(make().weighted_sum(weights), torch.einsum("n,n...->...", weights, gradients))
    torch.testing.assert_close(make().instantiate(), gradients)
    found = make()
    torch.testing.assert_close(found.square_norms(shape), shape.whiten(gradients).flatten(1).square().sum(1))
    torch.testing.assert_close(found.weighted_sum(weights), torch.einsum("n,n...->...", weights, gradients))
    keep = torch.arange(n) % 2 == 0
    torch.testing.assert_close(
        found.take(keep).weighted_sum(weights[keep]), torch.einsum("n,n...->...", weights[keep], gradients[keep])
    )


def without_cross_terms(pieces: list[Piece]) -> Piece:
    """A wrong combination: the norm of a sum taken for the sum of the norms."""
    right = combine(pieces)

    class Wrong(Explicit):
        def square_norms(self, geometry: Geometry) -> Tensor:
            return torch.stack([piece.square_norms(geometry) for piece in pieces]).sum(0)

    return Wrong(right.instantiate())


@pytest.mark.parametrize(
    ("module", "attribute", "broken", "fold"),
    [
        (combining, "combine", without_cross_terms, 1),
        (outers, "join", lambda x, fold: x.unflatten(0, (fold, -1)).transpose(0, 1).flatten(1, 2), 2),
        (outers, "inner_products", lambda factor, x: InnerProducts(x), 1),
    ],
)
def test_these_tests_can_fail(
    module: ModuleType, attribute: str, broken: Callable, fold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, attribute, broken)
    torch.manual_seed(0)
    parts = [piece("outer", 6, 2, 20, 20) for _ in range(2)]
    gradients = (parts[0][1] + parts[1][1]).reshape(-1, fold, 20, 20).sum(1)
    found = combining.combine([part[0] for part in parts]).folded(fold)
    with pytest.raises(AssertionError):
        agree(found, gradients, geometry(gradients.shape[1:], ("dense", "diagonal", None)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kinds", [(None, None, None), ("dense", None, None), (None, None, "diagonal")])
def test_no_example_left(kind: str, kinds: tuple) -> None:
    """A physical batch in which every gradient is NaN: all are taken out."""
    found = piece(kind, 4, 3, 5, 6)[0].take(torch.zeros(4, dtype=torch.bool))
    assert torch.equal(found.weighted_sum(torch.zeros(0, dtype=torch.float64)), torch.zeros(5, 6, dtype=torch.float64))
    assert found.square_norms(geometry(found.shape, kinds)).shape == (0,)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
def test_a_parameter_on_both_sides_of_a_product_has_the_norm_of_its_gradient(scale: float) -> None:
    """softmax(h @ q.T) @ q: large activations stand beside tiny output gradients, but never multiply each other."""
    torch.manual_seed(0)
    n, positions, keys, width = 4, 8, 500, 64  # the Gram trick is the cheaper one
    inputs, weights = 30 * torch.randn(n, positions, width), torch.randn(n, positions, keys).softmax(-1)
    of_logits, of_output = scale * torch.randn(n, positions, keys), scale * torch.randn(n, positions, width)
    whole = combine([Outer(of_logits, inputs), Outer(weights, of_output)])
    truth = sum(
        torch.einsum("ntk,ntm->nkm", left.double(), right.double())
        for left, right in ((of_logits, inputs), (weights, of_output))
    )
    assert isinstance(truth, torch.Tensor)
    ratio = whole.square_norms(identity((keys, width))).double().sqrt() / truth.flatten(1).norm(dim=1)
    assert (ratio > 1 - 1e-6).all() and (ratio < 1.001).all()
