"""The standardised convolution's own layer rule: exact, in every geometry, and with room for rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from dphero.geometry.dense import Dense
from dphero.geometry.geometry import Geometry, identity
from dphero.gradients.convolution import Convolution
from dphero.gradients.patches import convolution_arguments
from dphero.guidance import PCA
from dphero.layers import registry
from dphero.models import wide_resnet
from dphero.models.wide_resnet import Standardised, StandardisedConv2d
from tests.oracle.micro_batches import check, compare, guided, micro_batches, tapped, trained


def small(order: str = "norm-relu-conv") -> nn.Module:
    """A stem, a block with a shortcut and stride, one without, and a classifier, in few channels."""
    torch.manual_seed(0)
    block = wide_resnet._NormFirst if order == "norm-relu-conv" else wide_resnet._ReLUFirst
    model = nn.Sequential(
        StandardisedConv2d(2, 16, 3),
        block(16, 32, 2),
        block(32, 32, 1),
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


@pytest.mark.parametrize("order", ["norm-relu-conv", "relu-norm-conv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("side", [None, "left", "right", "both"])
def test_gradients_are_those_of_micro_batches(side: str | None, dtype: torch.dtype, order: str) -> None:
    module = small(order).to(dtype)
    geometry: dict[str, Geometry] | None = None if side is None else guided(module, PCA(side=side))
    check(module, batch(dtype), loss, geometry, 1e-3 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("part", ["mean", "along", "scale"])
def test_the_comparison_sees_each_part_of_the_formula(
    part: str, side: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, standardise = Standardised._undone, wide_resnet._standardise

    def wrong(self: Standardised, gradients: Tensor) -> tuple[Tensor, Tensor]:
        found, taken = right(self, gradients)
        if part == "mean":
            return found + gradients.mean((2, 3, 4), keepdim=True), taken
        return found + (gradients * self.weight).sum((2, 3, 4), keepdim=True) * self.weight, taken

    def wrong_scale(weight: Tensor) -> tuple[Tensor, Tensor]:
        standardised, scale = standardise(weight)
        return standardised, 1.1 * scale

    if part == "scale":
        monkeypatch.setattr(wide_resnet, "_standardise", wrong_scale)
    else:
        monkeypatch.setattr(Standardised, "_undone", wrong)
    module = small().double()
    geometry = None if side is None else guided(module, PCA(side=side))
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        check(module, batch(torch.float64), loss, geometry, 1e-6)


def test_some_examples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formed in parts, and not kept for the sum: the same numbers, and nothing that a CUDA graph could not record."""
    module, inputs = small().double(), batch(torch.float64)
    geometry = guided(module, PCA(side="left"))
    expected = micro_batches(module, inputs, loss)
    monkeypatch.setattr(wide_resnet, "_CPU_BUFFER", 2 * 32 * 32 * 9)
    compare(expected, tapped(module, inputs, loss, geometry), geometry, 1e-9)
    monkeypatch.setattr(Convolution, "worth_keeping", lambda self: False)
    compare(expected, tapped(module, inputs, loss, geometry), geometry, 1e-9)
    found = tapped(module, inputs, loss)
    assert found.pieces["1.conv1.weight"].instantiate().shape == (5, 32, 16, 3, 3)


