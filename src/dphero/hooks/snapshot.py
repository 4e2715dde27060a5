"""The state of a model, put back after each run: parameters, buffers, modes and random generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dphero.numerics.compare import all_equal
from dphero.numerics.generators import RandomState, seed_generators


class ModelSnapshot:
    """The state of a model, and what puts it back after a run.

    Args:
        module: The model.

    Attributes:
        own_generators: Random generators that belong to it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tables = [
            (f"{path}.{kind}".strip("."), table, dict(table))
            for path, child in module.named_modules()
            for kind, table in (("parameter", child._parameters), ("buffer", child._buffers))
        ]
        self._values = {
            id(tensor): tensor.detach().clone() for _, _, table in self._tables for tensor in _tensors(table)
        }
        self._gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        self._modes = [(child, child.training) for child in module.modules()]
        attributes = [value for child in module.modules() for value in vars(child).values()]
        self.own_generators = [value for value in attributes if isinstance(value, torch.Generator)]

    @contextmanager
    def restored_afterwards(self, seed: int | None = None) -> Iterator[Changes]:
        """Run something; say what it changed; put everything back, random generators included.

        Args:
            seed: What random generators start from; left out, from where they are.
        """
        changes = Changes()
        generators = started = RandomState(self.own_generators)
        try:
            if seed is not None:
                seed_generators(seed, self.own_generators)
                started = RandomState(self.own_generators)
            yield changes
        finally:
            unchanged: set[int] = set()
            try:
                changes.random = not started.is_current
                changes.state, unchanged = self._changed()
            finally:
                self._put_back(generators, unchanged)

    def _put_back(self, generators: RandomState, unchanged: set[int]) -> None:
        """Put everything back, also if Ctrl-C comes between."""
        try:
            generators.restore()
            self._restore(unchanged)
        except BaseException:
            generators.restore()
            self._restore(set())
            raise

    def _changed(self) -> tuple[dict[str, Tensor], set[int]]:
        """Return what was written, by name, and the ``id`` of each tensor that was not."""
        there = [
            (_name(path, name), tensor, before.get(name))
            for path, table, before in self._tables
            for name, tensor in table.items()
        ]
        kept = [(t.detach(), self._values[id(old)]) for _, t, old in there if t is not None and old is not None]
        equal = iter(all_equal(kept))  # nearly all of them
        found, unchanged = {}, set()
        for name, tensor, old in there:
            known = None if old is None else self._values[id(old)]
            like = tensor is not None and known is not None and (next(equal) or same(tensor.detach(), known))
            if tensor is not None and not like:
                found[name] = tensor.detach().clone()
            elif tensor is old:
                unchanged.add(id(tensor))
        return found, unchanged

    @torch.no_grad()
    def _restore(self, unchanged: set[int]) -> None:
        for _, table, before in self._tables:
            table.clear()
            table.update(before)
            for tensor in _tensors(before):
                if id(tensor) not in unchanged and not same(tensor, self._values[id(tensor)]):
                    tensor.copy_(self._values[id(tensor)])
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for child, training in self._modes:
            child.training = training


def buffer_name(path: str, name: str) -> str:
    """Return how a buffer of the module at ``path`` is called among changes."""
    return _name(f"{path}.buffer".strip("."), name)


def _name(table: str, name: str) -> str:
    return f"{table} {name!r}"


class Changes:
    """What a run changed before it was put back.

    Attributes:
        state: Parameters and buffers that were written, and what was written.
        random: Whether random numbers were drawn.
    """

    state: dict[str, Tensor]
    random: bool


def same(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors are equal, NaN where NaN is."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(first, second) or bool(((first == second) | ((first != first) & (second != second))).all())


def _tensors(table: dict[str, Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in table.values() if tensor is not None]
