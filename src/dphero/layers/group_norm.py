"""Group norms, whose backward pass and per-example affine gradients come from one run of torch's kernel.

With the examples as further channels of a single one, the kernel gives what the scale and the shift of each example and
channel get, beside the gradient of the input. Most of its time goes into sums that all three need.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from dphero.gradients.piece import Explicit, Piece
from dphero.layers.call import LayerCall
from dphero.layers.registry import register
from dphero.numerics.precision import widened

_MOST_GROUPS = (1 << 16) - 1
"""More groups at a time a GPU cannot start."""


@register(nn.GroupNorm)
def group_norm(call: LayerCall, input: Tensor) -> Tensor:
    """Tap a group norm."""
    module, x = call.module, input
    assert isinstance(module, nn.GroupNorm)
    if torch.is_autocast_enabled(x.device.type):
        x = x.float()  # what autocast does for group norms; the kernel wants input and weight of one kind
    weight, bias, kept = call.get("weight"), call.get("bias"), _Kept()
    if _is_for_backward(x):
        out, mean, inverse = _GroupNorm.apply(x.contiguous(), weight, bias, module, kept)
    else:
        size = (len(x), module.num_channels, prod(x.shape[2:]), module.num_groups)
        out, mean, inverse = torch.native_group_norm(x.contiguous(), weight, bias, *size, module.eps)

    def make(delta: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> dict[str, Piece]:
        wanted = (kept.wanted, call.wants("weight"), call.wants("bias"))
        of_input, scale, shift = _backward(delta, _Saved(x, mean, inverse, weight), module.num_groups, wanted)
        if kept.wanted:
            kept.keep(delta, of_input)
        found = {"weight": scale, "bias": shift}
        return {name: Explicit(value.view(len(delta), -1)) for name, value in found.items() if call.wants(name)}

    return call.tap(lambda: out, make, x, mean, inverse)


def _is_for_backward(x: Tensor) -> bool:
    """Tell whether a backward pass will want the input's gradient; forward mode has torch's own formulas."""
    return type(x) is Tensor and x.requires_grad and x.numel() > 0 and forward_ad.unpack_dual(x).tangent is None


class _Saved(NamedTuple):
    """What a backward pass needs besides the output gradient."""

    x: Tensor
    mean: Tensor
    inverse: Tensor
    weight: Tensor | None


class _Kept:
    """The gradient of the input, which the tap finds along with its own, until autograd asks for it.

    It is that of one output gradient; the same memory, unchanged since, tells it from others.
    """

    wanted = False
    delta: Tensor | None = None
    version = 0
    found: Tensor | None = None

    def keep(self, delta: Tensor, found: Tensor) -> None:
        """Note what was found for an output gradient."""
        self.delta, self.version, self.found = delta, delta._version, found

    def take(self, delta: Tensor) -> Tensor | None:
        """Return what was found for this output gradient, if anything."""
        known, found = self.delta, self.found
        self.delta = self.found = None
        if known is None or found is None:
            return None
        same = known.data_ptr() == delta.data_ptr() and known.dtype == delta.dtype and self.version == delta._version
        return found if same and (known.shape, known.stride()) == (delta.shape, delta.stride()) else None


class _GroupNorm(torch.autograd.Function):
    """A group norm whose input gradient may have been found already."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, module: nn.GroupNorm, kept: _Kept
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = (len(x), module.num_channels, prod(x.shape[2:]), module.num_groups)
        out, mean, inverse = torch.native_group_norm(x, weight, bias, *size, module.eps)
        ctx.save_for_backward(x, mean, inverse, weight)
        ctx.mark_non_differentiable(mean, inverse)
        ctx.set_materialize_grads(False)
        ctx.groups, ctx.eps, ctx.kept = module.num_groups, module.eps, kept
        kept.wanted = True
        return out, mean, inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        delta, x = gradients[0], ctx.saved_tensors[0]
        if delta is None:
            return (None,) * 5
        found = ctx.kept.take(delta)
        if torch.is_grad_enabled():  # somebody differentiates the gradient in turn
            x = x.view_as(x)  # hooks on the input itself, taps among them, are not for this gradient
            out = F.group_norm(x, ctx.groups, ctx.saved_tensors[3], None, ctx.eps)
            return (*torch.autograd.grad(out, x, delta, create_graph=True), *(None,) * 4)
        if found is None:
            found, _, _ = _backward(delta, _Saved(*ctx.saved_tensors), ctx.groups, (True, False, False))
        return (found, *(None,) * 4)


def _backward(delta: Tensor, saved: _Saved, groups: int, wanted: tuple[bool, bool, bool]) -> list[Tensor]:
    """Return the gradients of the input, and of scale and shift by example and channel, as far as they are wanted."""
    n, channels = delta.shape[:2]
    delta, x, mean, inverse = map(widened, (delta, saved.x, saved.mean, saved.inverse))
    # the kernel takes memory to be in order, whatever the strides say
    delta, x = (value.reshape(n, channels, -1).contiguous() for value in (delta, x))
    weight = delta.new_ones(channels) if saved.weight is None else saved.weight.to(delta.dtype)
    parts = []
    for some in zip(*(each.split(max(1, _MOST_GROUPS // groups)) for each in (delta, x, mean, inverse)), strict=True):
        size = len(some[0]) * channels
        found = torch.ops.aten.native_group_norm_backward(
            *(each.reshape(1, size, -1) for each in some[:2]), *(each.reshape(1, -1) for each in some[2:]),
            weight.repeat(len(some[0])), 1, size, x.shape[2], len(some[0]) * groups, wanted,
        )  # fmt: skip
        parts.append(found)
    of_input, *others = map(_joined, zip(*parts, strict=True))
    return [of_input.view(saved.x.shape).to(saved.x.dtype) if wanted[0] else of_input, *others]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return what several runs gave, in one; what was not asked for is not defined."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat([part.flatten() for part in parts])
