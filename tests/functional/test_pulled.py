"""Values that are computed from a parameter: sums pulled back at once, norms some examples at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphero.functional import pulled as module
from dphero.functional import unbatched
from dphero.functional.pulled import Pulled
from dphero.geometry.diagonal import Diagonal
from dphero.geometry.geometry import Geometry, identity
from dphero.gradients.convolution import conv_piece
from dphero.gradients.patches import convolution_arguments
from dphero.gradients.piece import Piece
from tests.oracle.micro_batches import Tapped, tapped
from tests.oracle.test_zoo import check, loss, make

NAMES = ["wide_resnet_with_standardised_weights", "weight_norm", "weight_norm_conv", "weight_norm_by_hook", "lora"]


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unbatched, "_LARGE", 0)
    monkeypatch.setattr(module, "_CPU_BUFFER", 500)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["isotropic", "left", "diagonal"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_micro_batches(name: str, kind: str, dtype: torch.dtype) -> None:
    check(name, dtype, kind)


def test_they_are_not_all_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make("wide_resnet_with_standardised_weights", torch.float32)
    found = tapped(model, batch, loss)
    assert any(isinstance(piece, Pulled) for piece in found.pieces.values())


class Short(nn.Module):
    """Its weight is computed in a shorter format."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            weight = self.left @ self.right
        return F.linear(x, weight.float())


def test_what_a_shorter_format_rounds_is_summed_as_it_is_measured() -> None:
    torch.manual_seed(0)
    found = tapped(Short(), (torch.randn(7, 5),), loss)
    for piece in found.pieces.values():
        assert not isinstance(piece, Pulled)


class Own(nn.Module):
    """A convolution of a standardised weight, by a user; or of one that couples rows, whose norms are pulled back."""

    def __init__(self, coupled: bool) -> None:
        super().__init__()
        self.weight, self.coupled = nn.Parameter(torch.randn(6, 2, 3, 3)), coupled

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(0 if self.coupled else (1, 2, 3), keepdim=True)
        return F.conv2d(x, weight).mean((2, 3))


@pytest.mark.parametrize("coupled", [False, True])
def test_norms_are_the_same_where_backward_is_called_under_autocast(coupled: bool) -> None:
    """Else products that norms are made of would be rounded to bfloat16."""
    torch.manual_seed(0)
    module, x = Own(coupled), torch.randn(5, 2, 8, 8)
    with Tapped(module, 5) as model:
        for enabled in (False, True):
            value = loss(module, x)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                value.backward()
    first, second = (found.square_norms["weight"] for found in model.found)
    assert torch.equal(first, second)


def standardised(weight: Tensor) -> Tensor:
    centred = weight - weight.mean((1, 2, 3), keepdim=True)
    return centred / centred.square().sum((1, 2, 3), keepdim=True).add(1e-5).sqrt()


def of_convolution(x: Tensor, delta: Tensor, leaf: Tensor) -> Piece:
    import contextlib

    value = standardised(leaf)
    inner = conv_piece(x, delta, convolution_arguments(leaf.detach(), 1, 0, 1, 1))
    return Pulled(value, leaf, inner, len(x), contextlib.nullcontext)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["radial", "constant", "mixed"])
def test_norms_are_never_too_small_where_nearly_nothing_is_left(kind: str, scaled: bool) -> None:
    """Of gradients along the weights, or all of one value, nothing remains but rounding."""
    torch.manual_seed(0)
    n, outer = 16, 5
    leaf = (torch.randn(1, 4, 3, 3).expand(outer, 4, 3, 3) + 0.1).clone().requires_grad_()
    weight = standardised(leaf).detach()
    x = torch.randn(n, 1, 1, 1) * torch.ones(4, 3, 3)
    if kind != "constant":
        x = x * (kind == "mixed") + torch.randn(n, 1, 1, 1) * weight[:1]
    x, delta = x + 1e-6 * torch.randn_like(x), torch.randn(n, outer, 1, 1)
    shape = tuple(leaf.shape)
    geometry = Geometry(shape, flat=Diagonal(torch.rand(leaf.numel()) + 0.5)) if scaled else identity(shape)
    found = of_convolution(x, delta, leaf)
    norms = found.square_norms(geometry).sqrt()
    added = torch.stack([geometry.whiten(found.weighted_sum(one)).norm() for one in torch.eye(n)])
    wide = leaf.detach().double().requires_grad_()
    exact = of_convolution(x.double(), delta.double(), wide).instantiate()
    true = torch.stack([geometry.to(dtype=torch.float64).whiten(each).norm() for each in exact])
    assert bool((added <= norms).all()) and bool((true <= norms).all())
    assert bool((norms <= true + 1e-4 * x.flatten(1).norm(dim=1) * delta.flatten(1).norm(dim=1) * 10).all())


def test_an_example_without_a_gradient_has_none() -> None:
    torch.manual_seed(0)
    leaf = torch.randn(5, 4, 3, 3).requires_grad_()
    x, delta = torch.randn(6, 4, 5, 5), torch.randn(6, 5, 3, 3)
    delta[2] = 0
    found = of_convolution(x, delta, leaf)
    assert found.square_norms(identity(tuple(leaf.shape)))[2] == 0
    keep = torch.arange(6) % 2 == 0
    part = found.take(keep)
    torch.testing.assert_close(part.instantiate(), found.instantiate()[keep])
    torch.testing.assert_close(part.weighted_sum(torch.ones(3)), found.weighted_sum(keep.float()))
