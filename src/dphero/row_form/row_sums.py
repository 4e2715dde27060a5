"""What norms need of the gradients ĝ_i of a value in row form, and the room that they leave."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dphero.geometry.geometry import Geometry
from dphero.gradients.piece import Piece
from dphero.row_form.jacobian import ROUNDINGS, RowMap, span_of
from dphero.row_form.products import ROUNDING, RowFactors, norms_need_no_gradient, relative_rounding

_FEWEST = 8
"""Numbers in a row, at least."""
_DISTRUST = 10.0
"""How much more than what is seen to be missing on some numbers may be missing on others of the same size."""
_SHARE = 1 / 16
"""θ: what is missing is nothing, as a rule."""


class RowSums:
    """What norms need of the gradients ĝ_i of a value, the same for all leaves that it is computed from.

    Args:
        inner: The ĝ_i.
        n: Their number.
        main: p, whose rows are those of the value.
    """

    def __init__(self, inner: Piece, n: int, main: Tensor) -> None:
        self.inner, self.n, self.main = inner, n, main.detach().flatten(1)
        self._span: Tensor | None = None
        self._squares: Tensor | None = None
        self._factors: RowFactors | None = None
        self._products: Tensor | None = None

    @staticmethod
    def fits(value: Tensor, main: Tensor) -> bool:
        """Tell whether rows are so long that this is worth it."""
        return value.numel() == main.numel() and value.shape[0] == main.shape[0] <= main.numel() // _FEWEST

    @property
    def is_formed(self) -> bool:
        """Whether the ĝ_i are formed, and not only what they are made of is looked at."""
        return self._factors is None and not norms_need_no_gradient(self.inner)

    @property
    def span(self) -> Tensor:
        """Q and z: see :class:`~dphero.row_form.jacobian.RowMap`."""
        if self._span is None:
            self._span = span_of(self.main)
        return self._span

    @property
    def rounding(self) -> float:
        """What may be lost of c and in f, relatively."""
        columns, eps = self.main.shape[1], torch.finfo(self.main.dtype).eps
        of_products = ROUNDING * eps * math.sqrt(columns) if self.is_formed else relative_rounding(self.inner)
        return of_products + ROUNDINGS * eps

    def products(self, found: RowMap, count: int) -> Tensor:
        """Return c_ir, of shape ``(rows, n, 2)``; so many examples are formed at a time."""
        if self._products is None:
            if self.is_formed:
                self._form(found, count)
            else:
                self.products_of_factors()
        assert self._products is not None
        return self._products

    def products_of_factors(self, *lefts: Tensor) -> list[Tensor]:
        """Return the same of gradients with each of these on the left instead, where nothing is formed."""
        self._products, *others = self.factors.products(*lefts)
        return others

    @property
    def factors(self) -> RowFactors:
        """What the ĝ_i are made of, where they are not formed."""
        if self._factors is None:
            self._factors = RowFactors(self.inner, self.span[1])
        return self._factors

    def lengths(self, weights: Tensor) -> Tensor:
        """Return √Σ_r weights_r ‖ĝ_ir‖² of each example at most, once its products are known."""
        if self._factors is not None:
            return self._factors.lengths(weights.sqrt())
        assert self._squares is not None
        return torch.mv(self._squares, weights).sqrt_()

    def square_norms(self, scales: Tensor) -> Tensor:
        """Return Σ_r scales_r² ‖ĝ_ir‖² of each example, not too small, once its products are known."""
        if self._squares is None:
            return self.factors.square_norms(self.factors.scaled(scales))
        return torch.mv(self._squares, scales.square())

    def _form(self, found: RowMap, count: int) -> None:
        squares, products = [], []
        for gradients in self.inner.some_at_a_time(self.n, count):
            rows = gradients.to(self.main.dtype).reshape(len(gradients), *self.main.shape)
            squares.append(torch.linalg.vector_norm(rows, dim=2).square_())
            products.append(found.products(rows))
        self._squares = squares[0] if len(squares) == 1 else torch.cat(squares)
        self._products = products[0] if len(products) == 1 else torch.cat(products, 1)


def longest_of(squares: Tensor) -> Tensor:
    """Return (s + ‖D‖)² of each row at least, from s² and DᵀD: no E is longer."""
    return squares.diagonal(dim1=1, dim2=2).sqrt().sum(1).square_()


def room_of(sums: RowSums, found: RowMap, most: Tensor, geometry: Geometry) -> Tensor:
    """Return weights of the ‖ĝ_r‖² whose sum is at least R², from μ², before A⁻¹ or after it.

    (a + b)² ≤ (1 + θ) a² + (1 + 1/θ) b² for what rounding, row by row, and all that is missing may take. The latter was
    seen on vectors of length one, and each of the columns may be as wrong.
    """
    missing = found.missing if geometry.is_identity else (found.missing / geometry.smallest).to(most.dtype)
    distrust = _DISTRUST**2 * sums.main.shape[1] * (1 + 1 / _SHARE)
    return torch.addcmul(most * ((1 + _SHARE) * sums.rounding**2), missing, missing, value=distrust)
