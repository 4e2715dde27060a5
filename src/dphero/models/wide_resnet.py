"""Wide residual networks without batch statistics: group norms, and convolutions with standardised weights.

De et al. (2022) made this the usual network for private training on CIFAR-10. Each output channel of a standardised
convolution uses, in place of its weights w (of which there are m),

    ŵ = (w − mean w) / s,    s = √(m · var w + ε)

The layer rule below gives its exact per-example gradients: with ĝ the gradient for ŵ, of which only the part that
standardising lets through counts,

    g = (ĝ − mean ĝ − ŵ ⟨ŵ, ĝ⟩) / s
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero.geometry import Geometry
from dphero.layers import register
from dphero.layers.convolution import conv_piece, convolution_arguments
from dphero.pieces import Explicit, Piece, products_in
from dphero.sites import Call

__all__ = ["StandardisedConv2d", "wide_resnet"]

_EPSILON = 1e-4
_CPU_BUFFER, _GPU_BUFFER = 1 << 21, 1 << 26
"""Elements of per-example gradients to handle at a time."""
_ROUNDINGS = 32
"""Units of rounding that the sums over a channel's weights may be off by."""


class StandardisedConv2d(nn.Conv2d):
    """A convolution without bias whose weights are standardised for each output channel."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inner, outer, kernel, stride, padding=kernel // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, _standardise(self.weight)[0], None, self.stride, self.padding)


def _standardise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ŵ and s of each output channel."""
    centred = weight - weight.mean((1, 2, 3), keepdim=True)
    scale = (centred.square().sum((1, 2, 3), keepdim=True) + _EPSILON).sqrt()
    return centred / scale, scale


@register(StandardisedConv2d)
def standardised_convolution(call: Call, x: Tensor) -> Tensor:
    """Tap a standardised convolution."""
    module = call.module
    assert isinstance(module, StandardisedConv2d)
    weight, scale = _standardise(call["weight"])
    assert not isinstance(module.padding, str)
    arguments = convolution_arguments(weight, module.stride, module.padding, 1, 1)

    def make(delta: Tensor, x: Tensor) -> dict[str, Piece]:
        # the sum made anew costs a CPU more than the memory; elsewhere, keep whatever is smaller
        keep = x.device.type == "cpu" or len(x) * weight.numel() <= x.numel() + delta.numel()
        return {"weight": Standardised(conv_piece(x, delta, arguments), len(x), weight, scale, keep=keep)}

    return call.tap(lambda: F.conv2d(x, weight, None, module.stride, arguments.padding), make, x)


