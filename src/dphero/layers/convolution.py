"""Convolutions: a linear layer over the patches of its input, G_i = δ_i · patches(x_i)ᵀ.

Patches are a strided view of the padded input, copied some examples at a time into one buffer that is
used again and stays in cache; then the per-example gradient is one batched product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero.geometry import Geometry
from dphero.layers.registry import register
from dphero.pieces import Explicit, Piece

if TYPE_CHECKING:
    from dphero.taps import Call

__all__ = ["Convolution", "ConvolutionArguments", "conv_piece", "convolution", "convolution_arguments"]

_CPU_BUFFER = 1 << 18
"""Elements of the patch buffer on a CPU: about what a core keeps close."""
_GPU_BUFFER = 1 << 27


@dataclass(frozen=True)
class ConvolutionArguments:
    """What a convolution is, besides its input."""

    weight_shape: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolution_arguments(
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> ConvolutionArguments:
    """Spell out integer arguments for every spatial axis."""
    axes = weight.dim() - 2

    def spell(value: int | Sequence[int]) -> tuple[int, ...]:
        return (value,) * axes if isinstance(value, int) else tuple(value) * (axes if len(value) == 1 else 1)

    return ConvolutionArguments(weight.shape, spell(stride), spell(padding), spell(dilation), groups)


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(call: Call, x: Tensor) -> Tensor:
    """Tap a convolution with any stride, padding, dilation and groups."""
    module = call.module
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    padding: tuple[int, ...] | str = module.padding
    if isinstance(padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        padding = (0,) * (x.dim() - 2)
    arguments = convolution_arguments(module.weight, module.stride, padding, module.dilation, module.groups)

    def make(delta: Tensor, x: Tensor) -> dict[str, Piece]:
        pieces: dict[str, Piece] = {"weight": conv_piece(x, delta, arguments)}
        if call.wants("bias"):
            pieces["bias"] = Explicit(delta.flatten(2).sum(2))
        return pieces

    def compute() -> Tensor:
        return torch.convolution(
            x,
            call["weight"],
            call.get("bias"),
            arguments.stride,
            arguments.padding,
            arguments.dilation,
            False,
            (0,) * len(arguments.stride),
            arguments.groups,
        )

    return call.tap(compute, make, x)


def conv_piece(x: Tensor, delta: Tensor, arguments: ConvolutionArguments) -> Piece:
    """Return the piece of a convolution's weight from its input and output gradient."""
    return Convolution(x, delta, arguments)


class Convolution(Piece):
    """The per-example gradients of a convolution's weight."""

    def __init__(self, x: Tensor, delta: Tensor, arguments: ConvolutionArguments) -> None:
        self.x, self.delta, self.arguments = x, delta, arguments
        self.shape = arguments.weight_shape
        self._kept: Tensor | None = None

    def instantiate(self) -> Tensor:
        if self._kept is None:
            n, groups = len(self.x), self.arguments.groups
            rows, columns = self.shape[0] // groups, prod(self.shape[1:])
            delta = self.delta.reshape(n * groups, rows, -1)
            out = delta.new_empty(n * groups, rows, columns)
            for first, last, patches in self._patches():
                part = slice(first * groups, last * groups)
                torch.bmm(delta[part], patches.transpose(1, 2), out=out[part])
            self._kept = out.reshape(n, *self.shape)
            del self.x, self.delta
        return self._kept

    def square_norms(self, geometry: Geometry) -> Tensor:
        if self._kept is None and self._gram_is_cheaper() and geometry.flat is None:
            return self._gram_norms(geometry)
        return Explicit(self.instantiate()).square_norms(geometry)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._kept is not None:
            return Explicit(self._kept).weighted_sum(weights)
        arguments = self.arguments
        delta = self.delta * weights.to(self.delta.dtype).view(-1, *[1] * (self.delta.dim() - 1))
        _, gradient, _ = torch.ops.aten.convolution_backward(
            delta,
            self.x,
            delta.new_empty(1).expand(self.shape),
            None,
            arguments.stride,
            arguments.padding,
            arguments.dilation,
            False,
            (0,) * len(arguments.stride),
            arguments.groups,
            (False, True, False),
        )
        return gradient

    def take(self, keep: Tensor) -> Piece:
        if self._kept is not None:
            return Explicit(self._kept[keep])
        return Convolution(self.x[keep], self.delta[keep], self.arguments)

    def _gram_is_cheaper(self) -> bool:
        if self.arguments.groups > 1:
            return False
        rows, columns, positions = self.shape[0], prod(self.shape[1:]), prod(self.delta.shape[2:])
        return positions * (rows + columns) < rows * columns

    def _gram_norms(self, geometry: Geometry) -> Tensor:
        norms = self.delta.new_empty(len(self.x))
        for first, last, patches in self._patches():
            left = self.delta[first:last].flatten(2).transpose(1, 2)
            right = patches.transpose(1, 2)
            if geometry.left is not None:
                left = geometry.left.whiten(left)
            if geometry.right is not None:
                right = geometry.right.whiten(right)
            grams = torch.bmm(left, left.transpose(1, 2)).mul_(torch.bmm(right, right.transpose(1, 2)))
            norms[first:last] = grams.sum((1, 2))
        return norms.clamp_(min=0)

    def _patches(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield ``(first, last, patches)``, patches of shape ``(examples * groups, columns, positions)``."""
        arguments = self.arguments
        x, out = self.x, self.delta.shape[2:]
        if any(arguments.padding):
            x = F.pad(x, [pad for size in reversed(arguments.padding) for pad in (size, size)])
        kernel = self.shape[2:]
        n, channels = x.shape[:2]
        spatial = x.stride()[2:]
        view = x.as_strided(
            (n, channels, *kernel, *out),
            (
                *x.stride()[:2],
                *(step * by for step, by in zip(spatial, arguments.dilation, strict=True)),
                *(step * by for step, by in zip(spatial, arguments.stride, strict=True)),
            ),
        )
        positions = prod(out)
        size = channels * prod(kernel) * positions
        limit = _CPU_BUFFER if x.device.type == "cpu" else _GPU_BUFFER
        chunk = max(1, min(n, limit // max(size, 1)))
        buffer = x.new_empty((chunk, channels, *kernel, *out))
        for first in range(0, n, chunk):
            last = min(n, first + chunk)
            part = buffer[: last - first]
            part.copy_(view[first:last])
            yield first, last, part.view((last - first) * arguments.groups, -1, positions)
