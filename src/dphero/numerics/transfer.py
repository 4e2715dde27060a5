"""Tensors on their way between the CPU and other devices, in few pieces; who sends does not wait.

Where it is enough to tell a tensor from others, a *mark* of it travels in its place.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dphero.numerics.precision import full_precision

_CPU = torch.device("cpu")
_APART = 256
"""Bytes: the tensors of a piece begin at multiples of them, as memory of their own does."""
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
        self._wait()
        return _apart(self._tensors, self._pieces)

    def read(self) -> list[memoryview]:
        """Wait as :meth:`arrived` does; return the bytes of each tensor, row after row."""
        self._wait()
        travelled = {number for numbers, _ in self._pieces for number in numbers}
        found = [memoryview(b"" if n in travelled else _bytes(each)) for n, each in enumerate(self._tensors)]
        for numbers, piece in self._pieces:
            whole, at = memoryview(_bytes(piece)), 0
            for number in numbers:
                end = at + self._tensors[number].numel() * piece.itemsize
                found[number], at = whole[at:end], end
        return found

    def _wait(self) -> None:
        for event in self._events:
            event.synchronize()


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


def sent(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Send tensors from the CPU, each to its device, in one piece for each of these and each type; wait for nothing.

    There each is row-major, at an address as even as that of memory of its own, so it is computed with in the same way.
    """
    found = list(tensors)
    for numbers in grouped((device, tensor.dtype) for tensor, device in zip(tensors, devices, strict=True)):
        device = devices[numbers[0]]
        if device != _CPU and len(numbers) == 1:
            found[numbers[0]] = to_device(tensors[numbers[0]].contiguous(), device)
        elif device != _CPU:
            some = [tensors[number] for number in numbers]
            # zeros: what lies between them gets into checkpoints
            room = _room(some)
            whole = torch.zeros(sum(room), dtype=some[0].dtype, device=_CPU, pin_memory=device.type == "cuda")
            torch._foreach_copy_(_cut(whole, room, some), some)
            for number, part in zip(numbers, _cut(to_device(whole, device), room, some), strict=True):
                found[number] = part
    return found


def _room(tensors: Sequence[Tensor]) -> list[int]:
    """Return sizes of tensors and of gaps, by turns."""
    found = []
    for each in tensors:
        found += [each.numel(), -each.numel() % (_APART // each.itemsize)]
    return found


def _cut(whole: Tensor, room: list[int], like: Sequence[Tensor]) -> list[Tensor]:
    return [part.view(each.shape) for part, each in zip(whole.split_with_sizes(room)[::2], like, strict=True)]


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
        parts = piece.split_with_sizes([tensors[number].numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            found[number] = part.view(tensors[number].shape)
    return found


def mark(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is on the CPU; else its rows along one direction, the same for all tensors."""
    return tensor if tensor.is_cpu or tensor.dim() < 2 else along_a_line(tensor)


def marks(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the :func:`mark` of each. Each is computed alone, so that it does not depend on its company."""
    with full_precision():
        return [each if each.is_cpu or each.dim() < 2 else _along_a_line(each) for each in tensors]


def along_a_line(tensor: Tensor) -> Tensor:
    """Return the inner product of each row with the same direction."""
    with full_precision():
        return _along_a_line(tensor)


def _along_a_line(tensor: Tensor) -> Tensor:
    rows = tensor if tensor.dim() == 2 else tensor.flatten(1)
    return rows @ _direction(rows.shape[1], rows.dtype, rows.device)


@lru_cache(256)
def _direction(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size), device="cpu").to(device, dtype)
