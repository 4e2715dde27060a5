"""The tables in which a model's modules keep their parameters and buffers.

They are looked through at every step: to walk through the modules themselves takes far longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_

from torch import nn

from dphero.hooks.snapshot import buffer_name

BufferVersions = dict[tuple[str, str], tuple[int, int]]
"""Path of a module and name of its buffer, to which tensor it is and how often that was written."""


class ModelTables:
    """Remembers the tables of all modules of a model.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._find()

    def _find(self) -> None:
        named = list(self._module.named_modules())
        self._child_tables = [child._modules for _, child in named]
        self._children = list(chain.from_iterable(map(dict.values, self._child_tables)))
        self._parameter_tables = [child._parameters for _, child in named]
        self._buffer_tables = [(path, child._buffers) for path, child in named]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that are there now, those of new modules among them."""
        children = list(chain.from_iterable(map(dict.values, self._child_tables)))
        if len(children) != len(self._children) or not all(map(is_, children, self._children)):
            self._find()
        for table in self._parameter_tables:
            for parameter in table.values():
                if parameter is not None:
                    yield parameter

    def buffers(self) -> BufferVersions:
        """Return which tensor each buffer is, and how often it was written."""
        return {
            (path, local): (id(buffer), buffer._version)
            for path, table in self._buffer_tables
            if table
            for local, buffer in table.items()
            if buffer is not None
        }


def written_between(before: BufferVersions, after: BufferVersions) -> set[str]:
    """Return the names of the buffers that were written, or exchanged, between two moments."""
    return {buffer_name(*where) for where, version in after.items() if before.get(where) != version}
