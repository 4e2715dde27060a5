"""Factors with a scale along each of a few directions, and one for all the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dphero.geometry.basis import TOLERANCE, numbers_beside, orthonormal
from dphero.geometry.factor import Factor, InnerProducts, times
from dphero.numerics.partial_norms import PartialNorm
from dphero.numerics.precision import matmul_tf32
from dphero.numerics.products import short_parts, thin_product

_ROUNDINGS = 4  # times the square root of the terms: units of the last place that a product may lose
_CANCELLING = 4  # times as much as a product alone does s x + U (...) U^T x lose where the two nearly cancel


class LowRank(Factor):
    """A = s (I + U (diag(v / s) - I) U^T): scale v_i along r orthonormal directions, s along all others.

    Costs two thin matrix products (2 k r for a vector) and needs no full eigendecomposition.

    Args:
        basis: U, k x r.
        scales: v.
        rest: s.
        defect: how far U^T U is from I at most, for those who know: measuring it waits for a GPU. None: measured.
    """

    _arguments = ("basis", "scales", "rest")

    def __init__(self, basis: Tensor, scales: Tensor, rest: float, *, defect: float | None = None):
        if basis.dim() != 2 or not 0 < basis.shape[1] < basis.shape[0] or scales.shape != basis.shape[1:]:
            shapes = f"{(*basis.shape,)} and {(*scales.shape,)}"
            raise ValueError(f"LowRank needs basis k x r and scales r with 0 < r < k, not {shapes}")
        self.rest = float(rest)
        self._admit(*scales.tolist(), self.rest)
        self.basis = orthonormal(basis.detach(), _CANCELLING * self.largest / self.smallest, defect)
        self.size, self.dtype = len(basis), self.basis.dtype
        v, s = scales.to(self.dtype).tolist(), self.rest
        self._admit(*v, s)  # once more, rounded
        w, t = [1.0 / x for x in v], 1.0 / s
        # where a v_i is below s there is no root
        whole = self.smallest >= s
        outer = [[x - s for x in v], [y - t for y in w], *([[math.sqrt(t * t - y * y) for y in w]] if whole else [])]
        self._room = _ROUNDINGS * math.sqrt(self.size) * torch.finfo(self.dtype).eps
        within = [y * y - t * t for y in w]
        beside = [(s * y) ** 2 - 1.0 for y in w]
        rows = numbers_beside([v, within, [(1.0 + self._room) * t * t] * len(v), beside, *outer], self.basis)
        self.scales, self._inverse_squares, self._whole_scale, self._beside = rows[0], rows[1], rows[2, :1], rows[3]
        turned = (self.basis * rows[4:, None]).unbind()
        self._spread, self._gather = turned[:2]
        self._taken = turned[2] if whole else None
        # The short norm takes ||U^T x||^2 from ||x||^2: beyond this condition the rounding would show.
        self._short_norm = (self.largest / self.rest) ** 2 * torch.finfo(self.dtype).eps <= TOLERANCE
        self._stretch = self.rest / self.smallest
        self._parts = short_parts(self.basis)

    def _apply(self, x: Tensor, axis: int, inverse: bool) -> Tensor:
        rest, out = (1.0 / self.rest, self._gather) if inverse else (self.rest, self._spread)
        if axis == -1:
            flat = x.reshape(-1, self.size)
            return torch.addmm(flat, flat @ self.basis, out.mT, beta=rest).reshape(x.shape)
        return times(out, times(self.basis.mT, x), add=x, beta=rest)

    def colour_(self, x: Tensor, axis: int = -1) -> None:
        """Replaces x by A x with no copy of x: noise is large."""
        if x.dim() != 2 or x.dtype != self.dtype:
            super().colour_(x, axis)
            return
        with matmul_tf32(x, allow=False):  # as in `act`
            left, right = (self._spread, self.basis.mT @ x) if axis == -2 else (x @ self.basis, self._spread.mT)
            x.addmm_(left, right, beta=self.rest)

    def lengths(self, x: Tensor, axis: int = -1) -> PartialNorm:
        """Returns what ||x||^2 / s^2 + sum_i (1 / v_i^2 - 1 / s^2) <u_i, x>^2 is made of: nothing is whitened.

        It is a difference, along a strong direction of much larger terms. So it leaves room for their rounding: a norm
        that is too small would let an example through with more than its share.
        """
        whitened = None if self._short_norm else super().lengths(x, axis).whole
        x = self._enter(x, axis)
        whole = torch.linalg.vector_norm(x, dim=axis)
        if whitened is not None:
            return PartialNorm(whitened.add_(whole * (self._room / self.rest)))
        with matmul_tf32(x, allow=False):
            if self._taken is not None:  # no direction gets less noise than the rest, so all terms are of one sign
                inner = x @ self._taken if axis == -1 else times(self._taken.mT, x)
                return PartialNorm(whole, self._whole_scale, torch.linalg.vector_norm(inner, dim=axis))
            inner = (x @ self.basis if axis == -1 else times(self.basis.mT, x)).square_()
            within = inner @ self._inverse_squares if axis == -1 else self._inverse_squares @ inner
        return PartialNorm(whole.square_().mul_(self._whole_scale[0]).add_(within).clamp_(min=0.0).sqrt_())

    def inner_products(self, x: Tensor) -> InnerProducts:
        """Returns (<a, b> + sum_i (s^2 / v_i^2 - 1) <u_i, a> <u_i, b>) / s^2, taken apart: nothing is whitened."""
        if not self._short_norm:
            return super().inner_products(x)
        if x.dtype != torch.bfloat16 or self._parts is None:
            x = self._enter(x, -1)
        near = thin_product(x, self.basis, self._parts)
        return InnerProducts(x, 1.0 / self.rest, near, near * self._beside, self._stretch)

    def variance(self) -> Tensor:
        """Returns s^2 + sum_i U_i^2 (v_i^2 - s^2)."""
        return self.rest**2 + self.basis.square() @ (self.scales.square() - self.rest**2)
