"""Sums of outer products: the weights of linear layers, and their biases."""

from __future__ import annotations

import torch
from torch import Tensor

from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Geometry
from dphero.gradients.gram import GramNorms, gram_norms, inner_products
from dphero.gradients.piece import Explicit, Piece, join, weighted_rows, whitened_squares
from dphero.numerics.buffers import RefCountedBuffer
from dphero.numerics.partial_norms import PartialNorm, rank_one_norms, square_norms
from dphero.numerics.precision import at_least_single, widened
from dphero.numerics.products import WEIGHT_ROUNDING, aligned, multiplied_short, product, weighted_in_two


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
        dtype = torch.promote_types(left.dtype, right.dtype)
        left, right = left.to(dtype), right.to(dtype)
        self.left = aligned(left if left.dim() == 3 else left.unsqueeze(1))
        self.right = aligned(right if right.dim() == 3 else right.unsqueeze(1))
        self.shape = shape or torch.Size((left.shape[-1], right.shape[-1]))
        self._room = room
        self._kept: Tensor | None = None
        self._left_squares: tuple[Factor | None, Tensor] | None = None
        self._left_lengths: tuple[Factor | None, PartialNorm] | None = None
        self._left_total: tuple[Tensor, Tensor] | None = None
        self.has_bias = False
        self.rounding = WEIGHT_ROUNDING if multiplied_short(left) else 0.0

    def instantiate(self) -> Tensor:
        if self._kept is None:
            self._kept = product(self.left.transpose(1, 2), self.right).reshape(len(self.left), *self.shape)
            self.rounding = 0.0
        return self._kept

    def square_norms(self, geometry: Geometry) -> Tensor:
        if geometry.flat is not None:
            return whitened_squares(self.instantiate(), geometry)
        if self.left.shape[1] == 1:
            return rank_one_norms({"": self.lengths(geometry)})[""]
        if self.gram_is_cheaper():
            return self.gram_norms(geometry).at_most
        return whitened_squares(self.instantiate(), geometry)

    def gram_is_cheaper(self) -> bool:
        """Tell whether norms are taken from left and right: no gradient formed."""
        positions, rows, columns = *self.left.shape[1:], self.right.shape[-1]
        return positions * (rows + columns) < rows * columns

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

    def gram_norms(self, geometry: Geometry) -> GramNorms:
        """Return the norms, and how much of them rounding may have taken; nothing is formed."""
        sides = inner_products(geometry.left, self.left), inner_products(geometry.right, self.right)
        found, of_left = gram_norms(*sides, of_left=self.has_bias)
        if of_left is not None:
            self._left_squares = (geometry.left, of_left.at_most)
        return found

    def left_squares(self, factor: Factor | None) -> Tensor:
        """Return ‖L⁻¹ Σ_t left_it‖²: what the layer's bias adds, mostly known already."""
        if self._left_squares is None or self._left_squares[0] is not factor:
            self._left_squares = (factor, square_norms([_lengths(factor, _total(self.left))])[0])
        return self._left_squares[1]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._kept is not None:
            return Explicit(self._kept).weighted_sum(weights)
        left, right, of_right = self.left, self.right, 2 * self.right.shape[-1] <= self.left.shape[-1]
        if multiplied_short(left):
            near, rest = weighted_in_two(right if of_right else left, weights)  # a copy is made of the smaller one
            if of_right:
                return self._summed(left, near).sub_(self._summed(left, rest))
            return self._summed(near, right).sub_(self._summed(rest, right))
        spread = weights.to(at_least_single(left.dtype))[:, None, None]
        if of_right:
            return self._summed(left, right * spread)
        left = left * spread
        if self.has_bias:  # while it is at hand
            self._left_total = (weights, left.flatten(0, 1).sum(0))
        return self._summed(left, right)

    def _summed(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the sum of all outer products."""
        left, right = left.flatten(0, 1).T, right.flatten(0, 1)
        room = None
        if self._room is not None and left.dtype == right.dtype == at_least_single(left.dtype):
            room = self._room.lend(left, left.shape[0], right.shape[1])
        return product(left, right, room).reshape(self.shape)

    def weighted_left_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_it weights_i left_it: the sum for the layer's bias."""
        if self._left_total is None or self._left_total[0] is not weights:
            self._left_total = (weights, weighted_rows(_total(self.left), weights))
        return self._left_total[1]

    def take(self, keep: Tensor | slice) -> Piece:
        if self._kept is not None:
            return Explicit(self._kept[keep])
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
        return _total(self.outer.left)

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

    def take(self, keep: Tensor | slice) -> Piece:
        return Explicit(self.instantiate()[keep])

    def folded(self, fold: int) -> Piece:
        return self if fold == 1 else Bias(self.outer.folded(fold))


def _total(x: Tensor) -> Tensor:
    """Return the sum over positions, in float32 at least."""
    return widened(x[:, 0]) if x.shape[1] == 1 else x.sum(1, dtype=at_least_single(x.dtype))


def _lengths(factor: Factor | None, x: Tensor) -> PartialNorm:
    if factor is not None:
        return factor.lengths(x)
    return PartialNorm(torch.linalg.vector_norm(x, dim=-1, dtype=at_least_single(x.dtype)))
