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
from dphero.numerics.precision import at_least_single, conv_tf32, matmul_tf32, widened

_ROUNDING = 6
"""Units of rounding, times √terms, that two products of a row lose together, at most: four each, at right angles."""


def norms_need_no_gradient(piece: Piece) -> bool:
    """Tell whether norms of this piece are taken from what it is made of, which is cheaper than forming it."""
    if type(piece) is Convolution:
        return piece.gram_is_cheaper()
    return type(piece) is Outer and len(piece.shape) == 2 and piece.gram_is_cheaper()


def scaled_square_norms(piece: Piece, scales: Tensor) -> Tensor:
    """Return Σ_a scales_a² ‖g_ia‖² for each example, not too small."""
    left, right = _sides(piece)
    if isinstance(piece, Convolution):
        scaled: Piece = Convolution(right, _scaled(left, scales).view(piece.delta.shape), piece.arguments)
    else:
        scaled = Outer(_scaled(left, scales).mT, right)
    return scaled.square_norms(identity(tuple(piece.shape)))


def row_products(piece: Piece, vectors: Tensor) -> Tensor:
    """Return ⟨g_ia, v_a⟩, of shape ``(n, rows)``, for vectors of shape ``(rows, columns)``."""
    left, right = _sides(piece)
    return (_times(piece, right, vectors) * left).sum(2)


def row_totals(piece: Piece) -> Tensor:
    """Return Σ_b g_iab, of shape ``(n, rows)``."""
    left, right = _sides(piece)
    with matmul_tf32(left, allow=False):
        return torch.bmm(left, _totals(piece, right).unsqueeze(2))[:, :, 0]


def longest(piece: Piece, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_t ‖l_it‖ ‖r_it‖ for each example, and the same with rows scaled: no sum over t is longer."""
    left, right = _sides(piece)
    of_right = _totals(piece, right.square()).clamp_(min=LEAST_SQUARE).sqrt_()
    plain, scaled = (torch.linalg.vector_norm(x, dim=1) for x in (left, _scaled(left, scales)))
    return (plain * of_right).sum(1), (scaled * of_right).sum(1)


def relative_rounding(piece: Piece) -> float:
    """Return what rounding may make of two products of each row, of what is :func:`longest`."""
    left, _ = _sides(piece)
    terms = left.shape[2] + prod(piece.shape) // piece.shape[0]
    return _ROUNDING * torch.finfo(left.dtype).eps * math.sqrt(terms)


def _times(piece: Piece, right: Tensor, vectors: Tensor) -> Tensor:
    """Return ⟨r_it, v⟩ of each vector, of shape (n, vectors, T)."""
    vectors = vectors.to(right.dtype)
    if isinstance(piece, Convolution):
        return _convolved(piece, right, vectors.view(-1, *piece.shape[1:]))
    with matmul_tf32(right, allow=False):
        return (right @ vectors.T).mT


def _totals(piece: Piece, right: Tensor) -> Tensor:
    """Return the sum of each r_it, of shape (n, T)."""
    if not isinstance(piece, Convolution):
        return right.sum(2)
    return _convolved(piece, right.sum(1, keepdim=True), right.new_ones(1, 1, *piece.shape[2:]))[:, 0]


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


def _scaled(left: Tensor, scales: Tensor) -> Tensor:
    return left * scales.to(at_least_single(left.dtype)).view(-1, 1)
