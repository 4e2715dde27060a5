"""The arguments with which a model is called, and where they carry the examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dphero.numerics.trees import arguments_flatten, tree_unflatten

_EXAMPLES = 3
"""How many examples a model is examined with."""


class Arguments:
    """The arguments of one call of the model, on a batch of so many rows."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> None:
        self._leaves, self.structure = arguments_flatten(args, kwargs)
        self.rows = rows
        self.axes: Sequence[int | None] = [None] * len(self._leaves)
        """Where each argument carries the examples."""

    def choices(self) -> list[list[int | None]]:
        """Return, for each argument, where it might carry the examples; likelier first."""
        return [[*_axes(leaf, self.rows), None] for leaf in self._leaves]

    def take(self, rows: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments that consist of these rows; no gradient flows from them to what they were made from."""
        leaves = [
            leaf if axis is None else leaf.index_select(axis, torch.tensor(rows, device=leaf.device))
            for leaf, axis in zip(map(_detached, self._leaves), self.axes, strict=True)
        ]
        return tree_unflatten(leaves, self.structure)

    def different_rows(self) -> list[int]:
        """Return up to three rows that are finite and differ from each other, or row 0 where there are none.

        Those that differ in most arguments come first: a model may do something else where a row is masked.
        """
        parts = [leaf.movedim(axis, 0) for leaf, axis in zip(self._leaves, self.axes, strict=True) if axis is not None]
        parts = [part.reshape(self.rows, -1) for part in parts]
        left = torch.stack([part.isfinite().all(1).cpu() for part in parts]).all(0)
        differing = torch.ones(
            len(parts), self.rows, dtype=torch.int64, device="cpu"
        )  # from all that were found, by argument
        found: list[int] = []
        while left.any() and len(found) < _EXAMPLES:
            found.append(int(((1 + differing.sum(0)) * left).argmax()))
            others = torch.stack([(part != part[found[-1]]).any(1).cpu() for part in parts])
            left &= others.any(0)
            differing &= others
        return found or [0]

    @property
    def way(self) -> tuple[Any, Sequence[int | None]]:
        """The structure of the arguments, and where each of them carries the examples."""
        return self.structure, tuple(self.axes)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of all tensors among the arguments."""
        return [tuple(leaf.shape) for leaf in self._leaves if isinstance(leaf, Tensor)]


def _detached(leaf: Any) -> Any:
    wanted = isinstance(leaf, Tensor) and leaf.requires_grad
    return leaf.detach().requires_grad_() if wanted else leaf


def _axes(leaf: Any, rows: int) -> list[int]:
    if not isinstance(leaf, Tensor):
        return []
    return [axis for axis in (0, 1) if axis < leaf.dim() and leaf.shape[axis] == rows]
