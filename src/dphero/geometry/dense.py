"""Factors with a full basis of directions and a scale along each."""

from __future__ import annotations

from torch import Tensor

from dphero.geometry.basis import numbers_beside, orthonormal
from dphero.geometry.factor import Factor, times
from dphero.numerics.precision import matmul_tf32


class Dense(Factor):
    """A = U diag(v) U^T for a full orthonormal basis U; both k x k matrices, A and A^-1, are formed once.

    Args:
        basis: U.
        scales: v.
        defect: how far U^T U is from I at most, for those who know: measuring it waits for a GPU. None: measured.
    """

    _arguments = ("basis", "scales")

    def __init__(self, basis: Tensor, scales: Tensor, *, defect: float | None = None):
        if basis.dim() != 2 or basis.shape[0] != basis.shape[1] or scales.shape != basis.shape[:1]:
            raise ValueError(f"Dense needs basis k x k and scales k, not {(*basis.shape,)} and {(*scales.shape,)}")
        self._admit(*scales.tolist())
        self.basis = orthonormal(basis.detach(), self.largest / self.smallest, defect)
        self.size, self.dtype = len(basis), self.basis.dtype
        v = scales.to(self.dtype).tolist()
        self._admit(*v)  # once more, rounded
        rows = numbers_beside([v, [1.0 / x for x in v]], self.basis)
        self.scales = rows[0]
        with matmul_tf32(self.basis, allow=False):  # else one would not be the inverse of the other
            self.matrix, self.inverse = ((self.basis * rows[:, None]) @ self.basis.mT).unbind()

    def _apply(self, x: Tensor, axis: int, inverse: bool) -> Tensor:
        matrix = self.inverse if inverse else self.matrix
        return x @ matrix if axis == -1 else times(matrix, x)

    def variance(self) -> Tensor:
        """Returns the diagonal of A A^T."""
        return self.matrix.square().sum(0)


class Singular(Factor):
    """A = U diag(v) U^T where some v_i are 0: noise that leaves directions bare. It colours; nothing can be whitened.

    Only the published recipe is run with it, for study: its price is infinite.
    """

    _arguments = ("basis", "scales")

    def __init__(self, basis: Tensor, scales: Tensor):
        if not bool(scales.isfinite().all()) or float(scales.min()) != 0.0:
            raise ValueError("the scales of a Singular factor are finite, and the smallest is 0")
        self.basis, self.scales = basis.detach().clone(), scales.detach().to(basis)
        self.size, self.dtype = len(basis), self.basis.dtype
        self.smallest, self.largest = 0.0, float(scales.max())
        self.matrix = (self.basis * self.scales) @ self.basis.mT

    def _apply(self, x: Tensor, axis: int, inverse: bool) -> Tensor:
        if inverse:
            raise ValueError("a singular geometry cannot whiten: no privacy; give the spectrum a floor")
        return x @ self.matrix if axis == -1 else times(self.matrix, x)

    def variance(self) -> Tensor:
        """Returns the diagonal of A A^T."""
        return self.matrix.square().sum(0)
