"""Wide residual networks without batch statistics: group norms, and convolutions with standardised weights.

De et al. (2022) made this the usual network for private training on CIFAR-10. Each output channel of a standardised
convolution uses, in place of its weights w (of which there are m),

    ŵ = (w − mean w) / s,    s = √(m · var w + ε)

The layer rule below gives its exact per-example gradients: with ĝ the gradient for ŵ, of which only the part that
standardising lets through counts,

    g = (ĝ − mean ĝ − ŵ ⟨ŵ, ĝ⟩) / s
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cudnn

from dphero._checks import one_of
from dphero.geometry.diagonal import Scalar
from dphero.geometry.geometry import Geometry, identity
from dphero.gradients.convolution import Convolution
from dphero.gradients.patches import convolution_arguments
from dphero.gradients.piece import Explicit, Piece
from dphero.layers import register
from dphero.layers.call import LayerCall
from dphero.numerics.buffers import ReusableBuffer
from dphero.numerics.precision import as_multiplied, conv_tf32, matmul_tf32
from dphero.numerics.products import product

_EPSILON = 1e-4
_GROUPS = 16  # of each group norm
_CPU_BUFFER, _GPU_BUFFER = 1 << 21, 1 << 26
"""Elements of per-example gradients to handle at a time, where they are formed."""
_SLABS = (3, 0, 2, 4, 1)
"""The axes of gradients (n, outputs, inputs, rows, columns) in the order of slabs, see :class:`Convolution`."""
_ROUNDINGS = 32
"""Units of rounding that a sum in full precision may be off by, beside what its terms add up to without their signs."""


class StandardisedConv2d(nn.Conv2d):
    """A convolution without bias whose weights are standardised for each output channel.

    While the model is private, its output is needed again, so nothing may change that in place.
    """

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
def standardised_convolution(call: LayerCall, x: Tensor) -> Tensor:
    """Tap a standardised convolution."""
    module, x = call.module, as_multiplied(x)
    assert isinstance(module, StandardisedConv2d)
    weight, scale = _standardise(call["weight"])
    assert not isinstance(module.padding, str)
    arguments = convolution_arguments(weight, module.stride, module.padding, 1, 1)
    room = call.memory.setdefault("room", ReusableBuffer())

    def make(delta: Tensor, x: Tensor, out: Tensor | None = None) -> dict[str, Piece]:
        scaled = (delta / scale.view(-1, 1, 1)).to(delta.dtype)
        return {"weight": Standardised(Convolution(x, scaled, arguments, room), weight, out)}

    out = F.conv2d(x, weight, None, module.stride, arguments.padding)
    # under autocast, and in TF32, the output is rounded too much to be of use
    exact = out.dtype == weight.dtype and not (out.is_cuda and cudnn.allow_tf32)
    return call.tap(lambda: out, make, *((x, out) if exact else (x,)))


class Standardised(Piece):
    """The per-example gradients g of a weight, from those of the standardised one.

    With h = ĝ / s, c its mean times √m and a = ⟨ŵ, h⟩, both for each output channel,

        g = h − c/√m − a ŵ
        ‖g‖² = Σ_channels ‖h‖² − c² − (2 − ‖ŵ‖²) a² + 2 c a (Σŵ)/√m

    The sum is linear, so this is undone once for all examples. Where no geometry mixes the coordinates, the norms
    follow from ‖h‖ and two short sums, with no gradient formed; otherwise g is formed for some examples at a time.

    What is taken away may be much larger than what is left, so that a rounding that is small beside h is not small
    beside g: the norms leave room for it. Hence for each example: ‖g in the sum‖ ≤ norm.

    Args:
        inner: The gradients h: those of an ordinary convolution with output gradient δ / s.
        weight: ŵ.
        out: The convolution's output, if it is at hand in full precision.
    """

    def __init__(self, inner: Convolution, weight: Tensor, out: Tensor | None = None) -> None:
        self.inner, self.weight, self.shape, self._out = inner, weight, inner.shape, out

    @property
    def rounding(self) -> float:  # type: ignore[override]
        """See :class:`~dphero.gradients.piece.Piece`."""
        return self.inner.rounding

    def instantiate(self) -> Tensor:
        return self._undone(self.inner.instantiate())[0]

    def square_norms(self, geometry: Geometry) -> Tensor:
        out, self._out = self._out, None
        factors = (geometry.left, geometry.right, geometry.flat)
        if all(factor is None or isinstance(factor, Scalar) for factor in factors):
            short = self.inner.delta.dtype != self.weight.dtype
            # what is formed in TF32 is summed so too: only sums over these very gradients are right
            formed = not self.inner.gram_is_cheaper() and (out is None or self.inner.forming_error() > 0)
            return (self._sized() if short or formed else self._unformed(out)) / geometry.smallest**2
        squares = []
        for gradients in self.inner.some_at_a_time(len(self.inner.x), self._some()):
            kept, taken = self._undone(gradients)
            room = taken * (_ROUNDINGS * torch.finfo(kept.dtype).eps / geometry.smallest)
            squares.append(_square_norms(kept, geometry).sqrt_().add_(room).square_())
        return torch.cat(squares)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._undone(self.inner.weighted_sum(weights).unsqueeze(0))[0][0]

    def take(self, keep: Tensor | slice) -> Piece:
        return Standardised(self.inner.take(keep), self.weight)

    def folded(self, fold: int) -> Piece:
        if fold == 1:
            return self
        inner = self.inner.folded(fold)
        return Standardised(inner, self.weight) if isinstance(inner, Convolution) else super().folded(fold)

    def _unformed(self, out: Tensor | None) -> Tensor:
        """Return ‖g‖², with room for rounding: a from the convolution's output, c from that with a kernel of ones."""
        x, delta, weight, arguments = self.inner.x, self.inner.delta, self.weight, self.inner.arguments
        kernel = weight.shape[2:]
        if out is None:
            with conv_tf32(x, allow=False):
                out = F.conv2d(x, weight, None, arguments.stride, arguments.padding)
        ones = F.avg_pool2d(x.sum(1, keepdim=True), kernel, arguments.stride, arguments.padding, divisor_override=1)
        mean = product(delta.flatten(2), ones.flatten(2).mT).squeeze(2) / weight[0].numel() ** 0.5
        along = (delta * out).sum((2, 3))
        fine = self.inner.lost_in_sums()  # of h; and no more of c and a, since ‖ŵ‖ ≤ 1
        return self._square_norms(self.inner.square_norms(identity(self.shape)), mean, along, fine)

    def _sized(self) -> Tensor:
        """Return ‖g‖², with room for rounding, from h, some examples at a time."""
        found = []
        for gradients in self.inner.some_at_a_time(len(self.inner.x), self._some()):
            norms, mean, along = _sizes(gradients, self.weight)
            found.append((norms.square(), mean, along))
        squares, mean, along = (torch.cat(parts) for parts in zip(*found, strict=True))
        # where these very gradients are summed, no more is lost than of them
        own = squares.sqrt() * (_ROUNDINGS * torch.finfo(squares.dtype).eps)
        return self._square_norms(squares, mean, along, own if self.inner.is_formed else self.inner.lost_in_sums())

    def _square_norms(self, squares: Tensor, mean: Tensor, along: Tensor, fine: Tensor) -> Tensor:
        """Return ‖g‖² from ‖h‖², c and a, with room for what the sums in the three may lose."""
        size, tilt = self.weight.square().sum((1, 2, 3)), self.weight.sum((1, 2, 3)) / self.weight[0].numel() ** 0.5
        taken = ((2 - size) * along.square() + mean * (mean - 2 * tilt * along)).sum(1)
        whole, part = squares.sqrt(), taken.sqrt()
        room = fine * (2 * part + whole + fine)
        norms = (squares - taken).clamp_(min=0).add_(room, alpha=2).sqrt_()
        return norms.add_(2 * fine).square_()

    def _some(self) -> int:
        """Return of how many examples to have the gradients at once."""
        return max(1, (_CPU_BUFFER if self.weight.device.type == "cpu" else _GPU_BUFFER) // self.weight.numel())

    def _undone(self, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return g from h, of shape ``(n, *shape)``, and for each example the norm of what it takes away.

        It takes away what lies in the plane of two orthogonal directions: 1/√m in every entry, and ŵ.
        """
        dtype = torch.promote_types(gradients.dtype, torch.float32)
        weight = self.weight.to(dtype)
        left = gradients.to(dtype, copy=True)  # in the same order of memory
        if not _in_slabs(left):
            left = left.contiguous()
        level = weight[0].numel() ** -0.5
        _, mean, along = _sizes(left, weight)
        for part, weights in _pairs(left, weight):
            part.sub_(mean.unsqueeze(2) * level).addcmul_(along.unsqueeze(2), weights, value=-1)
        return left, (mean.square() + along.square()).sum(1).sqrt_()


def _pairs(gradients: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return views (n, outputs, columns) that together are the gradients, each with its part of the weight."""
    aligned = _as_slabs(weight.unsqueeze(0)) if _in_slabs(gradients) else weight.unsqueeze(0)
    return list(zip(_matrices(gradients), _matrices(aligned), strict=True))


def _sizes(gradients: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ‖h‖ of each example; c and a of each of its output channels."""
    pairs, level = _pairs(gradients, weight), weight[0].numel() ** -0.5
    with matmul_tf32(gradients, allow=False):
        mean = torch.stack([part.sum(2) for part, _ in pairs]).sum(0) * level
        along = torch.stack([torch.einsum("nrc,rc->nr", part, weights[0]) for part, weights in pairs]).sum(0)
    return _square_norms(gradients, identity(tuple(weight.shape))).sqrt_(), mean, along


def _in_slabs(gradients: Tensor) -> bool:
    """Tell whether a kernel's rows come first in memory, and outputs last, as in a convolution's gradients they may.

    To bring them in the weight's own order would cost more than all the rest.
    """
    return gradients.permute(_SLABS).is_contiguous()


def _as_slabs(gradients: Tensor) -> Tensor:
    slabs = gradients.permute(_SLABS).contiguous()
    return slabs.permute([_SLABS.index(axis) for axis in range(len(_SLABS))])


def _matrices(gradients: Tensor) -> list[Tensor]:
    """Return views (n, outputs, columns) that together are the gradients."""
    if _in_slabs(gradients):
        return [slab.flatten(1, 2).mT for slab in gradients.permute(_SLABS)]
    return [gradients.flatten(2)]


def _square_norms(gradients: Tensor, geometry: Geometry) -> Tensor:
    if geometry.right is not None or geometry.flat is not None:
        return Explicit(gradients).square_norms(geometry)
    parts, left = _matrices(gradients), geometry.left
    whitened = parts if left is None else (left.whiten(part, axis=-2) for part in parts)
    return torch.stack([torch.linalg.vector_norm(part, dim=(1, 2)) for part in whitened]).square_().sum(0)


class _NormFirst(nn.Module):
    """Norm – ReLU – conv, twice, added to the input (which a 1×1 convolution fits where the size changes)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(_GROUPS, inner), nn.GroupNorm(_GROUPS, outer)
        self.conv1 = StandardisedConv2d(inner, outer, 3, stride)
        self.conv2 = StandardisedConv2d(outer, outer, 3)
        self.shortcut = None if inner == outer and stride == 1 else StandardisedConv2d(inner, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        skipped = x if self.shortcut is None else self.shortcut(active)
        return skipped + self.conv2(F.relu(self.norm2(self.conv1(active))))


class _ReLUFirst(nn.Module):
    """ReLU – norm – conv, twice, added to the input; where the size changes, to ReLU – norm – 1×1 conv of it."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(_GROUPS, inner), nn.GroupNorm(_GROUPS, outer)
        self.conv1 = StandardisedConv2d(inner, outer, 3, stride)
        self.conv2 = StandardisedConv2d(outer, outer, 3)
        self.shortcut: nn.Module | None = None
        if inner != outer or stride > 1:
            self.shortcut = nn.Sequential(nn.GroupNorm(_GROUPS, inner), StandardisedConv2d(inner, outer, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(x)
        skipped = x if self.shortcut is None else self.shortcut(active)
        return skipped + self.conv2(self.norm2(F.relu(self.conv1(self.norm1(active)))))


Order = Literal["relu-norm-conv", "norm-relu-conv"]


def wide_resnet(
    channels: int, classes: int, *, depth: int = 16, width: int = 4, order: Order = "relu-norm-conv"
) -> nn.Module:
    """Return a pre-activation wide residual network for images of any size.

    With ``relu-norm-conv``, which De et al. (2022) have, every convolution gets inputs of one size, and so per-example
    gradients of more even norms: it learns better with private gradients. ``norm-relu-conv`` is the usual order
    without privacy.
    """
    one_of("order", order, get_args(Order))
    block = _ReLUFirst if order == "relu-norm-conv" else _NormFirst
    inner = 16
    layers: list[nn.Module] = [StandardisedConv2d(channels, inner, 3)]
    for stage in range(3):
        outer = 16 * 2**stage * width
        for number in range((depth - 4) // 6):
            layers.append(block(inner, outer, 2 if stage and not number else 1))
            inner = outer
    last: list[nn.Module] = [nn.ReLU(), nn.GroupNorm(_GROUPS, inner)]
    layers += last if order == "relu-norm-conv" else last[::-1]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))
