"""Orthonormal bases: how far one is from orthonormal, and how far it may be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dphero.numerics.transfer import to_device

TOLERANCE = 1e-4
"""Relative error allowed in whiten(colour(x)) == x."""


def orthonormal(basis: Tensor, condition: float, defect: float | None) -> Tensor:
    """Returns the basis, in float64 and orthonormalised anew where A's condition number needs that."""
    # A copy, into which nobody else can write; but not of what was made here, of which the defect is known.
    basis = basis.to(torch.promote_types(basis.dtype, torch.float32), copy=defect is None)
    defect = orthonormality_defect(basis) if defect is None else defect
    if not defect < 1e-2:
        raise ValueError(f"the basis of a factor must be orthonormal, and U^T U differs from I by {defect:.3g}")
    if condition * defect > TOLERANCE:
        # The signs of the columns may change; U diag(v) U^T does not.
        basis = torch.linalg.qr(basis.double())[0]
        if condition * orthonormality_defect(basis) > TOLERANCE:
            raise ValueError(f"condition number {condition:.3g} is singular even in float64: give the spectrum a floor")
    return basis


def orthonormality_defect(basis: Tensor) -> float:
    """Returns the largest entry of U^T U - I, or 2 eps if that is more; NaN where U is not finite.

    Products with the best of bases round, hence 2 eps. Measured in float64, so that a basis rounded from an orthonormal
    one has exactly that. It waits for a GPU.
    """
    wide = basis.double()
    gram = wide.mT @ wide
    gram.diagonal().sub_(1.0)
    return max(float(gram.abs().max()), 2.0 * torch.finfo(basis.dtype).eps)


def numbers_beside(rows: Sequence[Sequence[float]], beside: Tensor) -> Tensor:
    """Returns rows of numbers where and as another tensor is: one journey, and nothing is waited for."""
    return to_device(torch.tensor(rows, dtype=beside.dtype, device="cpu"), beside.device)
