"""A number for each example, of all bits of what belongs to it: whether two are the same, without keeping a copy.

A copy of the gradients at a language model's outputs takes as much memory as these. What is computed again from the
same numbers comes out the same to the bit, nearly always; where it does not, copies are made and compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SOME = 1 << 22
"""So many entries are read at a time: whole numbers of 64 bits take memory."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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

    It is the sum of all entries, read as whole numbers, each times an odd number of its own, modulo 2^64: never the
    same where one entry differs, and where several do, by chance alone.
    """
    if value is None:
        return None
    value = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
    axis = axis_of_rows(value, rows)
    matrix = value.reshape(1, -1) if axis is None else by_row(value, axis, rows)
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
