"""Norms in row form where A = L mixes rows, of ĝ_i = Σ_t l_it r_itᵀ: nothing of the size of all gradients is formed.

With S for s of each row and E c = Q d (:mod:`dphero.row_form.jacobian`), H = L⁻²,

    ‖L⁻¹ (S ĝ + Q d)‖² = ‖L⁻¹ S ĝ‖² + 2 ⟨d, c'⟩ + dᵀ M d.

The first is the norm of a sum of outer products, with L⁻¹ S l on the left. c' = Qᵀ (H S ĝ) are products of rows as c
is, with H S l on the left; and M, the products of L⁻¹ Q with each other, is the same for all examples.

Rounding makes c + δ of c, and something else of L⁻¹ S l. This is the norm of another gradient then, which is R away,
and 4√rows units for the latter (:mod:`dphero.row_form.norms`). The first part leaves room for itself. c' loses a part ρ
of lengths that are R / ρ at most, times ‖L⁻¹‖; and M a part ρ of ‖L⁻¹‖²: in the square, 2 ‖L⁻¹‖ ‖d‖ (R + ρ ‖L⁻¹‖ ‖d‖)
at most together.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Geometry
from dphero.row_form.jacobian import RowMap
from dphero.row_form.row_sums import RowSums, longest_of, room_of


def of_factors(sums: RowSums, found: RowMap, squares: Tensor, geometry: Geometry) -> Tensor:
    """Return ‖L⁻¹ Jᵀ ĝ_i‖² for each example, and room for what rounding may have taken.

    Args:
        sums: What is known of the ĝ_i.
        found: Jᵀ;
        squares: DᵀD and s² of each row, on the diagonal of ``(rows, 3, 3)``.
        geometry: A: L alone.
    """
    left, block = geometry.left, found.block
    assert left is not None and block is not None
    whitened = left.whiten(sums.factors.scaled(block[:, 2, 2]), axis=-2)
    (others,) = sums.products_of_factors(left.whiten(whitened, axis=-2))
    turn = block[:, :2, :2].mT.clone()
    turn.diagonal(dim1=1, dim2=2).sub_(block[:, 2:, 2])
    removed = torch.bmm(sums.products(found, 0), turn)  # d, of shape (rows, n, 2)
    flat = removed.permute(1, 2, 0).flatten(1)
    inside = sums.factors.square_norms(whitened).add_((removed * others).sum((0, 2)), alpha=2)
    inside.add_((flat @ _products_of_span(left, found.span[:2]) * flat).sum(1))
    of_whitening = 4 * torch.finfo(flat.dtype).eps * math.sqrt(len(block)) / sums.rounding  # of R
    most = longest_of(squares) * ((1 + of_whitening) / geometry.smallest) ** 2
    room = sums.lengths(room_of(sums, found, most, geometry))
    length = torch.linalg.vector_norm(flat, dim=1) / geometry.smallest
    rounds = torch.add(room, length, alpha=sums.rounding).mul_(length)
    return inside.add_(rounds, alpha=2).abs_().sqrt_().add_(room).square_()  # not clamped: what is infinite stays so


def _products_of_span(left: Factor, span: Tensor) -> Tensor:
    """Return M: all products of L⁻¹ Q with each other, of shape ``(2 rows, 2 rows)``."""
    rows = span.shape[1]
    inverse = left.whiten(left.whiten(torch.eye(rows, dtype=span.dtype, device=span.device)))
    vectors = span.flatten(0, 1)
    return ((vectors @ vectors.T).view(2, rows, 2, rows) * inverse.unsqueeze(1)).view(2 * rows, 2 * rows)
