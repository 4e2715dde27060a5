"""Where a batch carries its examples: read off two batches, of two and of three copies of one example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Path = tuple[Any, ...]
"""Keys and numbers that lead to a value inside a batch."""
_LIST = "list"


@dataclass(frozen=True)
class Leaf:
    """A tensor of a batch, and the axis that carries its examples (``None``: the same for all of them)."""

    path: Path
    value: Tensor
    axis: int | None


class BatchRows:
    """Takes batches apart by their examples.

    Args:
        two: What the collate function makes of two copies of an example,
        three: and of three.

    Raises:
        ValueError: If a tensor carries its examples in no axis.
    """

    def __init__(self, two: Any, three: Any) -> None:
        self._axes: dict[Path, int | str | None] = {}
        self._read((), two, three)

    def _read(self, path: Path, two: Any, three: Any) -> None:
        if _is_array(two) and _is_array(three):
            self._axes[path] = _axis(path, tuple(np.shape(two)), tuple(np.shape(three)))
        elif isinstance(two, Mapping) and isinstance(three, Mapping):
            for name in two:
                if name in three:
                    self._read((*path, name), two[name], three[name])
        elif _is_sequence(two) and _is_sequence(three):
            if (len(two), len(three)) == (2, 3):
                self._axes[path] = _LIST
            else:
                for number, pair in enumerate(zip(two, three, strict=False)):
                    self._read((*path, number), *pair)

    def leaves(self, batch: Any) -> list[Leaf]:
        """Return the tensors of a batch."""
        return [
            Leaf(path, torch.as_tensor(value), axis)
            for path, axis in self._axes.items()
            if axis is None or isinstance(axis, int)
            if _is_array(value := follow(batch, path)) and (axis is None or value.ndim > axis)
        ]

    def shapes(self, batch: Any) -> dict[Path, tuple[int, ...]]:
        """Return the shape of an example in each tensor of a batch."""
        return {leaf.path: _without(leaf.value.shape, leaf.axis) for leaf in self.leaves(batch)}

    def rows(self, batch: Any, count: int) -> list[list[Any]]:
        """Return what a batch holds of each of its examples."""
        found: list[list[Any]] = [[] for _ in range(count)]
        for path, axis in self._axes.items():
            value = follow(batch, path)
            if axis == _LIST:
                parts: Sequence[Any] = [list(_values(each)) for each in value]
            elif isinstance(axis, int):
                parts = list(torch.as_tensor(value).movedim(axis, 0))
            else:
                continue
            if len(parts) != count:
                raise ValueError(
                    f"the collate function makes {len(parts)} rows{_place(path)} of {count} examples: every example "
                    "that is drawn must be one row"
                )
            for row, part in zip(found, parts, strict=True):
                row.append(part)
        return found

    def common(self, batch: Any) -> list[tuple[Path, Any]]:
        """Return the tensors and numbers of a batch that belong to all of its examples."""
        return [(leaf.path, leaf.value) for leaf in self.leaves(batch) if leaf.axis is None]


def follow(batch: Any, path: Path) -> Any:
    """Return the value at the end of a path, or ``None`` if there is none."""
    for step in path:
        try:
            batch = batch[step]
        except (KeyError, IndexError, TypeError):
            return None
    return batch


def _axis(path: Path, two: tuple[int, ...], three: tuple[int, ...]) -> int | None:
    if two == three:
        return None
    if len(two) == len(three):
        differing = [axis for axis, sizes in enumerate(zip(two, three, strict=True)) if sizes[0] != sizes[1]]
        if len(differing) == 1 and (two[differing[0]], three[differing[0]]) == (2, 3):
            return differing[0]
    raise ValueError(
        f"the collate function makes tensors of shapes {two} and {three}{_place(path)} of two and of three copies of "
        "an example: no axis carries the examples. Pad them and stack them in axis 0 (an EmbeddingBag takes a padded "
        "matrix if its padding_idx is set)."
    )


def _place(path: Path) -> str:
    return f" at {''.join(f'[{step!r}]' for step in path)} of the batch" if path else ""


def _is_array(value: Any) -> bool:
    """Tell whether a value is a tensor or can be one: a number is one without axes."""
    return isinstance(value, Tensor | int | float) or (isinstance(value, np.ndarray) and value.dtype.kind in "biuf")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _without(shape: Sequence[int], axis: int | None) -> tuple[int, ...]:
    return tuple(size for number, size in enumerate(shape) if number != axis)


def _values(value: Any) -> Iterator[Any]:
    """Yield what can be compared of one example in a list of them."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _values(each)
    elif _is_sequence(value):
        for each in value:
            yield from _values(each)
    elif _is_array(value):
        yield torch.as_tensor(value)
    elif isinstance(value, str | bytes):
        yield value