class Capturing(TorchDispatchMode):
    """Refuses what waits for a GPU, as a recording does: to read a number, or to look for the true ones of a mask."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor) and x.dtype == torch.bool]
        waits = func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        if waits or (func is torch.ops.aten.index.Tensor and masks):
            raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("side", [None, "left", "both"])
def test_norms_and_sums_can_be_recorded(side: str | None, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_resnet, "_CPU_BUFFER", 2 * 32 * 16 * 9)
    monkeypatch.setattr(Convolution, "worth_keeping", lambda self: keep)
    layer = StandardisedConv2d(16, 32, 3)
    geometry = guided(layer, PCA(side=side))["weight"] if side else identity(tuple(layer.weight.shape))
    found = piece(layer, torch.randn(5, 16, 8, 8), torch.randn(5, 32, 8, 8))
    with Capturing(), torch.no_grad():
        found.square_norms(geometry)
        found.weighted_sum(torch.rand(5))
        with pytest.raises(RuntimeError, match="capturing"):  # it would have been noticed
            found.take(torch.arange(5) < 3)


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


# -- norms without gradients ------------------------------------------------------------------------------------------


def piece(layer: StandardisedConv2d, x: Tensor, delta: Tensor, kind: type[Convolution] = Convolution) -> Standardised:
    """What the rule makes of one call."""
    weight, scale = wide_resnet._standardise(layer.weight.detach())
    assert not isinstance(layer.padding, str)
    arguments = convolution_arguments(weight, layer.stride, layer.padding, 1, 1)
    return Standardised(kind(x, delta / scale.view(-1, 1, 1), arguments), weight, layer(x).detach())


def gradients(layer: StandardisedConv2d, x: Tensor, delta: Tensor) -> Tensor:
    """Each example's gradient, by autograd in double precision: shape (n, weights)."""
    weight = layer.weight.detach().double().requires_grad_()

    def of(x: Tensor, delta: Tensor) -> Tensor:
        out = F.conv2d(x.double()[None], wide_resnet._standardise(weight)[0], None, layer.stride, layer.padding)
        return torch.autograd.grad(out, weight, delta.double()[None])[0].flatten()

    return torch.stack([of(*example) for example in zip(x, delta, strict=True)])


SHAPES = {  # channels in and out, kernel, stride, height and width
    "explicit": (3, 5, 3, 1, 9),
    "strided": (4, 6, 3, 2, 9),
    "pointwise": (6, 5, 1, 2, 8),
    "by Gram": (16, 32, 3, 1, 3),
}


def layer_and_input(shape: str, dtype: torch.dtype = torch.float32) -> tuple[StandardisedConv2d, Tensor, Tensor]:
    torch.manual_seed(0)
    inner, outer, kernel, stride, size = SHAPES[shape]
    layer = StandardisedConv2d(inner, outer, kernel, stride).to(dtype)
    with torch.no_grad():
        layer.weight.add_(1.0)  # a mean that standardising must take away
    x = torch.randn(7, inner, size, size, dtype=dtype) + 0.5
    return layer, x, torch.randn_like(layer(x))


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_need_no_gradients(shape: str) -> None:
    layer, x, delta = layer_and_input(shape, torch.float64)
    assert piece(layer, x, delta).inner.gram_is_cheaper() == (shape == "by Gram")
    true = gradients(layer, x, delta).norm(dim=1)
    geometry = identity(tuple(layer.weight.shape))
    exact = piece(layer, x, delta).square_norms(geometry).sqrt()
    assert bool(((exact / true - 1).abs() < 1e-10).all())
    single = piece(layer.float(), x.float(), delta.float()).square_norms(geometry).sqrt()
    assert bool((single >= true * (1 - 1e-6)).all()) and bool((single < true * 1.003).all())
    scaled = piece(layer, x.float(), delta.float()).square_norms(geometry.scaled(0.5)).sqrt()
    assert torch.allclose(scaled, 2 * single)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_several_views_of_one_example(shape: str, mixed: bool) -> None:
    layer, x, delta = layer_and_input(shape, torch.float64)
    x, delta = x[:6], delta[:6]
    true = gradients(layer, x, delta).unflatten(0, (3, 2)).sum(1)
    found, size, weights = piece(layer, x, delta).folded(2), layer.weight.shape, torch.rand(3, dtype=torch.float64)
    assert isinstance(found, Standardised), "no view's gradient is formed alone"
    basis = torch.linalg.qr(torch.randn(size[0], size[0], dtype=torch.float64))[0]
    scales = torch.linspace(0.5, 2, size[0], dtype=torch.float64)
    geometry = Geometry(tuple(size), left=Dense(basis, scales)) if mixed else identity(tuple(size))
    wanted = geometry.whiten(true.view(3, *size)).flatten(1).norm(dim=1)
    torch.testing.assert_close(found.square_norms(geometry).sqrt(), wanted, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.weighted_sum(weights).flatten(), weights @ true)


