"""The standardised convolution's own layer rule: exact, in every geometry, and with room for rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero.geometry import Geometry, identity
from dphero.guidance import PCA
from dphero.layers import registry
from dphero.models import wide_resnet
from dphero.models.wide_resnet import Standardised, StandardisedConv2d
from dphero.pieces import Explicit
from tests.oracle import check, compare, guided, micro_batches, tapped, trained


def small() -> nn.Module:
    """A stem, a block with a shortcut and stride, one without, and a classifier, in few channels."""
    torch.manual_seed(0)
    model = nn.Sequential(
        StandardisedConv2d(2, 16, 3),
        wide_resnet._Block(16, 32, 2),
        wide_resnet._Block(32, 32, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    for parameter in model.parameters():  # none where it happens to start, so that nothing hides behind a one or zero
        nn.init.normal_(parameter, std=0.5)
    return model


def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, 2, 8, 8, dtype=dtype), torch.tensor([0, 1, 2, 0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("side", [None, "left", "right", "both"])
def test_gradients_are_those_of_micro_batches(side: str | None, dtype: torch.dtype) -> None:
    module = small().to(dtype)
    geometry: dict[str, Geometry] | None = None if side is None else guided(module, PCA(side=side))
    check(module, batch(dtype), loss, geometry, 1e-3 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("part", ["mean", "along", "scale"])
def test_the_comparison_sees_each_part_of_the_formula(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Standardised._undone

    def wrong(self: Standardised, gradients: Tensor) -> tuple[Tensor, Tensor]:
        found, taken = right(self, gradients)
        if part == "mean":
            found = found + gradients.mean((2, 3, 4), keepdim=True) / self.scale
        elif part == "along":
            found = found + (gradients * self.weight).sum((2, 3, 4), keepdim=True) * self.weight / self.scale
        else:
            found = found * self.scale
        return found, taken

    monkeypatch.setattr(Standardised, "_undone", wrong)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        check(small().double(), batch(torch.float64), loss, None, 1e-6)


def test_some_examples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formed in parts, and not kept for the sum: the same numbers."""
    module, inputs = small().double(), batch(torch.float64)
    expected = micro_batches(module, inputs, loss)
    monkeypatch.setattr(wide_resnet, "_CPU_BUFFER", 2 * 32 * 32 * 9)
    compare(expected, tapped(module, inputs, loss), None, 1e-9)
    plain = Standardised.__init__
    monkeypatch.setattr(Standardised, "__init__", lambda *args, keep: plain(*args, keep=False))
    compare(expected, tapped(module, inputs, loss), None, 1e-9)
    found = tapped(module, inputs, loss)
    assert found.pieces["1.conv1.weight"].instantiate().shape == (5, 32, 16, 3, 3)


@pytest.mark.filterwarnings("ignore:TF32")
def test_autocast() -> None:
    """Convolutions in bfloat16; standardising and its undoing stay in float32."""
    module, inputs = small(), batch()

    def short(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(module, x, y).float()

    expected = micro_batches(module, inputs, loss)
    # oneDNN's products of bfloat16 are broken on some virtual machines (AMX without permission): do without
    with torch.backends.mkldnn.flags(enabled=False):
        found = tapped(module, inputs, short)
    compare(expected, found, tolerance=0.15)
    assert found.square_norms["1.conv1.weight"].dtype == torch.float32


class Rounded(Explicit):
    """Gradients whose sum is off by a thousandth in each row, as a product in a shorter format may be."""

    rounding = 1e-3

    def weighted_sum(self, weights: Tensor) -> Tensor:
        exact = super().weighted_sum(weights)
        rows = exact.flatten(1)
        error = 1e-3 * rows.norm(dim=1, keepdim=True) * F.normalize(torch.randn_like(rows))
        return exact + error.view(exact.shape)


def test_norms_leave_room_where_nearly_everything_is_taken_away() -> None:
    """Of gradients along ŵ nothing remains but rounding, which is large beside nothing: the norms must cover it."""
    torch.manual_seed(0)
    weight, scale = wide_resnet._standardise(torch.randn(8, 4, 3, 3))
    gradients = torch.randn(6, 8, 1, 1, 1) * weight + torch.randn(6, 8, 1, 1, 1)
    piece = Standardised(Rounded(gradients), 6, weight, scale, keep=True)
    norms = piece.square_norms(identity(tuple(weight.shape))).sqrt()
    alone = torch.stack([piece.weighted_sum(one) for one in torch.eye(6)]).flatten(1).norm(dim=1)
    assert bool((alone > 1e-4 * gradients.flatten(1).norm(dim=1) / scale.max()).all())  # there is something to cover
    assert bool((alone <= norms).all())
    assert bool((norms <= 3e-3 * gradients.flatten(1).norm(dim=1) / scale.min()).all())  # and no more than that


def test_it_has_a_rule_of_its_own_and_normalises() -> None:
    layer = StandardisedConv2d(3, 4, 3)
    assert registry.find_rule(layer) is wide_resnet.standardised_convolution
    weight = wide_resnet._standardise(7 * layer.weight + 2)[0].flatten(1)
    assert torch.allclose(weight.mean(1), torch.zeros(4), atol=1e-6)
    assert torch.allclose(weight.norm(dim=1), torch.ones(4), atol=1e-3)
    assert trained(layer).keys() == {"weight"}
