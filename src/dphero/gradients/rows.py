"""Rows of a table: the gradients of embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from dphero.geometry.factor import InnerProducts
from dphero.geometry.geometry import Geometry
from dphero.gradients.gram import GramNorms, gram_norms, inner_products
from dphero.gradients.piece import Piece, join, whitened_squares
from dphero.numerics.precision import widened


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
        right = widened(self.right)
        out = right.new_zeros(n, self.rows, d)
        return out.scatter_add_(1, self.index.unsqueeze(-1).expand(-1, -1, d), right)

    def square_norms(self, geometry: Geometry) -> Tensor:
        if geometry.flat is not None or geometry.left is not None:
            return whitened_squares(self.instantiate(), geometry)
        return self.gram_norms(geometry).at_most

    def gram_norms(self, geometry: Geometry) -> GramNorms:
        """Return Σ_{t,s} [index_t = index_s]⟨r_t, r_s⟩, and how much of it rounding may have taken."""
        return gram_norms(InnerProducts(self.index.unsqueeze(2)), inner_products(geometry.right, self.right))[0]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        right = widened(self.right)
        right = right * weights.to(right.dtype)[:, None, None]
        out = right.new_zeros(self.shape)
        return out.index_add_(0, self.index.reshape(-1), right.reshape(-1, right.shape[-1]))

    def take(self, keep: Tensor | slice) -> Rows:
        return Rows(self.index[keep], self.right[keep], self.rows)

    def folded(self, fold: int) -> Rows:
        if fold == 1:
            return self
        return Rows(join(self.index, fold), join(self.right, fold), self.rows)
