"""Tensors on their way between the CPU and other devices, in few pieces; who sends does not wait."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

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
            with torch.cuda.device(device):
                self._events.append(torch.cuda.Event())
                self._events[-1].record()

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
            yield numbers, torch.cat([tensors[number].flatten() for number in numbers])


def _apart(tensors: Sequence[Tensor], pieces: Iterable[_Piece]) -> list[Tensor]:
    """Return the tensors, with those that travelled in pieces cut from them."""
    found = list(tensors)
    for numbers, piece in pieces:
        parts = piece.split([tensors[number].numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            found[number] = part.view(tensors[number].shape)
    return found
