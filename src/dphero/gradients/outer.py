"""Sums of outer products: the weights of linear layers, and their biases."""

from __future__ import annotations

import torch
from torch import Tensor

from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Geometry
from dphero.gradients.piece import Explicit, Piece, join, whitened, whitened_squares
from dphero.gradients.rounding import gram_rounding, rounding
from dphero.numerics.buffers import RefCountedBuffer
from dphero.numerics.partial_norms import LEAST_SQUARE, PartialNorm, rank_one_norms, square_norms
from dphero.numerics.precision import matmul_tf32

__all__ = ["Bias", "Outer"]


class Outer(Piece):
    """A sum of outer products: g_i = Σ_t left_it right_itᵀ, seen as a matrix of shape (k, m).

    Args:
        left: Shape ``(n, T, k)`` or ``(n, k)``; the output gradient of a linear layer.
        right: Shape ``(n, T, m)`` or ``(n, m)``; its input.
        shape: The parameter's own shape, ``(k, m)`` unless given.
        room: Where to put the sum.
    """

    def __init__(
        self, left: Tensor, right: Tensor, shape: torch.Size | None = None, room: RefCountedBuffer | None = None
    ) -> None:
        self.left = left if left.dim() == 3 else left.unsqueeze(1)
        self.right = right if right.dim() == 3 else right.unsqueeze(1)
        self.shape = shape or torch.Size((left.shape[-1], right.shape[-1]))
        self._room = room
        self._kept: Tensor | None = None
        self._left_squares: tuple[Factor | None, Tensor] | None = None
        self._left_lengths: tuple[Factor | None, PartialNorm] | None = None
        self._left_total: tuple[Tensor, Tensor] | None = None
        self.has_bias = False
        self.rounding = rounding(left)

    def instantiate(self) -> Tensor:
        if self._kept is None:
            self._kept = torch.bmm(self.left.transpose(1, 2), self.right).reshape(len(self.left), *self.shape)
        return self._kept

    def square_norms(self, geometry: Geometry) -> Tensor:
        _, positions, rows = self.left.shape
        columns = self.right.shape[-1]
        if geometry.flat is not None:
            return whitened_squares(self.instantiate(), geometry)
        if positions == 1:
            return rank_one_norms({"": self.lengths(geometry)})[""]
        if positions * (rows + columns) < rows * columns:
            squares, room = self.gram_squares(geometry)
            return squares.clamp_(min=0).add_(room)
        return whitened_squares(self.instantiate(), geometry)

    def lengths(self, geometry: Geometry) -> tuple[PartialNorm, ...]:
        """Return what the norms of left and right are made of, where g_i is a single product: ``(left, right)``.

        That is all that has to be done while the two are at hand; :func:`rank_one_norms` does the rest. Empty where g_i
        is a sum, or is not whitened from left and right.
        """
        if geometry.flat is not None or self.left.shape[1] != 1:
            return ()
        return self.left_lengths(geometry.left), _lengths(geometry.right, self.right[:, 0])

    def left_lengths(self, factor: Factor | None) -> PartialNorm:
        """Return what the norms of left, and so those of the layer's bias, are made of."""
        if self._left_lengths is None or self._left_lengths[0] is not factor:
            self._left_lengths = (factor, _lengths(factor, self.left[:, 0]))
        return self._left_lengths[1]

    def gram_squares(self, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Return Σ_{t,s} ⟨l_t, l_s⟩⟨r_t, r_s⟩, and how much of it rounding may have swallowed."""
        left, right = whitened(geometry.left, self.left), whitened(geometry.right, self.right)
        with matmul_tf32(left, allow=False):
            lefts, rights = torch.bmm(left, left.transpose(1, 2)), torch.bmm(right, right.transpose(1, 2))
        left_lengths, right_lengths = (
            grams.diagonal(dim1=1, dim2=2).clamp(min=LEAST_SQUARE).sqrt() for grams in (lefts, rights)
        )
        terms, positions = self.left.shape[-1] + self.right.shape[-1], self.left.shape[1]
        if self.has_bias:
            room = left_lengths.sum(1).square() * gram_rounding(left, positions + self.left.shape[-1])
            self._left_squares = (geometry.left, lefts.sum((1, 2)).clamp_(min=0).add_(room))
        # Σ_{t,s} |⟨l_t, l_s⟩⟨r_t, r_s⟩| ≤ (Σ_t ‖l_t‖‖r_t‖)². The product of the traces bounds that too, but pairs the
        # left of one position with the right of another. Where a parameter is on both sides of a product
        # (softmax(h @ q.T) @ q) these are two activations, thousands of times larger than any gradient.
        room = (left_lengths * right_lengths).sum(1).square() * gram_rounding(left, positions + terms)
        return lefts.mul_(rights).sum((1, 2)), room

    def left_squares(self, factor: Factor | None) -> Tensor:
        """Return ‖L⁻¹ Σ_t left_it‖²: what the layer's bias adds, mostly known already."""
        if self._left_squares is None or self._left_squares[0] is not factor:
            self._left_squares = (factor, square_norms([_lengths(factor, self.left.sum(1))])[0])
        return self._left_squares[1]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._kept is not None:
            return Explicit(self._kept).weighted_sum(weights)
        left, right, spread = self.left, self.right, weights.to(self.left.dtype)[:, None, None]
        if 2 * right.shape[-1] <= left.shape[-1]:  # a copy is made of the smaller one
            right = right * spread
        else:
            left = left * spread
            if self.has_bias:  # while it is at hand
                self._left_total = (weights, left.flatten(0, 1).sum(0))
        left, right = left.flatten(0, 1).T, right.flatten(0, 1)
        room = None if self._room is None else self._room.lend(left, left.shape[0], right.shape[1])
        return torch.mm(left, right, out=room).reshape(self.shape)

    def weighted_left_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_it weights_i left_it: the sum for the layer's bias."""
        if self._left_total is None or self._left_total[0] is not weights:
            left = self.left[:, 0] if self.left.shape[1] == 1 else self.left.sum(1)
            self._left_total = (weights, weights.to(left.dtype) @ left)
        return self._left_total[1]

    def take(self, keep: Tensor) -> Outer:
        return Outer(self.left[keep], self.right[keep], self.shape)

    def folded(self, fold: int) -> Outer:
        if fold == 1:
            return self
        return Outer(join(self.left, fold), join(self.right, fold), self.shape)


class Bias(Piece):
    """The bias beside an outer piece: g_i = Σ_t left_it."""

    def __init__(self, outer: Outer) -> None:
        self.outer = outer
        outer.has_bias = True
        self.shape = outer.left.shape[-1:]

    def instantiate(self) -> Tensor:
        left = self.outer.left
        return left[:, 0] if left.shape[1] == 1 else left.sum(1)

    def square_norms(self, geometry: Geometry) -> Tensor:
        if geometry.flat is not None:
            return whitened_squares(self.instantiate(), geometry)
        if lengths := self.lengths(geometry):
            return rank_one_norms({"": lengths})[""]
        return self.outer.left_squares(geometry.left)

    def lengths(self, geometry: Geometry) -> tuple[PartialNorm, ...]:
        """Return what the norms are made of, beside a single product: ``(left,)``. See :meth:`Outer.lengths`."""
        if geometry.flat is not None or self.outer.left.shape[1] != 1:
            return ()
        return (self.outer.left_lengths(geometry.left),)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.outer.weighted_left_sum(weights)

    def take(self, keep: Tensor) -> Piece:
        return Explicit(self.instantiate()[keep])

    def folded(self, fold: int) -> Piece:
        return self if fold == 1 else Bias(self.outer.folded(fold))


def _lengths(factor: Factor | None, x: Tensor) -> PartialNorm:
    return PartialNorm(torch.linalg.vector_norm(x, dim=-1)) if factor is None else factor.lengths(x)
