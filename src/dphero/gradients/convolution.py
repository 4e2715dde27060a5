"""Per-example gradients of a convolution: a linear layer over the patches of its input, G_i = δ_i · patches(x_i)ᵀ.

Patches are a strided view of the padded input, copied some examples at a time into one buffer that is
used again and stays in cache; then the per-example gradient is one batched product.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Geometry
from dphero.gradients.piece import Explicit, Piece
from dphero.gradients.rounding import gram_rounding, rounding
from dphero.numerics.buffers import ReusableBuffer
from dphero.numerics.partial_norms import LEAST_SQUARE
from dphero.numerics.precision import matmul_tf32

__all__ = ["Convolution", "ConvolutionArguments", "conv_piece", "convolution_arguments"]

_CPU_BUFFER = 1 << 18
"""Elements of patches, or of gradients, that each thread of a CPU works on at once: they stay in its cache."""
_GPU_BUFFER = 1 << 26
"""On a GPU: enough to fill it, not much beside the activations."""
_FEW = 1 << 20
"""Elements of gradients whose norms are taken all together: they are still in some cache when the last is formed."""


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


def conv_piece(x: Tensor, delta: Tensor, arguments: ConvolutionArguments, room: ReusableBuffer | None = None) -> Piece:
    """Return the piece of a convolution's weight from its input and output gradient."""
    return Convolution(x, delta, arguments, room)


