"""Counts the bytes of tensors that are alive: what an allocator would see of a GPU's memory."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside a ``with`` block, follows all memory that operations of torch return.

    Attributes:
        now: Bytes that are alive.
        peak: The most that were at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._add(each)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._known:
            self._known[address] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, address)

    def _gone(self, address: int) -> None:
        self.now -= self._known.pop(address)


def peak_of(work: Any) -> int:
    """Return the most bytes that some work takes at a time."""
    with LiveBytes() as live:
        work()
    return live.peak
