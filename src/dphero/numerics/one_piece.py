"""Many tensors on a GPU that lie side by side in one: what is done to all of them then takes one operation."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dphero.numerics.precision import at_least_single
from dphero.numerics.transfer import grouped

_ALIGNED = 64
"""Elements of which each place has a multiple: products are slow where a matrix starts anywhere."""


def room_for(tensors: Collection[Tensor]) -> list[Tensor]:
    """Return tensors of the same shapes and devices, holding anything, of float32 at least; on a GPU side by side."""
    kinds = [(tensor.device, at_least_single(tensor.dtype)) for tensor in tensors]
    shapes = [tensor.shape for tensor in tensors]
    found: dict[int, Tensor] = {}
    for numbers in grouped(kinds):
        device, dtype = kinds[numbers[0]]
        if device.type == "cpu":
            found.update({n: torch.empty(shapes[n], dtype=dtype, device=device) for n in numbers})
            continue
        sizes = [_room(math.prod(shapes[n])) for n in numbers]
        parts = torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes)
        for n, part in zip(numbers, parts, strict=True):
            found[n] = part[: math.prod(shapes[n])].view(shapes[n])
    return [found[n] for n in range(len(kinds))]


def whole_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor in which these lie side by side, if nothing else lies there."""
    whole, place = tensors[0]._base, 0
    if whole is None or whole.dim() != 1:
        return None
    for tensor in tensors:
        same = tensor._base is whole and tensor.is_contiguous() and tensor.dtype == whole.dtype
        if not same or tensor.storage_offset() != whole.storage_offset() + place:
            return None
        place += _room(tensor.numel())
    return whole if place == whole.numel() else None


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
