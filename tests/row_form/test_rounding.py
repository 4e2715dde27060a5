"""What rounding makes of norms by row form: never too small, whatever the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dphero.functional.pulled import Pulled
from dphero.geometry.geometry import identity
from dphero.gradients.outer import Outer
from dphero.gradients.piece import Explicit
from dphero.row_form.jacobian import _constants
from dphero.row_form.row_sums import RowSums
from tests.row_form.cases import MIXED, mixing, pieces

pytestmark = pytest.mark.usefixtures("in_parts")


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


STANDARDISED: dict[str, Callable[[Tensor], Tensor]] = {
    "deviations": lambda w: (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True),
    "expanded": lambda w: w / w.std(1, keepdim=True) - w.mean(1, keepdim=True) / w.std(1, keepdim=True),
    "normalised first": lambda w: F.normalize(F.normalize(w) - F.normalize(w).mean(1, keepdim=True)),
    "batch norm": lambda w: F.batch_norm(w[None], None, None, training=True, eps=1e-12)[0],
}


@pytest.mark.parametrize("shape", ["none", "dense", "right"])
@pytest.mark.parametrize("mean", [1e-2, 1.0, 100.0])
@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e5])
@pytest.mark.parametrize("name", STANDARDISED)
def test_rows_whose_mean_is_much_larger_than_their_deviation(name: str, ratio: float, mean: float, shape: str) -> None:
    """What standardises them loses many digits: sums are as good as those that are pulled back, and in their norms."""
    torch.manual_seed(0)
    geometry = identity((8, 36)) if shape == "none" else mixing(shape, (8, 36))
    leaf, inner = (mean * (1 + torch.randn(8, 36) / ratio)).requires_grad_(), pieces(2)["explicit"]
    inner = Explicit(inner.instantiate().flatten(2))

    def of(rows: RowSums | None) -> Pulled:
        return Pulled(STANDARDISED[name](leaf), leaf, inner, 6, contextlib.nullcontext, rows)

    found, pulled_back = of(RowSums(inner, 6, leaf)), of(None)
    norms = found.square_norms(geometry).sqrt()
    for piece in (found, pulled_back):
        shares = torch.stack([piece.weighted_sum(one) for one in torch.eye(6)])
        assert bool((geometry.whiten(shares).flatten(1).norm(dim=1) <= norms).all()) and bool(norms.isfinite().all())
    wide = leaf.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(STANDARDISED[name](wide), wide, inner.gradients.sum(0).double())
    off, usual = ((piece.weighted_sum(torch.ones(6)) - exact).norm() / exact.norm() for piece in (found, pulled_back))
    assert float(off) <= 2 * float(usual) + 1e-5
