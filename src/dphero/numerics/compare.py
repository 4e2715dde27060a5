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


# -- the same to the bit, without a copy -----------------------------------------------------------------------------
# A copy of the gradients at a language model's outputs takes as much memory as these. What is computed again from the
# same numbers comes out the same to the bit, nearly always.

_SOME = 1 << 22
"""So many entries are read at a time: whole numbers of 64 bits take memory."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_SPREAD = (-7046029254386353131, -4658895280553007687)
"""Odd numbers of 64 bits without any pattern, those of splitmix64."""


def axis_of_rows(value: Tensor, rows: int) -> int | None:
    """Return where a tensor carries the examples, as far as its shape tells."""
    places = [axis for axis, size in enumerate(value.shape[:2]) if size == rows]
    return places[0] if places else 0 if value.dim() and value.shape[0] and value.shape[0] % rows == 0 else None


def by_row(value: Tensor, axis: int, rows: int) -> Tensor:
    """Return a tensor as a matrix with a row for each example."""
    return value.movedim(axis, 0).reshape(rows, -1)


def marks(value: Tensor | None, rows: int) -> Tensor | None:
    """Return a number for each example (one for all, if the shape does not tell which are whose); for zeros it is 0.

    It is the sum of all entries, read as whole numbers of 32 bits at most, each times an odd number of its own, modulo
    2^64: never the same where one of them differs, and where several do, by chance alone.
    """
    if value is None:
        return None
    value = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
    axis = axis_of_rows(value, rows)
    matrix = value.reshape(1, -1) if axis is None else by_row(value, axis, rows)
    if matrix.element_size() == 8:  # times odd numbers, the highest of 64 bits would take part modulo 2 alone
        matrix = matrix.contiguous().view(torch.int32)
    bits = matrix.view(_INTEGERS[matrix.element_size()])
    found = torch.zeros(len(bits), dtype=torch.int64, device=bits.device)
    start = 0
    for part in bits.split(max(1, _SOME // len(bits)), 1):
        found += (part.long() * _factors(start, part.shape[1], bits.device)).sum(1)
        start += part.shape[1]
    return found


def same_marks(
    first: Tensor | None, second: Tensor | None, order: Tensor | None = None, which: Tensor | None = None
) -> bool:
    """Tell whether examples ``which`` (all, if left out) have the same numbers.

    ``order`` says which example of the first each one of the second is. Where there is no tensor, all is zero.
    """
    one, two = (torch.zeros(1, dtype=torch.int64) if each is None else each.cpu() for each in (first, second))
    same = one == two if order is None or len(one) < len(order) else one[order] == two
    return bool((same if which is None or len(same) < len(which) else same[which]).all())


def _factors(start: int, count: int, device: torch.device) -> Tensor:
    found = torch.arange(start + 1, start + count + 1, device=device)
    for factor in _SPREAD:
        found *= factor
        found ^= found >> 29
    return found | 1
