"""Norms of gradients g_i = Jᵀ ĝ_i where the value has row form: nothing is pulled back for them.

For each row, Jᵀ then is s · I on all that is orthogonal to Q, an orthonormal basis of span{1, p_r}, and stays inside
that span on Q (:mod:`dphero.functional.row_form`). So with c = Qᵀĝ and D = JᵀQ,

    ‖Jᵀĝ‖² = s² (‖ĝ‖² − ‖c‖²) + ‖D c‖²,    summed over rows.

s and D, which are the same for all examples, are found by pulling Q and some numbers back. What of other numbers is
not as it should be then, which is nothing but rounding if the form is right, is added to the norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.geometry import Geometry
from dphero.gradients.piece import Piece
from dphero.numerics.compare import scattered_numbers
from dphero.numerics.precision import matmul_tf32

_FEWEST = 8
"""Numbers in a row, at least."""
ROUNDINGS = 32
"""Units of rounding that a pass through f may lose, of what goes in."""
_DISTRUST = 10.0
"""How much more than what is seen to be missing on some numbers may be missing on others."""


def row_scales(geometry: Geometry, like: Tensor) -> Tensor | None:
    """Return what A⁻¹ multiplies each row by; ``None`` if that is not all it does."""
    if geometry.is_identity:
        return like.new_ones(geometry.rows)
    if geometry.flat is not None or geometry.right is not None or not isinstance(geometry.left, Diagonal | Scalar):
        return None
    return geometry.left.whiten(like.new_ones(geometry.rows))


class RowSums:
    """‖ĝ_ir‖² and Qᵀĝ_ir of each example and row; the same for all leaves that a value is computed from.

    Args:
        inner: The per-example gradients ĝ_i of the value.
        n: Their number.
        main: p, whose rows are those of the value.
    """

    def __init__(self, inner: Piece, n: int, main: Tensor) -> None:
        self._inner, self._n, self.main = inner, n, main.detach().flatten(1)
        self._basis: Tensor | None = None
        self._found: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def fits(value: Tensor, main: Tensor) -> bool:
        """Tell whether rows are so long that this is worth it."""
        return value.numel() == main.numel() and value.shape[0] == main.shape[0] <= main.numel() // _FEWEST

    @property
    def basis(self) -> Tensor:
        """Q, of shape ``(2, rows, columns)``; zero where 1 and p_r have one direction."""
        if self._basis is None:
            p = self.main
            rest = p - p.mean(1, keepdim=True)
            rest = rest - rest.mean(1, keepdim=True)  # what the first one left by rounding
            length, whole = (torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in (rest, p))
            unit = torch.where(length > ROUNDINGS * torch.finfo(p.dtype).eps * whole, rest / length, 0)
            self._basis = torch.stack([torch.full_like(p, p.shape[1] ** -0.5), unit])
        return self._basis

    def found(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the squares, (n, rows), and the products, (rows, n, 2); of ``count`` examples at a time."""
        if self._found is None:
            squares, products = [], []
            columns = self.basis.permute(1, 2, 0)
            for gradients in self._inner.some_at_a_time(self._n, count):
                rows = gradients.to(columns.dtype).reshape(len(gradients), *self.main.shape)
                squares.append(torch.linalg.vector_norm(rows, dim=2).square_())
                products.append(torch.bmm(rows.transpose(0, 1), columns))
            self._found = torch.cat(squares), torch.cat(products, 1)
        return self._found


class _Map(NamedTuple):
    """Jᵀ: s for each row, DᵀD, its largest entry on some numbers, and what is not of this form."""

    scale: Tensor
    inner: Tensor
    largest: Tensor
    missing: Tensor


def _examined(sums: RowSums, pull: Callable[[Tensor], Tensor], shape: torch.Size) -> _Map:
    """Find Jᵀ from what it makes of Q and of two sets of numbers, of the value's shape."""
    basis, (rows, columns) = sums.basis, sums.main.shape
    numbers = scattered_numbers(basis)
    out = pull(torch.cat([basis, numbers]).view(4, *shape)).reshape(4, rows, -1)
    images, first, second = out[:2], out[2], out[3]
    along = (numbers.unsqueeze(1) * basis).sum(3, keepdim=True)  # (numbers, of Q, rows, 1)
    across = numbers - (along * basis).sum(1)
    gaps = [second - (along[1] * images).sum(0)]
    if out.shape[2] == columns:
        scale = (across[0] * first).sum(1) / across[0].square().sum(1)
        gaps[0] -= scale.unsqueeze(1) * across[1]
        inside = (images.unsqueeze(1) * basis).sum(3, keepdim=True)
        gaps.append(images - (inside * basis).sum(1))
    else:  # one number for each row
        scale = first.new_zeros(rows)
    missing = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gap) for gap in gaps]))
    rounding = ROUNDINGS * torch.finfo(out.dtype).eps * torch.linalg.vector_norm(out)
    missing = torch.where(missing <= rounding, 0, _DISTRUST * missing)
    products = (images.unsqueeze(1) * images).sum(3).permute(2, 0, 1)
    return _Map(scale, products, out.abs().amax(), missing)


def pulled_square_norms(
    sums: RowSums, pull: Callable[[Tensor], Tensor], shape: torch.Size, geometry: Geometry, scales: Tensor, count: int
) -> Tensor:
    """Return ‖A⁻¹ Jᵀ ĝ_i‖² for each example, and room for what rounding may have taken.

    Args:
        sums: What is known of the ĝ_i.
        pull: Returns Jᵀ of each of several gradients of the value;
        shape: the value's shape.
        geometry: A;
        scales: what A⁻¹ multiplies each row by.
        count: How many examples to handle at a time.
    """
    with matmul_tf32(sums.main, allow=False):
        found = _examined(sums, pull, shape)
        squares, products = sums.found(count)
        eps, factor = torch.finfo(squares.dtype).eps, scales.to(squares.dtype).square()
        scale = found.scale.square()
        form = found.inner - torch.diag_embed(torch.stack([scale, scale], 1))
        # s² (‖ĝ‖² − ‖c‖²) is little where a gradient lies in the span: as much room as for a Gram norm
        terms = scale + (scale + found.inner.diagonal(dim1=1, dim2=2).sum(1)) * (4 * eps * math.sqrt(sums.main.shape[1]))
        whole = torch.mv(squares, factor * terms)
        whole += (torch.bmm(products, form * factor.view(-1, 1, 1)) * products).sum((0, 2))
        room = (found.largest * (ROUNDINGS * eps) + found.missing) / geometry.smallest
        # not clamped: what is infinite must be seen to be
        return whole.abs_().sqrt_().add_(squares.sum(1).sqrt_().mul_(room)).square_()
