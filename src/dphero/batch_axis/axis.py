"""Which axis of a tensor carries the examples of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dphero.numerics.precision import widened


@dataclass(frozen=True)
class BatchAxis:
    """Where the n examples lie in a tensor.

    Attributes:
        axis: The axis that carries them; ``None`` when the tensor is *unbatched*, the same for all examples
            (a position embedding looked up over an ``arange``).
        fold: How many consecutive entries of that axis belong to one example; 1 unless other axes were
            folded into the batch, as in ``tokens.reshape(batch * length, width)``.
    """

    axis: int | None
    fold: int = 1

    @property
    def unbatched(self) -> bool:
        """Whether the tensor carries no example at all."""
        return self.axis is None

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a view with the batch axis first: ``(n * fold, ...)``."""
        assert self.axis is not None
        return tensor.movedim(self.axis, 0) if self.axis else tensor

    def split(self, tensor: Tensor, examples: int) -> Tensor:
        """Return ``(n, ...)``: for each example, the tensor that a batch of this example alone would have."""
        if self.axis is None:
            return tensor.expand(examples, *tensor.shape)
        return tensor.unflatten(self.axis, (examples, self.fold)).movedim(self.axis, 0)

    @staticmethod
    def fit(axis: int | None, shape: torch.Size, examples: int) -> BatchAxis | None:
        """Return the layout of a tensor of this shape, its axis being known; ``None`` where it cannot be."""
        if axis is None:
            return _UNBATCHED
        return _fit(axis, shape[axis], examples) if axis < len(shape) else None


_UNBATCHED = BatchAxis(None)


@lru_cache(maxsize=4096)
def _fit(axis: int, size: int, examples: int) -> BatchAxis | None:
    fold, rest = divmod(size, examples) if examples else (0, 0)
    return BatchAxis(axis, fold) if fold and not rest else None


def compare_shapes(first: torch.Size, second: torch.Size, n_first: int, n_second: int) -> BatchAxis | None:
    """Read a layout off the shapes that one tensor had with two batch sizes; ``None`` where they fit no layout."""
    if first == second:
        return BatchAxis(None)
    if len(first) != len(second):
        return None
    differing = [axis for axis, sizes in enumerate(zip(first, second, strict=True)) if sizes[0] != sizes[1]]
    if len(differing) != 1:
        return None
    layout, other = BatchAxis.fit(differing[0], first, n_first), BatchAxis.fit(differing[0], second, n_second)
    return layout if layout == other else None


def arrange(values: Sequence[Any], layouts: Sequence[BatchAxis], examples: int | None = None) -> list[Any]:
    """Bring tensors into the form from which pieces are made.

    With ``examples``, tensors are split by examples, in float32 at least: the model's code is run on them again,
    without autocast. Else their rows come to the front. What is no tensor stays as it is.
    """
    ways = iter(layouts)
    arranged = []
    for value in values:
        if isinstance(value, Tensor):
            way = next(ways)
            value = way.rows(value) if examples is None else way.split(widened(value), examples)
        arranged.append(value)
    return arranged
