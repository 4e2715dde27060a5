"""Products of each row of per-example gradients with vectors, and norms of scaled rows, with nothing formed.

Row a of g_i = Σ_t l_it r_itᵀ has the product ⟨g_ia, v_a⟩ = Σ_t l_ita ⟨r_it, v_a⟩. Of a convolution, the ⟨r, v⟩ are
another convolution of the same input. Rows that are scaled are those of scaled l.
"""

from __future__ import annotations

import math
from math import prod

import torch
from torch import Tensor

from dphero.geometry.geometry import identity
from dphero.gradients.convolution import Convolution
from dphero.gradients.outer import Outer
from dphero.gradients.piece import Piece
from dphero.numerics.partial_norms import LEAST_SQUARE
from dphero.numerics.precision import conv_tf32, matmul_tf32, widened

ROUNDING = 6
"""Units of rounding, times √terms, that two products of a row lose together, at most: four each, at right angles."""


def norms_need_no_gradient(piece: Piece) -> bool:
    """Tell whether norms of this piece are taken from what it is made of, which is cheaper than forming it."""
    if type(piece) is Convolution:
        return piece.gram_is_cheaper()
    return type(piece) is Outer and len(piece.shape) == 2 and piece.gram_is_cheaper()


class RowFactors:
    """What is taken of the factors l and r of the g_i.

    Args:
        piece: The g_i.
        vectors: One for each row, of shape ``(rows, columns)``.
    """

    def __init__(self, piece: Piece, vectors: Tensor) -> None:
        self._piece, self._vectors = piece, vectors
        self._shape = piece.delta.shape if isinstance(piece, Convolution) else None
        self._left, self._right = _sides(piece)
        self._totals, squares = _totals(piece, self._right)
        self._lengths = squares.clamp_(min=LEAST_SQUARE).sqrt_()

    def products(self, *lefts: Tensor) -> list[Tensor]:
        """Return the products of each row with a unit vector of equal numbers and with its own vector.

        Their shape is ``(rows, n, 2)``: of the g_i first, then of those with each of ``lefts`` instead of l.
        """
        along, equal = _times(self._piece, self._right, self._vectors), self._vectors.shape[1] ** -0.5
        totals, found = (self._totals * equal).unsqueeze(2), []
        for left in (self._left, *lefts):
            with matmul_tf32(left, allow=False):
                of_totals = torch.bmm(left, totals)[:, :, 0]
            found.append(torch.stack([of_totals, (along * left).sum(2)], 2).transpose(0, 1))
        return found

    def scaled(self, scales: Tensor) -> Tensor:
        """Return l with each row scaled, of shape ``(n, rows, T)``."""
        return self._left * scales.to(self._left.dtype).view(-1, 1)

    def lengths(self, scales: Tensor) -> Tensor:
        """Return Σ_t ‖scales · l_it‖ ‖r_it‖ for each example: no sum over t is longer."""
        return (torch.linalg.vector_norm(self.scaled(scales), dim=1) * self._lengths).sum(1)

    def square_norms(self, left: Tensor) -> Tensor:
        """Return square norms of gradients with this on the left instead of l, not too small."""
        piece = self._piece
        if isinstance(piece, Convolution) and self._shape is not None:
            other: Piece = Convolution(self._right, left.view(self._shape), piece.arguments)
        else:
            other = Outer(left.mT, self._right)
        return other.square_norms(identity(tuple(piece.shape)))


def relative_rounding(piece: Piece) -> float:
    """Return what rounding may make of two products of each row, of what is :func:`longest`."""
    left, _ = _sides(piece)
    terms = left.shape[2] + prod(piece.shape) // piece.shape[0]
    return ROUNDING * torch.finfo(left.dtype).eps * math.sqrt(terms)


def _times(piece: Piece, right: Tensor, vectors: Tensor) -> Tensor:
    """Return ⟨r_it, v⟩ of each vector, of shape (n, vectors, T)."""
    vectors = vectors.to(right.dtype)
    if isinstance(piece, Convolution):
        return _convolved(piece, right, vectors.view(-1, *piece.shape[1:]))
    with matmul_tf32(right, allow=False):
        return (right @ vectors.T).mT


def _totals(piece: Piece, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of each r_it, and that of its squares, of shape (n, T)."""
    if not isinstance(piece, Convolution):
        return right.sum(2), right.square().sum(2)
    both = torch.cat([right.sum(1, keepdim=True), right.square().sum(1, keepdim=True)])
    found = _convolved(piece, both, right.new_ones(1, 1, *piece.shape[2:]))[:, 0]
    return found[: len(right)], found[len(right) :]


def _convolved(piece: Convolution, x: Tensor, weight: Tensor) -> Tensor:
    """Return a convolution with these weights, of shape (n, rows, T), in full precision."""
    arguments, axes = piece.arguments, x.dim() - 2
    with conv_tf32(x, allow=False):
        return torch.convolution(
            x,
            weight,
            None,
            arguments.stride,
            arguments.padding,
            arguments.dilation,
            False,
            (0,) * axes,
            1,
        ).flatten(2)


def _sides(piece: Piece) -> tuple[Tensor, Tensor]:
    """Return l, of shape ``(n, rows, T)``, and what the r are made of."""
    if isinstance(piece, Convolution):
        return widened(piece.delta).flatten(2), widened(piece.x)
    assert isinstance(piece, Outer)
    return widened(piece.left).mT, widened(piece.right)
