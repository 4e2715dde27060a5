"""Which axis of a tensor carries the examples of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout", "compare_shapes"]


@dataclass(frozen=True)
class Layout:
    """Where the n examples lie in a tensor.

    Attributes:
        axis: The axis that carries them; ``None`` when the tensor is *shared*, the same for all examples
            (a position embedding looked up over an ``arange``).
        fold: How many consecutive entries of that axis belong to one example; 1 unless other axes were
            folded into the batch, as in ``tokens.reshape(batch * length, width)``.
    """

    axis: int | None
    fold: int = 1

    @property
    def shared(self) -> bool:
        """Whether the tensor carries no example at all."""
        return self.axis is None

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a view with the batch axis first: ``(n * fold, ...)``."""
        assert self.axis is not None
        return tensor.movedim(self.axis, 0) if self.axis else tensor


def compare_shapes(first: torch.Size, second: torch.Size, n_first: int, n_second: int) -> Layout | None:
    """Read a layout off the shapes that one tensor had with two batch sizes.

    Returns:
        The layout, or ``None`` where the two shapes fit no layout.
    """
    if first == second:
        return Layout(None)
    if len(first) != len(second):
        return None
    differing = [axis for axis, sizes in enumerate(zip(first, second, strict=True)) if sizes[0] != sizes[1]]
    if len(differing) != 1:
        return None
    axis = differing[0]
    fold, rest = divmod(first[axis], n_first)
    if rest or fold * n_second != second[axis] or (fold > 1 and axis > 0):
        return None
    return Layout(axis, fold)
