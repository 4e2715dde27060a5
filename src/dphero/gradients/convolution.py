"""Per-example gradients of a convolution: a linear layer over the patches of its input, G_i = δ_i · patches(x_i)ᵀ.

For some examples at a time, patches are copied; then the per-example gradient is one batched product.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor
from torch.backends import cudnn

from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Geometry
from dphero.gradients.gram import gram_of, gram_rounding, inner_products
from dphero.gradients.patches import GPU_BUFFER, ConvolutionArguments, Patches, one_above_another
from dphero.gradients.piece import Explicit, Piece
from dphero.numerics.buffers import ReusableBuffer
from dphero.numerics.partial_norms import LEAST_SQUARE
from dphero.numerics.precision import at_least_single, conv_tf32, matmul_tf32, widened
from dphero.numerics.products import WEIGHT_ROUNDING, multiplied_short, product, weighted_in_two

_KEPT = 4
"""On a GPU, gradients are kept that take up to so many times the memory of what they are made of: otherwise they are
formed in full precision, and their sum is as much work again. In shorter formats neither is slow, and the smaller of
the two is kept."""
_FEW = 1 << 20
"""Elements of gradients whose norms are taken all together: they are still in some cache when the last is formed."""
_ROUNDINGS = 32
"""Units of rounding that a sum in full precision may be off by, of what its terms add up to without their signs."""


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
        dtype = torch.promote_types(x.dtype, delta.dtype)
        self.x, self.delta, self.arguments = x.to(dtype), delta.to(dtype), arguments
        self._room = room or ReusableBuffer()
        self.shape = arguments.weight_shape
        self._slabs: Tensor | None = None
        self._whitened_by: Factor | None = None
        # where all patches fit at once, a GPU gains more from fewer operations than from less copying
        patches = len(x) * arguments.groups * prod(self.shape[1:]) * prod(delta.shape[2:])
        whole = arguments.stride[0] > 1 or (x.device.type != "cpu" and patches <= GPU_BUFFER)
        self._offsets = 1 if whole else self.shape[2]

    @property
    def rounding(self) -> float:  # type: ignore[override]
        """See :class:`~dphero.gradients.piece.Piece`."""
        return WEIGHT_ROUNDING if self._slabs is None and self._is_summed_short() else 0.0

    # -- the three questions -------------------------------------------------------------------------------

    def square_norms(self, geometry: Geometry) -> Tensor:
        if geometry.flat is not None or geometry.right is not None or self.arguments.groups > 1:
            return Explicit(self.instantiate()).square_norms(geometry)
        if self.gram_is_cheaper():
            return self._gram_norms(geometry.left)
        # whitening acts on positions, in a product for each example, or on columns, in one for all
        early, keep = 2 * prod(self.delta.shape[2:]) < prod(self.shape[1:]), self.worth_keeping()
        early = early and self.delta.dtype == at_least_single(self.delta.dtype)
        squares = self._form(*((geometry.left, None) if early else (None, geometry.left)), keep=keep)
        if keep:
            return squares
        # the sum rounds in its own way: what cancels in one of the two may be left in the other
        return squares.sqrt_().add_(self.lost_in_sums() / geometry.smallest).square_()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._slabs is not None:
            total = _weighted(self._slabs, weights)
            if self._whitened_by is not None:
                total = self._whitened_by.colour(total)
            return self._as_weight(total)[0].contiguous()
        return self._short_sum(weights) if self._is_summed_short() else self._native_sum(weights)

    def lost_in_sums(self) -> Tensor:
        """Return what sums in full precision may lose of each gradient that is not kept.

        Its terms are δ times patches of x, whatever they cancel to (Cauchy-Schwarz).
        """
        dtype = at_least_single(self.x.dtype)
        sizes = [torch.linalg.vector_norm(each.flatten(1), dim=1, dtype=dtype) for each in (self.x, self.delta)]
        return sizes[0] * sizes[1] * (_ROUNDINGS * torch.finfo(dtype).eps * prod(self.shape[2:]) ** 0.5)

    def forming_error(self) -> float:
        """Return the relative error of products where gradients are formed: TF32's, as in torch's own convolutions.

        It is used where gradients are kept, so that norm and sum see the same; else all products are in full precision.
        """
        short = self.delta.is_cuda and self.delta.dtype == torch.float32 and cudnn.allow_tf32
        return 2.0**-9 if short and self.worth_keeping() else 0.0

    @property
    def is_formed(self) -> bool:
        """Whether the gradients were formed and kept: their sum is one of these."""
        return self._slabs is not None

    def instantiate(self) -> Tensor:
        if self._slabs is None:
            self._form(None, None, keep=True)
        assert self._slabs is not None and self._whitened_by is None
        self._room.forget()  # what is returned may outlive this piece
        return self._as_weight(self._slabs)

    def take(self, keep: Tensor | slice) -> Convolution:
        if self._slabs is None:
            return Convolution(self.x[keep], self.delta[keep], self.arguments)
        part = Convolution(self._slabs, self._slabs, self.arguments)
        part._slabs, part._whitened_by = self._slabs[:, keep], self._whitened_by
        return part

    def folded(self, fold: int) -> Piece:
        if fold == 1 or self._slabs is not None:
            return super().folded(fold)
        return Convolution(*one_above_another(self.x, self.delta, self.arguments, fold), self.arguments, self._room)

    def some_at_a_time(self, n: int, count: int) -> Iterator[Tensor]:
        if self._slabs is not None or self.arguments.groups > 1 or (self.delta.is_cuda and self.worth_keeping()):
            yield from self.instantiate().split(count)  # and so the sum is one of these
            return
        delta = self.delta.flatten(2)  # in the weight's order in memory: to turn a slab takes longer than to form it
        for first, last, (patches,) in Patches(self.x, self.arguments, self.delta.shape[2:], 1).some(count):
            yield product(delta[first:last], patches.mT).view(last - first, *self.shape)

    # -- how -----------------------------------------------------------------------------------------------

    def _form(self, early: Factor | None, late: Factor | None, *, keep: bool) -> Tensor:
        """Form the gradients some examples at a time and return their square norms.

        Args:
            early: Whitens the output gradient before the product.
            late: Whitens the gradient after it.
            keep: Keep the gradients (whitened early, not late), as slabs (offsets, n · groups, columns, rows).
        """
        n, groups = len(self.x), self.arguments.groups
        norms = []
        kept = None
        if keep:
            like = self.delta.new_empty(0, dtype=at_least_single(self.delta.dtype))
            kept = self._room.lend(self, like, self._slab_shape(n * groups))
        together = kept is not None and kept.numel() <= _FEW
        for first, last, formed in self._formed(early, kept):
            if not together:  # while in cache
                norms.append(_slab_norms(formed, last - first, late))
        if kept is not None:
            if together:
                norms.append(_slab_norms(kept, n, late))
            rows = kept.shape[-1]
            self._slabs, self._whitened_by = kept.view(len(kept), n, -1, rows), early
            del self.x, self.delta
        return (norms[0] if len(norms) == 1 else torch.cat(norms, 1)).square_().sum(0)

    def _formed(self, early: Factor | None, into: Tensor | None) -> Iterator[tuple[int, int, Tensor]]:
        """Yield ``(first, last, gradients)``: for some examples, their slabs, put into ``into`` if that is given."""
        groups, rows = self.arguments.groups, self.shape[0] // self.arguments.groups
        delta = self.delta.reshape(len(self.x) * groups, rows, prod(self.delta.shape[2:]))
        buffer, tf32 = None, self.forming_error() > 0
        for first, last, patches in self._patches().some():
            part = slice(first * groups, last * groups)
            if into is not None:
                out = into[:, part]
            else:
                if buffer is None:
                    dtype = at_least_single(delta.dtype)
                    buffer = delta.new_empty(self._slab_shape(part.stop - part.start), dtype=dtype)
                out = buffer[:, : part.stop - part.start]
            left = delta[part] if early is None else early.whiten(delta[part], axis=-2)
            for offset, columns_of_offset in enumerate(patches):
                product(columns_of_offset, left.transpose(1, 2), out[offset], tf32=tf32)
            yield first, last, out

    def _slab_shape(self, count: int) -> tuple[int, ...]:
        """Return the shape of the slabs of some examples and groups: (offsets, examples · groups, columns, rows)."""
        return self._offsets, count, prod(self.shape[1:]) // self._offsets, self.shape[0] // self.arguments.groups

    def _patches(self) -> Patches:
        return Patches(self.x, self.arguments, self.delta.shape[2:], self._offsets)

    def worth_keeping(self) -> bool:
        """Tell whether to keep the gradients for the sum, or to keep what they are made of and sum natively.

        On a CPU the second product costs more than the memory.
        """
        if self.delta.device.type == "cpu":
            return True
        most = _KEPT if self.delta.dtype == at_least_single(self.delta.dtype) else 1
        return prod(self.shape) * len(self.x) <= most * (self.x.numel() + self.delta.numel())

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
        terms = prod(self.delta.shape[2:]) + self.shape[0] + prod(self.shape[1:])
        for first, last, grams in self._patches().grams():
            side = inner_products(factor, self.delta[first:last].flatten(2).transpose(1, 2))
            lefts, left_squares = gram_of(side, side)
            right_squares = grams.diagonal(dim1=1, dim2=2).clamp(min=LEAST_SQUARE)
            room = left_squares.sum(1) * right_squares.sum(1) * (gram_rounding(lefts, terms) * side.stretch**2)
            squares.append((grams.mul_(lefts).sum((1, 2)).clamp_(min=0) + room) * side.scale**2)
        return squares[0] if len(squares) == 1 else torch.cat(squares)

    def _is_summed_short(self) -> bool:
        return self.arguments.groups == 1 and multiplied_short(self.delta)

    def _short_sum(self, weights: Tensor) -> Tensor:
        """Return the sum by products in bfloat16, added up in float32: one for all examples of a chunk."""
        rows, total = self.shape[0], None
        for first, last, patches in self._patches().beside_each_other():
            left = weighted_in_two(self.delta[first:last].flatten(2).transpose(0, 1), weights[first:last], axis=1)
            found = product(torch.stack(left).view(2 * rows, -1), patches.mT)
            total = found if total is None else total.add_(found)
        if total is None:
            return weights.new_zeros(self.shape, dtype=torch.float32)
        return (total[:rows] - total[rows:]).view(self.shape)

    def _native_sum(self, weights: Tensor) -> Tensor:
        arguments, x = self.arguments, widened(self.x)
        delta = widened(self.delta)
        weights = weights.to(delta.dtype).view(-1, *[1] * (delta.dim() - 1))
        # with its axes in the input's order in memory: else torch would copy it into that
        delta = torch.mul(delta, weights, out=_empty(delta, in_order_of=x))
        with conv_tf32(x, allow=False):
            _, gradient, _ = torch.ops.aten.convolution_backward(
                delta,
                x,
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


def _weighted(slabs: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_i weights_i of slabs (offsets, n, columns, rows), of shape (offsets, 1, columns, rows)."""
    spread = weights.to(slabs.dtype).expand(len(slabs), 1, -1)
    with matmul_tf32(slabs, allow=False):
        return torch.bmm(spread, slabs.flatten(2)).view(len(slabs), 1, *slabs.shape[2:])


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