def alike(outer: int) -> StandardisedConv2d:
    """A layer that turns one patch into one position, and whose channels are alike: a patch can be along all of them.

    Norms of one channel are taken explicitly, those of many by Gram.
    """
    torch.manual_seed(0)
    layer = StandardisedConv2d(4, outer, 3)
    layer.padding = (0, 0)
    with torch.no_grad():
        layer.weight.copy_(layer.weight[:1] + 0.1)
    return layer


def alone(found: Standardised, n: int) -> Tensor:
    """The norm of what each example adds to the sum."""
    return torch.stack([found.weighted_sum(one) for one in torch.eye(n)]).flatten(1).norm(dim=1)


@pytest.mark.parametrize("kind", ["radial", "constant", "cancelling"])
@pytest.mark.parametrize("outer", [1, 40], ids=["explicit", "by Gram"])
def test_norms_are_never_too_small_where_nearly_nothing_is_left(outer: int, kind: str) -> None:
    """Of gradients along ŵ, or all of one value, or of positions that cancel, nothing remains but rounding."""
    layer, n = alike(outer), 64
    weight, scale = wide_resnet._standardise(layer.weight.detach())
    x, delta = torch.randn(n, 1, 1, 1) * torch.ones(4, 3, 3), torch.randn(n, outer, 1, 1)
    if kind == "radial":
        x = x + torch.randn(n, 1, 1, 1) * weight[:1]
    if kind == "cancelling":  # output gradients of both signs over patches that are alike
        x, delta = torch.ones(n, 4, 22, 22), torch.randn(n, outer, 20, 20)
        delta -= delta.mean((2, 3), keepdim=True)
    x = x + 1e-6 * torch.randn_like(x)
    found = piece(layer, x, delta)
    norms = found.square_norms(identity(tuple(layer.weight.shape))).sqrt()
    assert bool((gradients(layer, x, delta).norm(dim=1) <= norms).all())
    assert bool((alone(found, n) <= norms).all())
    sizes = x.flatten(1).norm(dim=1) * delta.flatten(1).norm(dim=1) / scale.min()
    assert bool((norms <= 0.02 * sizes).all())  # room, and no more


def test_norms_hold_for_weights_far_from_zero() -> None:
    """Rounding leaves ŵ a mean, and it is this ŵ that the sum is undone with."""
    layer, n = alike(40), 64
    with torch.no_grad():
        layer.weight.add_(1e5)
    weight = wide_resnet._standardise(layer.weight.detach())[0]
    assert abs(float(weight[0].sum())) / 6 > 0.01
    x = torch.randn(n, 1, 1, 1) / 6 + torch.randn(n, 1, 1, 1) * weight[:1]
    found = piece(layer, x, torch.randn(n, 40, 1, 1))
    norms = found.square_norms(identity(tuple(layer.weight.shape))).sqrt()
    assert bool((alone(found, n) <= norms).all())


SHORT = 2.0**-5
"""The error of a format; coarser than TF32, so that it shows beside the room for rounding."""


class Short(Convolution):
    """An ordinary convolution's gradients as a GPU has them: formed in a short format, kept and summed so."""

    def forming_error(self) -> float:
        return SHORT

    def instantiate(self) -> Tensor:
        if self._slabs is None:
            self._form(None, None, keep=True)
            assert self._slabs is not None
            self._slabs = self._slabs * (1 + SHORT * (torch.rand_like(self._slabs) - 0.5))
        return self._as_weight(self._slabs)

    def some_at_a_time(self, n: int, count: int) -> Iterator[Tensor]:
        yield from self.instantiate().split(count)


