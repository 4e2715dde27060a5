"""Jᵀ in closed form: no norm is too small where the form is wrong, and nothing is left out where it is right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dphero.functional.pulled import Pulled
from dphero.geometry.geometry import Geometry, identity
from dphero.gradients.batch import GradientBatch
from dphero.mechanism.clipping import Flat
from dphero.mechanism.lot_sum import LotSum
from dphero.row_form.products import RowFactors, norms_need_no_gradient, relative_rounding
from dphero.row_form.row_sums import RowSums
from tests.row_form.cases import MIXED, mixing, pieces

pytestmark = pytest.mark.usefixtures("in_parts")

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
            assert not bool(norms.isfinite().any())  # nobody trains with it


@pytest.mark.parametrize("name", ["flip", "means of columns"])
def test_with_a_form_that_is_wrong_nothing_is_added_up(name: str) -> None:
    """No numbers would be released otherwise, in place of the weights."""
    torch.manual_seed(1)
    leaf, inner = torch.randn(8, 36, requires_grad=True), pieces(2)["outer"]
    piece = Pulled(WRONG[name](leaf), leaf, inner, 6, contextlib.nullcontext, RowSums(inner, 6, leaf))
    lot = LotSum(Flat(1.0))
    for _ in range(2):
        lot.add(GradientBatch(6, {"w": piece}, {"w": piece.square_norms(identity((8, 36)))}), 6, 1.0)
    assert not lot.sums and lot.diagnostics.nonfinite == lot.diagnostics.examples == 12


def test_norms_of_some_examples_are_taken_as_their_sums_are() -> None:
    torch.manual_seed(1)
    leaf, inner = torch.randn(8, 36, requires_grad=True), pieces(2)["outer"]
    for function, finite in ((F.normalize, True), (WRONG["flip"], False)):
        piece = Pulled(function(leaf), leaf, inner, 6, contextlib.nullcontext, RowSums(inner, 6, leaf))
        whole, keep = piece.square_norms(identity((8, 36))), torch.arange(6) > 2
        norms = piece.take(keep).square_norms(identity((8, 36)))
        assert bool(norms.isfinite().all()) == finite
        torch.testing.assert_close(norms, whole[keep])


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
