"""Tensors on their way between the CPU and other devices, in few pieces; who sends does not wait.

Where it is enough to tell a tensor from others, a *mark* of it travels in its place.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dphero.numerics.precision import full_precision

_CPU = torch.device("cpu")
_Piece = tuple[list[int], Tensor]
"""Several tensors in one, and their numbers."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a tensor from the CPU and wait for nothing (from memory that is not pinned, one may)."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Fetched:
    """Tensors on their way to the CPU, all that come from one device in one piece.

    Args:
        tensors: Of any devices. Those of the CPU stay what they are.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        joined = _joined(tensors, [tensor.device for tensor in tensors])
        self._pieces = [(numbers, piece.to(_CPU, non_blocking=piece.is_cuda)) for numbers, piece in joined]
        self._events = []
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            self._events.append(torch.cuda.Event())
            self._events[-1].record(torch.cuda.current_stream(device))

    @property
    def is_here(self) -> bool:
        """Whether nothing has to be waited for."""
        return not self._events

    def arrived(self) -> list[Tensor]:
        """Wait for what was asked of their devices before they left, not for what was asked since."""
        for event in self._events:
            event.synchronize()
        return _apart(self._tensors, self._pieces)


def sent(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Send tensors from the CPU, each to its device, in one piece for each; nothing is waited for."""
    pieces = [(numbers, to_device(piece, devices[numbers[0]])) for numbers, piece in _joined(tensors, devices)]
    return _apart(tensors, pieces)


def grouped(kinds: Iterable[Hashable]) -> list[list[int]]:
    """Return the places of each kind, in the order in which the kinds first come."""
    groups: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(number)
    return list(groups.values())


def _joined(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> Iterator[_Piece]:
    """Yield the tensors of each device but the CPU, and of each type, in one."""
    for numbers in grouped((device, tensor.dtype) for tensor, device in zip(tensors, devices, strict=True)):
        if devices[numbers[0]] != _CPU:
            flat = [tensors[number].flatten() for number in numbers]
            yield numbers, flat[0] if len(flat) == 1 else torch.cat(flat)


def _apart(tensors: Sequence[Tensor], pieces: Iterable[_Piece]) -> list[Tensor]:
    """Return the tensors, with those that travelled in pieces cut from them."""
    found = list(tensors)
    for numbers, piece in pieces:
        parts = piece.split([tensors[number].numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            found[number] = part.view(tensors[number].shape)
    return found


def mark(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is on the CPU; else its rows along one direction, the same for all tensors."""
    if tensor.is_cpu or tensor.dim() < 2:
        return tensor
    return along_a_line(tensor)


def along_a_line(tensor: Tensor) -> Tensor:
    """Return the inner product of each row with the same direction."""
    rows = tensor.flatten(1)
    with full_precision():
        return rows @ _direction(rows.shape[1], rows.dtype, rows.device)


@lru_cache(256)
def _direction(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size), device="cpu").to(device, dtype)
