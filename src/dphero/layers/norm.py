"""Normalisations over each example alone: their affine parameters have small per-example gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from dphero.gradients.piece import Explicit, Piece
from dphero.layers.call import LayerCall
from dphero.layers.registry import register
from dphero.numerics.precision import widened


@register(nn.LayerNorm)
def layer_norm(call: LayerCall, input: Tensor) -> Tensor:
    """Tap a layer norm."""
    module = call.module
    assert isinstance(module, nn.LayerNorm)
    shape, eps = list(module.normalized_shape), module.eps
    return call.tap(
        lambda: F.layer_norm(input, shape, call.get("weight"), call.get("bias"), eps),
        _trailing(call, lambda x: F.layer_norm(x, shape, None, None, eps), len(shape)),
        input,
    )


@register(nn.RMSNorm)
def rms_norm(call: LayerCall, x: Tensor) -> Tensor:
    """Tap an RMS norm."""
    module = call.module
    assert isinstance(module, nn.RMSNorm)
    shape, eps = list(module.normalized_shape), module.eps
    return call.tap(
        lambda: F.rms_norm(x, shape, call.get("weight"), eps),
        _trailing(call, lambda x: F.rms_norm(x, shape, None, eps), len(shape)),
        x,
    )


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(call: LayerCall, input: Tensor) -> Tensor:
    """Tap an instance norm (one with running statistics is refused when the model is made private)."""
    module = call.module
    assert isinstance(module, nn.modules.instancenorm._InstanceNorm)
    eps = module.eps
    return call.tap(
        lambda: F.instance_norm(input, weight=call.get("weight"), bias=call.get("bias"), eps=eps),
        _channels(call, lambda x: F.instance_norm(x, eps=eps)),
        input,
    )


def _trailing(call: LayerCall, normalise: Callable[[Tensor], Tensor], axes: int) -> Callable[..., dict[str, Piece]]:
    """Pieces of parameters that scale the last ``axes`` axes: sums over the positions between."""

    def make(delta: Tensor, x: Tensor) -> dict[str, Piece]:
        between = tuple(range(1, delta.dim() - axes))
        return _affine(call, delta, x, normalise, lambda value: value.sum(between) if between else value)

    return make


def _channels(call: LayerCall, normalise: Callable[[Tensor], Tensor]) -> Callable[..., dict[str, Piece]]:
    """Pieces of parameters that scale the channels, axis 1 of each image: sums over the pixels."""

    def make(delta: Tensor, x: Tensor) -> dict[str, Piece]:
        return _affine(call, delta, x, normalise, lambda value: value.flatten(2).sum(2) if value.dim() > 2 else value)

    return make


def _affine(
    call: LayerCall,
    delta: Tensor,
    x: Tensor,
    normalise: Callable[[Tensor], Tensor],
    reduce: Callable[[Tensor], Tensor],
) -> dict[str, Piece]:
    pieces: dict[str, Piece] = {}
    delta, x = widened(delta), widened(x)
    if call.wants("weight"):
        pieces["weight"] = Explicit(reduce(delta * normalise(x)))
    if call.wants("bias"):
        pieces["bias"] = Explicit(reduce(delta))
    return pieces
