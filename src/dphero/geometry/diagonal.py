"""Factors with one scale for each coordinate, or one for all."""

from __future__ import annotations

import torch
from torch import Tensor

from dphero.geometry.factor import Factor, InnerProducts


class Scalar(Factor):
    """A = scale I. Holds no tensor, so it suits every device and precision."""

    _arguments = ("size", "scale")

    def __init__(self, size: int, scale: float = 1.0):
        self.size, self.scale = size, float(scale)
        self._admit(self.scale)

    def _apply(self, x: Tensor, axis: int, inverse: bool) -> Tensor:
        return x / self.scale if inverse else x * self.scale

    def inner_products(self, x: Tensor) -> InnerProducts:
        """Returns what inner products of A^-1 x are made of: x as it is."""
        return InnerProducts(x, scale=1.0 / self.scale)

    def variance(self) -> Tensor:
        """Returns scale^2 for each coordinate."""
        return torch.full((self.size,), self.scale**2, dtype=torch.float64)


class Diagonal(Factor):
    """A = diag(scales)."""

    _arguments = ("scales",)

    def __init__(self, scales: Tensor):
        self.scales = scales.detach().to(torch.promote_types(scales.dtype, torch.float32), copy=True)
        self.size, self.dtype = len(scales), self.scales.dtype
        self._admit(*map(float, torch.aminmax(self.scales)))  # NaN spreads to both

    def _apply(self, x: Tensor, axis: int, inverse: bool) -> Tensor:
        scales = self.scales if axis == -1 else self.scales[:, None]
        return x / scales if inverse else x * scales

    def variance(self) -> Tensor:
        """Returns scales^2."""
        return self.scales.square()
