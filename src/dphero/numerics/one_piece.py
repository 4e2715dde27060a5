"""Many tensors on a GPU that lie side by side in one: what is done to all of them then takes one operation."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from dphero.numerics.precision import at_least_single
from dphero.numerics.transfer import grouped

_ALIGNED = 64
"""Elements of which each place has a multiple: products are slow where a matrix starts anywhere."""


def room_for(tensors: Collection[Tensor]) -> list[Tensor]:
    """Return tensors of the same shapes and devices, holding anything, of float32 at least; on a GPU side by side."""
    found: dict[int, Tensor] = {}
    for device, dtype, size, places in _layout(_kinds(tensors)):
        if device.type == "cpu":
            found.update({n: torch.empty(shape, dtype=dtype, device=device) for n, shape, _, _ in places})
            continue
        whole = torch.empty(size, dtype=dtype, device=device)
        found.update({n: whole.as_strided(shape, strides, start) for n, shape, strides, start in places})
    return [found[n] for n in range(len(found))]


def fits(room: Collection[Tensor], tensors: Collection[Tensor]) -> bool:
    """Tell whether `room_for` made this room for tensors like these: they may have been moved or cast since."""
    return _kinds(room) == _kinds(tensors)


_Kinds = tuple[tuple[torch.device, torch.dtype, torch.Size], ...]
"""The device, type and shape of the room for each tensor."""


def _kinds(tensors: Collection[Tensor]) -> _Kinds:
    return tuple([(each.device, at_least_single(each.dtype), each.shape) for each in tensors])


_Place = tuple[int, torch.Size, tuple[int, ...], int]
"""Which tensor, its shape and strides, and where it begins."""


@lru_cache(16)
def _layout(kinds: _Kinds) -> list[tuple[torch.device, torch.dtype, int, list[_Place]]]:
    """Return, for the tensors of each device and type, the size of the one in which they lie, and their places in it.

    It depends on nothing but its argument, and a private step asks for the same each time.
    """
    found = []
    for numbers in grouped(kind[:2] for kind in kinds):
        shapes = [kinds[n][2] for n in numbers]
        ends = [*accumulate(_room(math.prod(shape)) for shape in shapes)]
        places = [
            (n, shape, tuple([math.prod(shape[axis + 1 :]) for axis in range(len(shape))]), start)
            for n, shape, start in zip(numbers, shapes, [0, *ends], strict=False)
        ]
        found.append((*kinds[numbers[0]][:2], ends[-1], places))
    return found


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