@pytest.mark.parametrize("left", [1e-4, 0.03, 0.3, 1.0])
def test_norms_are_of_what_is_summed_where_gradients_are_formed_in_a_short_format(left: float) -> None:
    layer, n = alike(1), 200
    weight, scale = wide_resnet._standardise(layer.weight.detach())
    # patches of which all but `left` is taken away, along ŵ and in the mean, in all proportions
    angle, other = 7 * torch.rand(n, 1, 1, 1), F.normalize(torch.randn(n, 4 * 9)).view(n, 4, 3, 3)
    x, delta = angle.cos() * weight[:1] + angle.sin() / 6 + left * other, torch.randn(n, 1, 1, 1)
    found = piece(layer, x, delta, Short)
    norms = found.square_norms(identity(tuple(weight.shape))).sqrt()
    added, sizes = alone(found, n), x.flatten(1).norm(dim=1) * delta.flatten().abs() / scale.min()
    assert bool((added <= norms).all())
    assert bool((norms <= added * 1.01 + 0.01 * sizes).all())


def test_that_test_can_fail() -> None:
    """By the formula for products in full precision norms are too small."""
    layer, n = alike(1), 200
    weight = wide_resnet._standardise(layer.weight.detach())[0]
    angle = 7 * torch.rand(n, 1, 1, 1)
    x, delta = angle.cos() * weight[:1] + angle.sin() / 6, torch.randn(n, 1, 1, 1)
    summed, measured = piece(layer, x, delta, Short), piece(layer, x, delta)
    summed.inner.instantiate()
    assert bool((measured._unformed(measured._out).sqrt() < alone(summed, n)).any())


def test_a_bad_example_is_bad_alone() -> None:
    for value in (float("nan"), float("inf"), 1e30):
        for shape in SHAPES:
            layer, x, delta = layer_and_input(shape)
            geometry = identity(tuple(layer.weight.shape))
            good = piece(layer, x, delta).square_norms(geometry)
            x[2, 0, 0, 0], delta[4, 0, 0, 0] = value, value
            found = piece(layer, x, delta).square_norms(geometry)
            assert found.isfinite().tolist() == [row not in (2, 4) for row in range(7)]
            others = found.isfinite()
            torch.testing.assert_close(found[others], good[others])


def test_an_output_changed_in_place_is_refused() -> None:
    class Hasty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = StandardisedConv2d(2, 4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x).relu_().mean((2, 3)))

    with pytest.raises(RuntimeError, match="changed in place"):
        tapped(Hasty(), batch(), loss)


@pytest.mark.parametrize("order", ["relu-norm-conv", "norm-relu-conv"])
def test_the_order_of_layers(order: wide_resnet.Order) -> None:
    """ReLU first: every convolution after the first, those of skips too, gets what a norm returned."""
    model = wide_resnet.wide_resnet(3, 10, depth=10, width=1, order=order)
    normed: list[Tensor] = []
    found: list[bool] = []
    for child in model.modules():
        if isinstance(child, nn.GroupNorm):
            child.register_forward_hook(lambda module, args, out: normed.append(out))
        if isinstance(child, StandardisedConv2d):
            child.register_forward_pre_hook(lambda module, args: found.append(any(args[0] is out for out in normed)))
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 10)
    assert found == [False] + [order == "relu-norm-conv"] * 8
    with pytest.raises(ValueError, match="order must be one of 'relu-norm-conv'"):
        wide_resnet.wide_resnet(3, 10, order="conv-first")  # type: ignore[arg-type]


def test_it_has_a_rule_of_its_own_and_normalises() -> None:
    layer = StandardisedConv2d(3, 4, 3)
    assert registry.find_rule(layer) is wide_resnet.standardised_convolution
    weight = wide_resnet._standardise(7 * layer.weight + 2)[0].flatten(1)
    assert torch.allclose(weight.mean(1), torch.zeros(4), atol=1e-6)
    assert torch.allclose(weight.norm(dim=1), torch.ones(4), atol=1e-3)
    assert trained(layer).keys() == {"weight"}
