"""Memory that a layer uses again at each batch; and, on a GPU, what torch keeps for later.

The kernel hands fresh memory out page by page, and clears it: for the gradients of a large layer that takes longer than
to sum them. Without any of it a step of the MLP takes 11 % more CPU time, one of the CIFAR CNN about 3 % (quartiles
-3 to 10 %), one of LeNet 1 % (`benchmarks/results/buffers-cpu.log`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

_LARGE = 1 << 22
"""Bytes below which C's own allocator uses memory again anyway."""
_SOME = 1 << 20
"""The same where memory is kept from one batch to the next, among all that comes and goes between."""
_OURS = 2
"""References to an attribute that is an argument."""


class ReusableBuffer:
    """Memory for the per-example gradients of one layer, on a CPU.

    It lends the same memory again as soon as whoever had it is gone.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._borrower: weakref.ref[object] | None = None

    def lend(self, borrower: object, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Return memory of this shape, holding anything; it is the borrower's alone for as long as that lives.

        Args:
            borrower: Who will use it. Nobody else may keep it, or a view of it, for longer (else: :meth:`forget`).
            like: A tensor of the wanted type and device.
            shape: The wanted shape.
        """
        size = prod(shape)
        lent = self._borrower is not None and self._borrower() is not None
        if lent or like.device.type != "cpu" or size * like.element_size() < _LARGE:
            return like.new_empty(shape)
        if self._memory is None or self._memory.dtype != like.dtype or self._memory.numel() < size:
            self._memory = None  # freed before its successor is asked for
            self._memory = like.new_empty(size)
        self._borrower = weakref.ref(borrower)
        return self._memory[:size].view(*shape)

    def forget(self) -> None:
        """Leave what was lent to whoever has it."""
        self._memory = self._borrower = None


class RefCountedBuffer:
    """Memory for the sum of one layer's gradients, on a CPU.

    The sum becomes the gradient that the user gets, who may keep it, or a view of it. So the memory is lent again only
    when nothing refers to it any more.
    """

    def __init__(self) -> None:
        self._memory: torch.UntypedStorage | None = None

    def lend(self, like: Tensor, rows: int, columns: int) -> Tensor:
        """Return a matrix, holding anything, of the type and on the device of another tensor."""
        size = rows * columns * like.element_size()
        if like.device.type != "cpu" or size < _SOME:
            return like.new_empty(rows, columns)
        if self._memory is None or self._memory.nbytes() != size or self._is_seen():
            self._memory = None  # freed before its successor is asked for, or left to whoever has it
            self._memory = like.new_empty(rows, columns).untyped_storage()
        return like.new_empty(0).set_(self._memory, 0, (rows, columns), (columns, 1))

    def _is_seen(self) -> bool:
        """Tell whether a tensor lies in the memory, or somebody else has it: another process, once it was shared."""
        assert self._memory is not None
        used = torch._C._storage_Use_Count(self._memory._cdata) > 1 or sys.getrefcount(self._memory) > _OURS
        return used or self._memory.is_shared()


@contextmanager
def cache_emptied() -> Iterator[None]:
    """Let torch not keep, on a GPU, memory from before this phase during it, nor what it takes after it."""
    _empty()
    try:
        yield
    finally:
        _empty()


def _empty() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
