"""What a pass of a model depends on besides its arguments: where its tensors lie, and what its modules hold."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PLAIN", "ReplayConditions"]

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Types of arguments and attributes that are compared by value."""


class ReplayConditions:
    """Places of parameters and buffers, plain attributes of modules, and the precision of products, at one moment.

    Not part of it: attributes of other types (a list, a schedule object), and what they hold.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = self._now()
        self._note()

    def still_hold(self) -> bool:
        """Tell whether everything is as it was."""
        if self._settings() != self._known_settings:
            return False
        # Mostly the very same objects are still there, which is soon seen.
        objects = chain.from_iterable(map(dict.values, self._tables))
        if list(map(len, self._tables)) == self._sizes and all(map(is_, objects, self._objects)):
            return self._places() == self._known_places
        if self._now() != self._values:
            return False
        self._note()
        return True

    @property
    def has_hooks(self) -> bool:
        """Whether a submodule has forward hooks: a recording would not run their code."""
        return any(child._forward_hooks or child._forward_pre_hooks for child in self._submodules())

    def _note(self) -> None:
        """Remember which objects make up the present state."""
        children = list(self._module.modules())
        self._tables: list[dict[Any, Any]] = [table for child in children for table in _tables(child)]
        self._sizes = list(map(len, self._tables))
        self._objects = list(chain.from_iterable(map(dict.values, self._tables)))
        self._tensors = [value for value in self._objects if isinstance(value, Tensor)]
        self._known_places, self._known_settings = self._places(), self._settings()

    def _places(self) -> list[Any]:
        return [(tensor.data_ptr(), tensor.shape, tensor.requires_grad) for tensor in self._tensors]

    def _now(self) -> list[Any]:
        """Return everything anew."""
        found: list[Any] = [self._settings()]
        for child in self._module.modules():
            found += [value for value in vars(child).values() if type(value) in PLAIN]
            for table in (child._parameters, child._buffers):
                found += [(t.data_ptr(), t.shape, t.requires_grad) for t in table.values() if t is not None]
        return [*found, self.has_hooks]

    def _submodules(self) -> Iterator[nn.Module]:
        return (child for child in self._module.modules() if child is not self._module)

    @staticmethod
    def _settings() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def _tables(child: nn.Module) -> list[dict[Any, Any]]:
    hooks = [child._forward_hooks, child._forward_pre_hooks]
    return [vars(child), child._parameters, child._buffers, child._modules, *hooks]
