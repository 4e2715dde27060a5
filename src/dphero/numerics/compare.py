"""Whether two tensors are the same up to rounding, and numbers to compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_AT_ONCE = ("cpu",)
"""Devices that need not be waited for."""


def largest_gap(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Return the largest difference between entries, and the largest finite entry of the first tensor.

    The difference is infinite where one entry is finite and the other is not; NaN counts as equal to NaN.
    """
    return largest_gaps([gap_and_size(first, second)])[0]


def largest_gaps(found: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Return :func:`largest_gap` of some pairs of tensors, from :func:`gap_and_size` of each."""
    return [(math.inf if differs else gap, size) for differs, gap, size in numbers_of(found)]


def gap_and_size(first: Tensor, second: Tensor) -> Tensor:
    """Return what :func:`largest_gaps` needs of a pair of tensors, where these are: a GPU is not waited for."""
    if not first.numel():
        return torch.zeros(3, device=first.device)
    finite = first.isfinite() & second.isfinite()
    odd = (first != second) & ~finite & ~(first.isnan() & second.isnan())
    scale, gap = torch.where(finite, first, 0).abs().max(), torch.where(finite, first - second, 0).abs().max()
    return torch.stack([odd.any().to(gap.dtype), gap, scale])


def all_equal(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Tell of each pair whether it holds the same numbers (NaN is no number)."""
    alike = [one.shape == two.shape and one.dtype == two.dtype and one.device == two.device for one, two in pairs]
    at_once = [one.device.type in _AT_ONCE for one, _ in pairs]
    there = [
        (one == two).all().view(1)
        for (one, two), like, here in zip(pairs, alike, at_once, strict=True)
        if like and not here
    ]
    found = iter(numbers_of(there))
    return [
        like and (torch.equal(one, two) if here else bool(next(found)[0]))
        for (one, two), like, here in zip(pairs, alike, at_once, strict=True)
    ]


def numbers_of(rows: Sequence[Tensor]) -> list[list[float]]:
    """Return what is in some vectors of one length; a GPU is waited for once, not for each."""
    kinds = [(row.device, row.dtype) for row in rows]
    found = {
        kind: iter(torch.stack([row for row, its in zip(rows, kinds, strict=True) if its == kind]).tolist())
        for kind in dict.fromkeys(kinds)
    }
    return [next(found[kind]) for kind in kinds]


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
