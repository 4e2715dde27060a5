"""Whether two tensors are the same up to rounding, and numbers to compare with."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def largest_gap(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Return the largest difference between entries, and the largest finite entry of the first tensor.

    The difference is infinite where one entry is finite and the other is not; NaN counts as equal to NaN.
    """
    if not first.numel():
        return 0.0, 0.0
    finite = first.isfinite() & second.isfinite()
    odd = (first != second) & ~finite & ~(first.isnan() & second.isnan())
    scale, gap = torch.where(finite, first, 0).abs().max(), torch.where(finite, first - second, 0).abs().max()
    differs, found, size = torch.stack([odd.any().to(gap.dtype), gap, scale]).tolist()  # a GPU is waited for once
    return math.inf if differs else found, size


def nearly_equal(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Tell whether entries are the same, up to a part of the largest of them where they are floating-point numbers."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    gap, scale = largest_gap(first, second)
    return gap <= tolerance * scale


def is_short(*tensors: Tensor) -> bool:
    """Tell whether one of these tensors has a short floating-point format."""
    return any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)


def distinct_numbers(like: Tensor) -> Tensor:
    """Return numbers that differ from entry to entry, in the shape of a tensor: weights that tell entries apart."""
    return torch.arange(1.0, like.numel() + 1, device=like.device).cos_().reshape(like.shape)


def scattered_numbers(like: Tensor) -> Tensor:
    """Return numbers between -1 and 1 without any order, always the same ones, in the shape of a tensor."""
    places = torch.arange(1.0, like.numel() + 1, device=like.device)
    return places.square_().sin_().to(like.dtype).reshape(like.shape)
