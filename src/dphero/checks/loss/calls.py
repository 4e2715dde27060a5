"""What is written down of a loop: calls of torch functions, what they start from, and the values in their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

_DEPTH = 4
"""How deep tensors are looked for in containers and objects."""


@dataclass(frozen=True)
class Ref:
    """Stands for the tensor with a number."""

    number: int


@dataclass
class Source:
    """A tensor from which the calls start."""

    number: int
    value: Tensor  # a copy
    axis: int | None  # where it carries the examples; None if it does not
    fold: int = 1  # how many entries along that axis belong to one example
    edge: GradientEdge | None = None  # its place in the graph, if it has a gradient
    holds: Callable[[], bool] = lambda: True  # whether the copy is still what it was


@dataclass
class Call:
    """One call of a torch function."""

    function: Any
    args: Any  # its arguments, with numbers in place of tensors that are followed
    kwargs: Any
    results: list[int | None]  # the numbers of the tensors that it returned; None for those that are not followed
    changes: frozenset[int] = frozenset()  # the numbers of tensors that it changed in place
    value: Any = None  # what it returned, if that is no tensor but a value of Python
    random: Callable[[], None] | None = None  # sets the random generators to where they were, if it drew from them
    context: Callable[[], AbstractContextManager[Any]] = ExitStack  # makes the state of torch in which it ran

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self.function, "__name__", self.function))

    @property
    def made(self) -> set[int]:
        """The numbers of all tensors that it made or changed."""
        return {number for number in self.results if number is not None} | self.changes


@dataclass
class ModelCall:
    """A call of the private model: what it was called with, and the sources that it returned."""

    inputs: list[Any]
    outputs: list[Source] = field(default_factory=list)


@dataclass
class _Found:
    tensors: list[Tensor]
    arrays: bool = False


def tensors_in(value: Any, depth: int = 0, found: _Found | None = None) -> _Found:
    """Find the tensors in nested containers, data classes and objects; and whether there are arrays."""
    found = _Found([]) if found is None else found
    if isinstance(value, Tensor):
        if not any(value is other for other in found.tensors):
            found.tensors.append(value)
    elif isinstance(value, np.ndarray):
        found.arrays = True
    elif depth < _DEPTH:
        parts: Any = ()
        if isinstance(value, Mapping):
            parts = value.values()
        elif isinstance(value, list | tuple | set):
            parts = value
        elif is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, each.name) for each in fields(value)]
        elif hasattr(value, "__dict__"):
            parts = vars(value).values()
        for part in parts:
            tensors_in(part, depth + 1, found)
    return found


def map_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves of tuples, lists, dictionaries and slices."""
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple | list):
        made = [map_values(each, change) for each in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {key: map_values(each, change) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(*(map_values(each, change) for each in (value.start, value.stop, value.step)))
    return change(value)


def leaves(value: Any) -> list[Any]:
    """Return the leaves of tuples, lists, dictionaries and slices."""
    found: list[Any] = []
    map_values(value, found.append)
    return found


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors among these leaves."""
    return [each for each in leaves(value) if isinstance(each, Tensor)]
