"""Memory that a layer uses again at each batch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod

from torch import Tensor

__all__ = ["Room"]

_LARGE = 1 << 22
"""Bytes below which C's own allocator uses memory again anyway."""


class Room:
    """Memory for the per-example gradients of one layer, on a CPU.

    The kernel hands fresh memory out page by page, and clears it: for the gradients of a large layer that takes longer
    than to sum them. So a room lends the same memory again as soon as whoever had it is gone.
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
