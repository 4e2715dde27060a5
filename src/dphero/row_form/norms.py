"""Norms of gradients g_i = Jᵀ ĝ_i where the value has row form: nothing is pulled back for them.

With s, Q, c = Qᵀĝ and D = JᵀQ as in :mod:`dphero.row_form.jacobian`,

    ‖Jᵀĝ‖² = s² (‖ĝ‖² − ‖c‖²) + ‖D c‖²,    summed over rows,

also where A⁻¹ multiplies each row by a number. For any other geometry, Jᵀĝ = s ĝ + E c is formed, some examples at a
time, unless that can be avoided too (:mod:`dphero.row_form.mixed_rows`). What of Jᵀ is seen not to be of this form,
which is nothing but rounding if the form is right, is added to the norms.

They also leave room for rounding. The two products of a row, c, lose a part ρ of ‖ĝ‖ together; and a pass through f may
lose :data:`~dphero.row_form.jacobian.ROUNDINGS` units, in each row of what goes into that row, since rows are kept
apart. So at most R = μ (ρ + roundings) ‖ĝ‖ is lost of each row, before A⁻¹: where D c is formed, with μ² = s² + ‖D‖²,
and where E c is, which may cancel with s ĝ, with μ = s + ‖D‖. In the formula above, c + δ for c also makes the first
part too small by s² (2⟨c, δ⟩ + ‖δ‖²) ≤ R (2 s ‖c‖ + R).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.geometry import Geometry
from dphero.gradients.piece import by_example, whitened_squares
from dphero.numerics.precision import matmul_tf32
from dphero.row_form.jacobian import RowMap
from dphero.row_form.mixed_rows import of_factors
from dphero.row_form.row_sums import RowSums, longest_of, room_of


def scales_rows(geometry: Geometry) -> bool:
    """Tell whether A⁻¹ multiplies each row by a number, and does nothing else."""
    if geometry.flat is not None or geometry.right is not None:
        return False
    return geometry.left is None or isinstance(geometry.left, Diagonal | Scalar)


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
        if geometry.left is not None and geometry.right is None and not sums.is_formed:
            return of_factors(sums, found, squares, geometry)
        return _of_formed(sums, found, squares, geometry, count)


def _of_rows(sums: RowSums, found: RowMap, squares: Tensor, geometry: Geometry, count: int) -> Tensor:
    """Return them where A⁻¹ scales rows."""
    assert found.block is not None
    products, scales = sums.products(found, count), found.block[:, 2, 2]
    if geometry.left is not None:
        factor = geometry.left.whiten(torch.ones_like(scales))
        scales, squares = scales * factor, squares * factor.square().view(-1, 1, 1)
    diagonal = squares.diagonal(dim1=1, dim2=2)
    room = sums.lengths(room_of(sums, found, diagonal.sum(1), geometry))
    removed = torch.linalg.vector_norm(products * scales.view(-1, 1, 1), dim=(0, 2))
    diagonal[:, :2].sub_(diagonal[:, 2:])
    inside = (torch.bmm(products, squares[:, :2, :2]) * products).sum((0, 2)).add_(sums.square_norms(scales))
    rounds = torch.add(room, removed, alpha=2).mul_(room)
    return inside.add_(rounds).abs_().sqrt_().add_(room).square_()  # not clamped: what is infinite stays so


def _of_numbers(sums: RowSums, found: RowMap, geometry: Geometry, count: int) -> Tensor:
    """Return them where there is one number for each row."""
    out = found.numbers(sums.products(found, count))
    most = found.along.square().sum(1)
    if geometry.left is not None and scales_rows(geometry):
        most = most * geometry.left.whiten(torch.ones_like(most)).square()
    else:
        most = most / geometry.smallest**2
    room = sums.lengths(room_of(sums, found, most, geometry))
    norms = whitened_squares(out.reshape(len(out), *geometry.shape), geometry).sqrt_()
    return norms.add_(room).square_()  # what is infinite stays so


def _of_formed(sums: RowSums, found: RowMap, squares: Tensor, geometry: Geometry, count: int) -> Tensor:
    """Return them for any geometry, of gradients that are formed."""
    most = longest_of(squares).amax() / geometry.smallest**2
    room = room_of(sums, found, most, geometry).sqrt_()
    norms = []
    for gradients in sums.inner.some_at_a_time(sums.n, count):
        rounds = torch.linalg.vector_norm(by_example(gradients), dim=1).mul_(room)
        whitened = whitened_squares(found.pull(gradients).reshape(len(gradients), *geometry.shape), geometry)
        norms.append(whitened.sqrt_().add_(rounds))
    return (norms[0] if len(norms) == 1 else torch.cat(norms)).square_()
