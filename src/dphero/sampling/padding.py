"""Padding: how a collate function fills shorter examples up, and filling them up further, to a public length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dphero.numerics.compare import nearly_equal
from dphero.sampling.batch_rows import BatchRows, Path

_TOLERANCE = 1e-5
"""Of the largest entry: rounding may depend on the number of rows."""


@dataclass(frozen=True)
class PaddedAxis:
    """How one axis of a tensor is filled up."""

    path: Path  # where the tensor is in the batch
    axis: int  # counted without that of the examples
    side: Literal["right", "left"]  # where the filling is
    value: float  # what it is filled with


@dataclass(frozen=True)
class Padding:
    """How a batch is padded to the longest of its examples."""

    padded: tuple[PaddedAxis, ...]
    lengths: dict[int, dict[int, int]]  # for some rows, the length that an axis of this size would have without padding

    @property
    def left(self) -> bool:
        """Whether the padding comes first."""
        return any(filled.side == "left" for filled in self.padded)


def padded_axes(path: Path, own: Tensor, whole: Tensor, *, exact: bool) -> list[PaddedAxis] | None:
    """Return how an example, ``own``, was filled up to what it is in a batch, axis by axis.

    ``None`` stands for: not with one value, or, if that is to be ``exact``, its own entries are not the same in both.
    """
    if own.dim() != whole.dim() or own.dtype != whole.dtype:
        return None
    missing = [there - here for here, there in zip(own.shape, whole.shape, strict=True)]
    longer = [axis for axis, number in enumerate(missing) if number]
    if any(number < 0 for number in missing):
        return None
    sides: tuple[Literal["right", "left"], ...] = ("right", "left")
    for side in sides:
        starts = [0 if side == "right" else number for number in missing]
        inside = tuple(slice(start, start + size) for start, size in zip(starts, own.shape, strict=True))
        if exact and not nearly_equal(whole[inside], own, _TOLERANCE):
            continue
        outside = torch.ones_like(whole, dtype=torch.bool)
        outside[inside] = False
        filling = whole[outside]
        if not longer or bool((filling == filling[0]).all()):
            return [PaddedAxis(path, axis, side, filling[0].item()) for axis in longer]
    return None


def pad_further(batch: Any, rows: BatchRows, padded: Sequence[PaddedAxis], length: int) -> Any:
    """Return a batch whose padded axes all have a public length.

    Raises:
        ValueError: If an example is longer.
    """
    for leaf in rows.leaves(batch):
        value = leaf.value
        for filled in padded:
            if filled.path == leaf.path and leaf.axis is not None:
                value = _pad(value, filled, filled.axis + (leaf.axis <= filled.axis), length)
        if value is not leaf.value:
            batch = _with(batch, leaf.path, value)
    return batch


def _pad(value: Tensor, filled: PaddedAxis, axis: int, length: int) -> Tensor:
    missing = length - value.shape[axis]
    if missing < 0:
        raise ValueError(
            f"an example has length {value.shape[axis]}, and pad_to={length}. Give a public length that no example "
            "exceeds, or cut the examples in your data set, each by itself."
        )
    shape = list(value.shape)
    shape[axis] = missing
    filling = torch.full(shape, filled.value, dtype=value.dtype, device=value.device)
    return torch.cat([value, filling] if filled.side == "right" else [filling, value], axis)


def _with(batch: Any, path: Path, value: Tensor) -> Any:
    """Return a batch with another tensor at the end of a path; containers that can be written are."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    inner = _with(batch[step], rest, value)
    if isinstance(batch, tuple):
        parts = [*batch[:step], inner, *batch[step + 1 :]]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    batch[step] = inner
    return batch
