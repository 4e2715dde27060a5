"""Norms of gradients g_i = Jᵀ ĝ_i where the value has row form: nothing is pulled back for them.

For each row, Jᵀ then is s · I on all that is orthogonal to Q, an orthonormal basis of span{1, p_r}, and stays inside
that span on Q (:mod:`dphero.row_form.form`). So with c = Qᵀĝ and D = JᵀQ,

    ‖Jᵀĝ‖² = s² (‖ĝ‖² − ‖c‖²) + ‖D c‖²,    summed over rows.

s and D, which are the same for all examples, are found by pulling Q and some numbers back. What of other numbers is
not as it should be then, which is nothing but rounding if the form is right, is added to the norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.geometry import Geometry
from dphero.gradients.piece import Piece
from dphero.numerics.compare import scattered_numbers
from dphero.numerics.precision import matmul_tf32
from dphero.row_form.products import (
    longest,
    norms_need_no_gradient,
    relative_rounding,
    row_products,
    row_totals,
    scaled_square_norms,
)

_NOTHING = 1e-30
"""What is added to a variance, so that rows of one number have no direction besides 1."""
_FEWEST = 8
"""Numbers in a row, at least."""
ROUNDINGS = 32
"""Units of rounding that a pass through f may lose, of what goes in."""
_DISTRUST = 10.0
"""How much more than what is seen to be missing on some numbers may be missing on others."""


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
        self._inner, self._n, self.main = inner, n, main.detach().flatten(1)
        self._formed: tuple[Tensor, Tensor] | None = None
        self._products: Tensor | None = None

    @staticmethod
    def fits(value: Tensor, main: Tensor) -> bool:
        """Tell whether rows are so long that this is worth it."""
        return value.numel() == main.numel() and value.shape[0] == main.shape[0] <= main.numel() // _FEWEST

    def span(self) -> Tensor:
        """Return √columns · Q and some numbers, of shape ``(3, rows, columns)``."""
        p, shape = self.main, self.main.shape[1:]
        # twice: the second time for what the first one left by rounding
        unit = F.layer_norm(F.layer_norm(p, shape, eps=_NOTHING), shape, eps=_NOTHING)
        return torch.stack([torch.ones_like(p), unit, scattered_numbers(p)])

    def norms(self, span: Tensor, scale: Tensor | None, squares: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return √Σ_r (scale_r (‖ĝ_r‖² - ‖c_r‖²) + c_rᵀ squares_r c_r), not too small, and ‖ĝ‖ at most, by example.

        Args:
            span: What :meth:`span` returned.
            scale: s² of each row; ``None`` for nothing.
            squares: DᵀD of each row.
            count: How many examples to handle at a time.
        """
        most = squares.diagonal(dim1=1, dim2=2).sum(1)
        most = most if scale is None else most + scale
        formed = not norms_need_no_gradient(self._inner)
        if formed:
            of_rows, products = self._of_formed(span, count)
            lengths, longer = of_rows.sum(1).sqrt_(), torch.mv(of_rows, most).sqrt_()
            relative = 4 * torch.finfo(longer.dtype).eps * math.sqrt(self.main.shape[1])
        else:
            products = self._not_formed(span)
            lengths, longer = longest(self._inner, most.sqrt())
            relative = relative_rounding(self._inner)
        of_c = longer * relative  # what rounding may make of products, together
        rounds = longer * (ROUNDINGS * torch.finfo(longer.dtype).eps)  # and a pass through f of what goes in
        if scale is None:  # not clamped: what is infinite must be seen to be
            return _quadratic(products, squares).abs_().sqrt_().add_(of_c).add_(rounds), lengths
        squares = squares.clone()
        squares.diagonal(dim1=1, dim2=2).sub_(scale.unsqueeze(1))
        if formed:  # as much room as for a Gram norm
            whole = torch.mv(of_rows, torch.add(scale, most, alpha=relative))
        else:
            length_of_c = torch.linalg.vector_norm(products * most.sqrt().view(-1, 1, 1), dim=(0, 2))
            whole = scaled_square_norms(self._inner, scale.sqrt())
            rounds = whole.sqrt().mul_(ROUNDINGS * torch.finfo(whole.dtype).eps)  # in the other parts, less than of_c
            whole = torch.addcmul(whole, torch.add(of_c, length_of_c, alpha=2), of_c)
        return whole.add_(_quadratic(products, squares)).abs_().sqrt_().add_(rounds), lengths

    def _not_formed(self, span: Tensor) -> Tensor:
        """Return c_ir, of shape (rows, n, 2)."""
        if self._products is None:
            both = [row_totals(self._inner), row_products(self._inner, span[1])]
            self._products = torch.stack(both, 2).transpose(0, 1).mul_(self.main.shape[1] ** -0.5)
        return self._products

    def _of_formed(self, span: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return ‖ĝ_ir‖², of shape (n, rows), and c_ir, of shape (rows, n, 2)."""
        if self._formed is None:
            squares, products = [], []
            columns = span[:2].permute(1, 2, 0)
            for gradients in self._inner.some_at_a_time(self._n, count):
                rows = gradients.to(columns.dtype).reshape(len(gradients), *self.main.shape)
                squares.append(torch.linalg.vector_norm(rows, dim=2).square_())
                products.append(torch.bmm(rows.transpose(0, 1), columns))
            together = products[0] if len(products) == 1 else torch.cat(products, 1)
            self._formed = torch.cat(squares), together.mul_(self.main.shape[1] ** -0.5)
        return self._formed


def _quadratic(products: Tensor, squares: Tensor) -> Tensor:
    """Return Σ_r c_rᵀ squares_r c_r for each example."""
    return (torch.bmm(products, squares) * products).sum((0, 2))


class _Map(NamedTuple):
    """Jᵀ: s of each row, if any; DᵀD; and how much of it is not of this form."""

    scale: Tensor | None
    squares: Tensor
    missing: Tensor


def _examined(into: Tensor, pull: Callable[[Tensor], Tensor], shape: torch.Size) -> _Map:
    """Find Jᵀ from what it makes of √columns · Q and of some numbers z, of the value's shape."""
    _, rows, columns = into.shape
    out = pull(into.view(3, *shape)).reshape(3, rows, -1)
    turned = into.transpose(0, 1)
    own = torch.bmm(turned, turned.mT).div_(columns)
    scale: Tensor | None
    if out.shape[2] == columns:
        scale, squares, gaps = _of_rows(turned, own, out.transpose(0, 1))
    else:  # one number for each row
        images = out[:2, :, 0].T
        scale, squares = None, images.unsqueeze(2) * images.unsqueeze(1) / columns
        gaps = out[2, :, 0] - (own[:, :2, 2] * images).sum(1)
    missing, size = torch.linalg.vector_norm(gaps), torch.linalg.vector_norm(out)
    rounding = size * (ROUNDINGS * torch.finfo(out.dtype).eps)
    return _Map(scale, squares, missing * (missing > rounding))  # NaN stays


def _of_rows(into: Tensor, own: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return s, DᵀD, and what Jᵀ made of [Q, z] otherwise than s and D say, and than in the span.

    Args:
        into: √columns · Q and z, of shape ``(rows, 3, columns)``;
        own: their products, divided by the number of columns;
        out: what Jᵀ makes of them.
    """
    columns = into.shape[2]
    cross, squares = torch.bmm(into, out.mT).div_(columns), torch.bmm(out[:, :2], out[:, :2].mT).div_(columns)
    along = own[:, 2:, :2]  # of z, in the span; the rest of it is scaled
    scale = torch.baddbmm(cross[:, 2:, 2:], along, cross[:, :2, 2:], alpha=-1)
    scale = scale / torch.baddbmm(own[:, 2:, 2:], along, own[:, :2, 2:], alpha=-1)
    expected = torch.zeros_like(cross)  # of each in `out`, in terms of `into`
    expected[:, :2, :2] = cross[:, :2, :2].mT
    expected[:, 2:, :2] = torch.baddbmm(along * scale, along, expected[:, :2, :2], beta=-1)
    expected[:, 2:, 2:] = scale
    return scale[:, 0, 0], squares, torch.baddbmm(out, expected, into, alpha=-1)


def pulled_square_norms(
    sums: RowSums, pull: Callable[[Tensor], Tensor], shape: torch.Size, geometry: Geometry, count: int
) -> Tensor:
    """Return ‖A⁻¹ Jᵀ ĝ_i‖² for each example, and room for what rounding may have taken.

    Args:
        sums: What is known of the ĝ_i.
        pull: Returns Jᵀ of each of several gradients of the value;
        shape: the value's shape.
        geometry: A, which :func:`scales_rows`.
        count: How many examples to handle at a time.
    """
    with matmul_tf32(sums.main, allow=False):
        span = sums.span()
        found = _examined(span, pull, shape)
        scale = None if found.scale is None else found.scale.square()
        squares = found.squares
        if geometry.left is not None:
            factor = geometry.left.whiten(squares.new_ones(len(squares))).square()
            scale, squares = None if scale is None else scale * factor, squares * factor.view(-1, 1, 1)
        norms, lengths = sums.norms(span, scale, squares, count)
        missing = (found.missing / geometry.smallest).to(norms.dtype)
        return torch.addcmul(norms, lengths, missing, value=_DISTRUST).square_()
