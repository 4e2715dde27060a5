"""Rows of a table: the gradients of embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from dphero.geometry.geometry import Geometry
from dphero.gradients.piece import Piece, join, whitened, whitened_squares
from dphero.gradients.rounding import gram_rounding
from dphero.numerics.precision import matmul_tf32

__all__ = ["Rows"]


class Rows(Piece):
    """Rows of a table: g_i = Σ_t e_{index_it} right_itᵀ, the gradient of an embedding.

    Args:
        index: Shape ``(n, T)``.
        right: Shape ``(n, T, d)``; the output gradient.
        rows: Number of rows of the table.
    """

    def __init__(self, index: Tensor, right: Tensor, rows: int) -> None:
        self.index, self.right, self.rows = index, right, rows
        self.shape = torch.Size((rows, right.shape[-1]))

    def instantiate(self) -> Tensor:
        n, _, d = self.right.shape
        out = self.right.new_zeros(n, self.rows, d)
        return out.scatter_add_(1, self.index.unsqueeze(-1).expand(-1, -1, d), self.right)

    def square_norms(self, geometry: Geometry) -> Tensor:
        if geometry.flat is not None or geometry.left is not None:
            return whitened_squares(self.instantiate(), geometry)
        squares, room = self.gram_squares(geometry)
        return squares.clamp_(min=0).add_(room)

    def gram_squares(self, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Return Σ_{t,s} [index_t = index_s]⟨r_t, r_s⟩, and how much of it rounding may have swallowed."""
        right = whitened(geometry.right, self.right)
        with matmul_tf32(right, allow=False):
            grams, positions = torch.bmm(right, right.transpose(1, 2)), right.shape[1]
        room = grams.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().sum(1).square() * gram_rounding(
            right, positions + right.shape[-1]
        )
        same = self.index.unsqueeze(2) == self.index.unsqueeze(1)
        return grams.mul_(same).sum((1, 2)), room

    def weighted_sum(self, weights: Tensor) -> Tensor:
        right = self.right * weights.to(self.right.dtype)[:, None, None]
        out = right.new_zeros(self.shape)
        return out.index_add_(0, self.index.reshape(-1), right.reshape(-1, right.shape[-1]))

    def take(self, keep: Tensor) -> Rows:
        return Rows(self.index[keep], self.right[keep], self.rows)

    def folded(self, fold: int) -> Rows:
        if fold == 1:
            return self
        return Rows(join(self.index, fold), join(self.right, fold), self.rows)
