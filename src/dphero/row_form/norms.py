"""Norms of gradients g_i = Jᵀ ĝ_i where the value has row form: nothing is pulled back for them.

With s, Q, c = Qᵀĝ and D = JᵀQ as in :mod:`dphero.row_form.jacobian`,

    ‖Jᵀĝ‖² = s² (‖ĝ‖² − ‖c‖²) + ‖D c‖²,    summed over rows,

also where A⁻¹ multiplies each row by a number. For any other geometry, Jᵀĝ = s ĝ + E c is formed, some examples at a
time. What of Jᵀ is seen not to be of this form, which is nothing but rounding if the form is right, is added to the
norms.

They also leave room for rounding. The two products of a row, c, lose a part ρ of ‖ĝ‖ together; and a pass through f may
lose :data:`~dphero.row_form.jacobian.ROUNDINGS` units, in each row of what goes into that row, since rows are kept
apart. E c may cancel with s ĝ, but neither s nor D is larger than μ = √(s² + ‖D‖²): what is lost is at most
R = μ (ρ + roundings) ‖ĝ‖ in each row, before A⁻¹. In the formula above, c + δ for c makes the first part too small by
s² (2⟨c, δ⟩ + ‖δ‖²) ≤ 2 R (s ‖ĝ‖ + R).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.geometry import Geometry
from dphero.gradients.piece import Piece, by_example, whitened_squares
from dphero.numerics.precision import matmul_tf32
from dphero.row_form.jacobian import ROUNDINGS, RowMap, span_of
from dphero.row_form.products import RowFactors, norms_need_no_gradient, relative_rounding, scaled_square_norms

_FEWEST = 8
"""Numbers in a row, at least."""
_DISTRUST = 10.0
"""How much more than what is seen to be missing on some numbers may be missing on others of the same size."""


def scales_rows(geometry: Geometry) -> bool:
    """Tell whether A⁻¹ multiplies each row by a number, and does nothing else."""
    if geometry.flat is not None or geometry.right is not None:
        return False
    return geometry.left is None or isinstance(geometry.left, Diagonal | Scalar)


class RowSums:
    """What norms need of the gradients ĝ_i of a value, the same for all leaves that it is computed from.

    Args:
        inner: The ĝ_i.
        n: Their number.
        main: p, whose rows are those of the value.
    """

    def __init__(self, inner: Piece, n: int, main: Tensor) -> None:
        self.inner, self.n, self.main = inner, n, main.detach().flatten(1)
        self.is_formed = not norms_need_no_gradient(inner)
        self._span: Tensor | None = None
        self._squares: Tensor | None = None
        self._factors: RowFactors | None = None
        self._products: Tensor | None = None

    @staticmethod
    def fits(value: Tensor, main: Tensor) -> bool:
        """Tell whether rows are so long that this is worth it."""
        return value.numel() == main.numel() and value.shape[0] == main.shape[0] <= main.numel() // _FEWEST

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
        of_products = 4 * eps * math.sqrt(columns) if self.is_formed else relative_rounding(self.inner)
        return of_products + ROUNDINGS * eps

    def products(self, found: RowMap, count: int) -> Tensor:
        """Return c_ir, of shape ``(rows, n, 2)``; so many examples are formed at a time."""
        if self._products is None:
            if self.is_formed:
                self._form(found, count)
            else:
                self._factors = RowFactors(self.inner, self.span[1])
                self._products = self._factors.products()
        assert self._products is not None
        return self._products

    def lengths(self, weights: Tensor) -> Tensor:
        """Return √Σ_r weights_r ‖ĝ_ir‖² of each example at most, once its products are known."""
        if self._factors is not None:
            return self._factors.lengths(weights.sqrt())
        assert self._squares is not None
        return torch.mv(self._squares, weights).sqrt_()

    def square_norms(self, scales: Tensor) -> Tensor:
        """Return Σ_r scales_r² ‖ĝ_ir‖² of each example, not too small, once its products are known."""
        if self._squares is None:
            return scaled_square_norms(self.inner, scales)
        return torch.mv(self._squares, scales.square())

    def _form(self, found: RowMap, count: int) -> None:
        squares, products = [], []
        for gradients in self.inner.some_at_a_time(self.n, count):
            rows = gradients.to(self.main.dtype).reshape(len(gradients), *self.main.shape)
            squares.append(torch.linalg.vector_norm(rows, dim=2).square_())
            products.append(found.products(rows))
        self._squares = torch.cat(squares)
        self._products = products[0] if len(products) == 1 else torch.cat(products, 1)


def pulled_square_norms(sums: RowSums, found: RowMap, geometry: Geometry, count: int) -> Tensor:
    """Return ‖A⁻¹ Jᵀ ĝ_i‖² for each example, and room for what rounding may have taken.

    Args:
        sums: What is known of the ĝ_i.
        found: Jᵀ.
        geometry: A.
        count: How many examples to handle at a time.
    """
    with matmul_tf32(sums.main, allow=False):
        if found.block is None:
            return _of_numbers(sums, found, geometry, count)
        squares = torch.bmm(found.block.mT, found.block)  # DᵀD and s²
        if scales_rows(geometry):
            return _of_rows(sums, found, squares, geometry, count)
        return _of_formed(sums, found, squares, geometry, count)


def _room(sums: RowSums, found: RowMap, most: Tensor, geometry: Geometry) -> Tensor:
    """Return weights of the ‖ĝ_r‖² whose sum is at least R², from μ², before A⁻¹ or after it.

    (a + b)² ≤ 2 (a² + b²) for what rounding, row by row, and all that is missing may take. That was seen on vectors of
    length one, and each of the columns may be as wrong.
    """
    distrust = _DISTRUST * math.sqrt(sums.main.shape[1])
    missing = (found.missing * (distrust / geometry.smallest)).to(most.dtype)
    return torch.addcmul(most * (2 * sums.rounding**2), missing, missing, value=2)


def _of_rows(sums: RowSums, found: RowMap, squares: Tensor, geometry: Geometry, count: int) -> Tensor:
    """Return them where A⁻¹ scales rows."""
    assert found.block is not None
    products, scales = sums.products(found, count), found.block[:, 2, 2]
    if geometry.left is not None:
        factor = geometry.left.whiten(torch.ones_like(scales))
        scales, squares = scales * factor, squares * factor.square().view(-1, 1, 1)
    diagonal = squares.diagonal(dim1=1, dim2=2)
    room = sums.lengths(_room(sums, found, diagonal.sum(1), geometry))
    whole = sums.square_norms(scales)
    diagonal[:, :2].sub_(diagonal[:, 2:])
    inside = (torch.bmm(products, squares[:, :2, :2]) * products).sum((0, 2)).add_(whole)
    return inside.addcmul_(whole.sqrt_().add_(room), room, value=2).abs_().sqrt_().add_(room).square_()


def _of_numbers(sums: RowSums, found: RowMap, geometry: Geometry, count: int) -> Tensor:
    """Return them where there is one number for each row."""
    out = found.numbers(sums.products(found, count))
    most = found.along.square().sum(1)
    if geometry.left is not None and scales_rows(geometry):
        most = most * geometry.left.whiten(torch.ones_like(most)).square()
    else:
        most = most / geometry.smallest**2
    room = sums.lengths(_room(sums, found, most, geometry))
    norms = whitened_squares(out.reshape(len(out), *geometry.shape), geometry).sqrt_()
    return norms.add_(room).square_()  # what is infinite stays so


def _of_formed(sums: RowSums, found: RowMap, squares: Tensor, geometry: Geometry, count: int) -> Tensor:
    """Return them for any geometry, of gradients that are formed."""
    most = squares.diagonal(dim1=1, dim2=2).sum(1).amax() / geometry.smallest**2
    room = _room(sums, found, most, geometry).sqrt_()
    norms = []
    for gradients in sums.inner.some_at_a_time(sums.n, count):
        rounds = torch.linalg.vector_norm(by_example(gradients), dim=1).mul_(room)
        whitened = whitened_squares(found.pull(gradients).reshape(len(gradients), *geometry.shape), geometry)
        norms.append(whitened.sqrt_().add_(rounds))
    return (norms[0] if len(norms) == 1 else torch.cat(norms)).square_()