class Convolution(Piece):
    """The per-example gradients of a convolution's weight.

    They are formed in *slabs*, one for each kernel offset along the first spatial axis: with stride 1 there, the
    patches of neighbouring offsets overlap in memory, so only the other axes are unfolded. A slab holds the gradients
    turned, outputs last: a CPU multiplies patches · δᵀ faster than δ · patchesᵀ, and outputs are what is whitened.
    """

    def __init__(
        self, x: Tensor, delta: Tensor, arguments: ConvolutionArguments, room: ReusableBuffer | None = None
    ) -> None:
        self.x, self.delta, self.arguments = x, delta, arguments
        self._room = room or ReusableBuffer()
        self.shape = arguments.weight_shape
        self._slabs: Tensor | None = None
        self._whitened_by: Factor | None = None
        # where all patches fit at once, a GPU gains more from fewer operations than from less copying
        patches = len(x) * arguments.groups * prod(self.shape[1:]) * prod(delta.shape[2:])
        whole = arguments.stride[0] > 1 or (x.device.type != "cpu" and patches <= _GPU_BUFFER)
        self._offsets = 1 if whole else self.shape[2]
        self.rounding = rounding(delta, convolution=True)

    # -- the three questions -------------------------------------------------------------------------------

    def square_norms(self, geometry: Geometry) -> Tensor:
        if geometry.flat is not None or geometry.right is not None or self.arguments.groups > 1:
            return Explicit(self.instantiate()).square_norms(geometry)
        if self.gram_is_cheaper():
            with matmul_tf32(self.delta, allow=False):
                return self._gram_norms(geometry.left)
        with matmul_tf32(self.delta, allow=torch.backends.cudnn.allow_tf32):  # as torch's own convolutions
            # whitening acts on positions, in a product for each example, or on columns, in one for all
            early = 2 * prod(self.delta.shape[2:]) < prod(self.shape[1:])
            if early:
                return self._form(geometry.left, None, keep=self.worth_keeping())
            return self._form(None, geometry.left, keep=self.worth_keeping())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._slabs is None:
            return self._native_sum(weights)
        slabs = self._slabs
        spread = weights.to(slabs.dtype).expand(len(slabs), 1, -1)
        total = torch.bmm(spread, slabs.flatten(2)).view(len(slabs), 1, *slabs.shape[2:])
        if self._whitened_by is not None:
            total = self._whitened_by.colour(total)
        return self._as_weight(total)[0].contiguous()

    def instantiate(self) -> Tensor:
        if self._slabs is None:
            self._form(None, None, keep=True)
        assert self._slabs is not None and self._whitened_by is None
        self._room.forget()  # what is returned may outlive this piece
        return self._as_weight(self._slabs)

    def take(self, keep: Tensor) -> Convolution:
        if self._slabs is None:
            return Convolution(self.x[keep], self.delta[keep], self.arguments)
        part = Convolution(self._slabs, self._slabs, self.arguments)
        part._slabs, part._whitened_by = self._slabs[:, keep], self._whitened_by
        part.rounding = 0.0
        return part

    # -- how -----------------------------------------------------------------------------------------------

    def _form(self, early: Factor | None, late: Factor | None, *, keep: bool) -> Tensor:
        """Form the gradients some examples at a time and return their square norms.

        Args:
            early: Whitens the output gradient before the product.
            late: Whitens the gradient after it.
            keep: Keep the gradients (whitened early, not late), as slabs (offsets, n · groups, columns, rows).
        """
        n, groups, offsets = len(self.x), self.arguments.groups, self._offsets
        rows, columns = self.shape[0] // groups, prod(self.shape[1:]) // offsets
        delta = self.delta.reshape(n * groups, rows, -1)
        norms = []
        kept = self._room.lend(self, delta, (offsets, n * groups, columns, rows)) if keep else None
        together = kept is not None and kept.numel() <= _FEW
        for first, last, patches in self._patches():
            part = slice(first * groups, last * groups)
            out = delta.new_empty(offsets, part.stop - part.start, columns, rows) if kept is None else kept[:, part]
            left = delta[part] if early is None else early.whiten(delta[part], axis=-2)
            for offset, columns_of_offset in enumerate(patches):
                torch.bmm(columns_of_offset, left.transpose(1, 2), out=out[offset])
            if not together:  # while in cache
                norms.append(_slab_norms(out, last - first, late))
        if kept is not None:
            if together:
                norms.append(_slab_norms(kept, n, late))
            self._slabs, self._whitened_by = kept.view(offsets, n, groups * columns, rows), early
            self.rounding = 0.0  # norm and sum see the same numbers
            del self.x, self.delta
        return (norms[0] if len(norms) == 1 else torch.cat(norms, 1)).square_().sum(0)

    def worth_keeping(self) -> bool:
        """Tell whether to keep the gradients for the sum, or to keep what they are made of and sum natively.

        On a CPU the second product costs more than the memory; on a GPU the smaller of the two is kept.
        """
        if self.delta.device.type == "cpu":
            return True
        return prod(self.shape) * len(self.x) <= self.x.numel() + self.delta.numel()

    def _as_weight(self, slabs: Tensor) -> Tensor:
        """Bring slabs (offsets, n, groups · channels · rest of the kernel, rows) in the weight's own order."""
        (channels, *kernel), groups = self.shape[1:], self.arguments.groups
        apart = slabs.view(*slabs.shape[:2], groups, channels, *kernel[self._offsets > 1 :], slabs.shape[-1])
        apart = apart[0] if self._offsets == 1 else apart.movedim(0, 3)
        return apart.movedim(-1, 2).flatten(1, 2)

    def gram_is_cheaper(self) -> bool:
        """Tell whether norms are taken by the Gram trick: in full precision, no gradient formed."""
        if self._slabs is not None or self.arguments.groups > 1:
            return False
        rows, columns, positions = self.shape[0], prod(self.shape[1:]), prod(self.delta.shape[2:])
        return positions * (rows + columns) < rows * columns

    def _gram_norms(self, factor: Factor | None) -> Tensor:
        squares = []
        for first, last, grams in self._patch_grams():
            left = self.delta[first:last].flatten(2).transpose(1, 2)
            if factor is not None:
                left = factor.whiten(left)
            lefts = torch.bmm(left, left.transpose(1, 2))
            traces = [gram.diagonal(dim1=1, dim2=2).sum(1).clamp_(min=LEAST_SQUARE) for gram in (lefts, grams)]
            room = traces[0] * traces[1] * gram_rounding(left, left.shape[1] + self.shape[0] + prod(self.shape[1:]))
            squares.append(grams.mul_(lefts).sum((1, 2)).clamp_(min=0).add_(room))
        return squares[0] if len(squares) == 1 else torch.cat(squares)

    def _patch_grams(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield ``(first, last, grams)``: for some examples, the products of all patches with each other.

        Patches that start at p and q meet position by position: their product is that of the input's positions p + d
        and q + d, summed over the kernel's offsets d. So the input's own products are enough, in all places that a
        kernel shifts them to, unless the kernel's stride leaves out most of them.
        """
        x, arguments, out = self.x, self.arguments, self.delta.shape[2:]
        sizes = self._padded_sizes()
        if prod(sizes) ** 2 >= prod(out) ** 2 * prod(self.shape[2:]):
            for first, last, patches in self._patches():
                rights = [columns.transpose(1, 2) for columns in patches]
                grams = torch.bmm(rights[0], rights[0].transpose(1, 2))
                for right in rights[1:]:
                    grams.baddbmm_(right, right.transpose(1, 2))
                yield first, last, grams
            return
        chunk = max(1, _buffer(x) // prod(sizes) ** 2)
        around = [pad for pad in reversed(arguments.padding) for _ in range(2)]
        for first in range(0, len(x), chunk):
            part = x[first : first + chunk]
            flat = F.pad(part, around).flatten(2) if any(around) else part.flatten(2)
            whole = torch.bmm(flat.transpose(1, 2), flat).view(len(part), *sizes, *sizes)
            grams = whole.new_zeros(len(part), *out, *out)
            for offset in itertools.product(*(range(size) for size in self.shape[2:])):
                shifted = whole
                for axis, (start, size) in enumerate(zip(offset, out, strict=True)):
                    stride, begin = arguments.stride[axis], start * arguments.dilation[axis]
                    places = slice(begin, begin + stride * (size - 1) + 1, stride)
                    shifted = shifted[(slice(None),) * (1 + axis) + (places,)]
                    shifted = shifted[(slice(None),) * (1 + len(out) + axis) + (places,)]
                grams += shifted
            yield first, first + len(part), grams.view(len(part), prod(out), prod(out))

    def _native_sum(self, weights: Tensor) -> Tensor:
        arguments = self.arguments
        weights = weights.to(self.delta.dtype).view(-1, *[1] * (self.delta.dim() - 1))
        # with its axes in the input's order in memory: else torch would copy it into that
        delta = torch.mul(self.delta, weights, out=_empty(self.delta, in_order_of=self.x))
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

    def _padded_sizes(self) -> list[int]:
        return [size + 2 * pad for size, pad in zip(self.x.shape[2:], self.arguments.padding, strict=True)]

    def _patches(self) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Yield ``(first, last, patches)``: for some examples, the patches of each offset.

        Patches have shape ``(examples * groups, columns, positions)``, contiguous positions, and lie in one buffer
        that is used again.
        """
        arguments, x = self.arguments, self.x
        out, kernel, slabs = self.delta.shape[2:], self.shape[2:], self._offsets > 1
        sizes = self._padded_sizes()
        n, columns = len(x), (x.shape[1], *((*kernel[1:], sizes[0], *out[1:]) if slabs else (*kernel, *out)))
        chunk = max(1, min(n, _buffer(x) // max(prod(columns), prod(self.shape), 1)))
        padded, inside = x, x
        if any(arguments.padding):  # some examples at a time too: a padded copy of all would be larger than the input
            padded = inside = x.new_zeros(chunk, x.shape[1], *sizes)
            for axis, pad in enumerate(arguments.padding, start=2):
                inside = inside.narrow(axis, pad, x.shape[axis])
        axes = range(1 if slabs else 0, len(kernel))
        view = padded
        for axis in axes:  # windows go last: (examples, channels, positions …, kernel …)
            reach = (kernel[axis] - 1) * arguments.dilation[axis] + 1
            view = view.unfold(2 + axis, reach, arguments.stride[axis])[..., :: arguments.dilation[axis]]
        view = view.movedim(list(range(-len(axes), 0)), list(range(2, 2 + len(axes)))) if axes else view
        buffer = x.new_empty(chunk, *columns)
        across = prod(out[1:])
        for first in range(0, n, chunk):
            last = min(n, first + chunk)
            source = view[first:last]
            if padded is not x:
                inside[: last - first].copy_(x[first:last])
                source = view[: last - first]
            part = buffer[: last - first].copy_(source)
            examples = (last - first) * arguments.groups
            if not slabs:
                yield first, last, [part.view(examples, -1, prod(out))]
                continue
            flat = part.view(examples, -1, sizes[0] * across)
            starts = [offset * arguments.dilation[0] * across for offset in range(kernel[0])]
            yield first, last, [flat[:, :, start : start + out[0] * across] for start in starts]


def _slab_norms(slabs: Tensor, examples: int, whitening: Factor | None) -> Tensor:
    """Return the norms of gradients (offsets, examples · groups, columns, rows), slab by slab."""
    offsets, rows = len(slabs), slabs.shape[-1]
    if whitening is not None:
        slabs = whitening.whiten(slabs.reshape(-1, rows))
    # along contiguous memory only, which is twice as fast
    return torch.linalg.vector_norm(slabs.view(offsets, examples, -1), dim=2)


def _empty(like: Tensor, *, in_order_of: Tensor) -> Tensor:
    """Return room for a tensor, channels last in memory if those of another one are."""
    last = in_order_of.dim() == 4 and in_order_of.is_contiguous(memory_format=torch.channels_last)
    kind = torch.channels_last if last and not in_order_of.is_contiguous() else torch.contiguous_format
    return torch.empty_like(like, memory_format=kind)


def _buffer(x: Tensor) -> int:
    """Return how many elements to work on at once where x is."""
    return _CPU_BUFFER * torch.get_num_threads() if x.device.type == "cpu" else _GPU_BUFFER