class Standardised(Piece):
    """The per-example gradients g of a weight, from those of the standardised one, ĝ.

    Standardising is undone for each example where its norm is taken, but only once for the sum, since it is linear.
    What it takes away may be much larger than what it leaves, so that the sum's rounding, small beside ĝ, would not be
    small beside g: the norms leave room for it.

    Args:
        inner: The gradients ĝ.
        rows: Number of examples.
        weight: ŵ.
        scale: s.
        keep: Form all ĝ at once, and keep them for the sum; otherwise some at a time, and the sum is made anew.
    """

    def __init__(self, inner: Piece, rows: int, weight: Tensor, scale: Tensor, *, keep: bool) -> None:
        self.inner, self.rows, self.weight, self.scale, self.keep = inner, rows, weight, scale, keep
        self.shape = inner.shape

    @property
    def rounding(self) -> float:  # type: ignore[override]
        """See :class:`~dphero.pieces.Piece`; known once the norms are."""
        return self.inner.rounding

    def instantiate(self) -> Tensor:
        return self._undone(self.inner.instantiate())[0]

    def square_norms(self, geometry: Geometry) -> Tensor:
        squares = [self.weight.new_empty(0)]
        for gradients in self._some_at_a_time():
            kept, taken = self._undone(gradients)
            error = self.inner.rounding + _ROUNDINGS * torch.finfo(kept.dtype).eps
            room = taken * (error / geometry.smallest)
            squares.append(_square_norms(kept, geometry).sqrt_().add_(room).square_())
        return torch.cat(squares)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._undone(self.inner.weighted_sum(weights).unsqueeze(0))[0][0]

    def take(self, keep: Tensor) -> Piece:
        return Standardised(self.inner.take(keep), int(keep.sum()), self.weight, self.scale, keep=self.keep)

    def _some_at_a_time(self) -> Iterator[Tensor]:
        some = max(1, (_CPU_BUFFER if self.weight.device.type == "cpu" else _GPU_BUFFER) // self.weight.numel())
        if self.keep:
            yield from self.inner.instantiate().split(some)
            return
        number = torch.arange(self.rows, device=self.weight.device)
        for first in range(0, self.rows, some):
            yield self.inner.take((number >= first) & (number < first + some)).instantiate()

    def _undone(self, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return g from ĝ, of shape ``(n, *shape)``, and for each example the norm of what it takes away.

        It takes away what lies in the plane of two orthogonal directions: 1/√m in every entry, and ŵ.
        """
        dtype = torch.promote_types(gradients.dtype, torch.float32)
        weight, scale = self.weight.to(dtype), self.scale.to(dtype).view(-1, 1)
        level = weight[0].numel() ** -0.5
        left = gradients.to(dtype, copy=True)  # in the same order of memory
        if not _in_slabs(left):
            left = left.contiguous()
        aligned = weight.unsqueeze(0)
        parts = list(zip(_matrices(left), _matrices(_as_slabs(aligned) if _in_slabs(left) else aligned), strict=True))
        with torch.autocast(left.device.type, enabled=False), products_in(left, short=False):
            mean = torch.stack([part.sum(2, keepdim=True) for part, _ in parts]).sum(0) * level
            products = [torch.einsum("nrc,rc->nr", part, weights[0]) for part, weights in parts]
            along = torch.stack(products).sum(0).unsqueeze(2)
        for part, weights in parts:
            part.sub_(mean * level).addcmul_(along, weights, value=-1).div_(scale)
        return left, ((mean.square() + along.square()) / scale.square()).sum((1, 2)).sqrt_()


def _in_slabs(gradients: Tensor) -> bool:
    """Tell whether the rows of the kernel come first in memory, as a convolution's gradients often do.

    To bring them in the weight's own order would cost more than all the rest.
    """
    return gradients.movedim(3, 0).is_contiguous()


def _as_slabs(gradients: Tensor) -> Tensor:
    return gradients.movedim(3, 0).contiguous().movedim(0, 3)


def _matrices(gradients: Tensor) -> list[Tensor]:
    """Return views (n, channels, columns) that together are the gradients."""
    n, channels = gradients.shape[:2]
    whole = gradients.unbind(3) if _in_slabs(gradients) else [gradients]
    return [part.view(n, channels, -1) for part in whole]


def _square_norms(gradients: Tensor, geometry: Geometry) -> Tensor:
    if geometry.right is not None or geometry.flat is not None:
        return Explicit(gradients).square_norms(geometry)
    parts, left = _matrices(gradients), geometry.left
    whitened = parts if left is None else (left.whiten(part, axis=-2) for part in parts)
    return torch.stack([torch.linalg.vector_norm(part, dim=(1, 2)) for part in whitened]).square_().sum(0)


class _Block(nn.Module):
    """Norm – ReLU – conv, twice, added to the input (which a 1×1 convolution fits where the size changes)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, inner), nn.GroupNorm(16, outer)
        self.conv1 = StandardisedConv2d(inner, outer, 3, stride)
        self.conv2 = StandardisedConv2d(outer, outer, 3)
        self.shortcut = None if inner == outer and stride == 1 else StandardisedConv2d(inner, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        skipped = x if self.shortcut is None else self.shortcut(active)
        return skipped + self.conv2(F.relu(self.norm2(self.conv1(active))))


def wide_resnet(channels: int, classes: int, *, depth: int = 16, width: int = 4) -> nn.Module:
    """Return a pre-activation wide residual network for images of any size."""
    blocks = (depth - 4) // 6
    inner = 16
    layers: list[nn.Module] = [StandardisedConv2d(channels, inner, 3)]
    for stage in range(3):
        outer = 16 * 2**stage * width
        for block in range(blocks):
            layers.append(_Block(inner, outer, 2 if stage and not block else 1))
            inner = outer
    layers += [nn.GroupNorm(16, inner), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes)]
    return nn.Sequential(*layers)
