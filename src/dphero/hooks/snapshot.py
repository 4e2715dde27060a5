"""Run a model without leaving a trace: parameters, buffers and random generators are put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["ModelSnapshot", "buffer_name", "same"]


class ModelSnapshot:
    """Remembers the state of a model, and puts it back after each run.

    Args:
        module: The model.
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
        devices = {tensor.device for _, _, table in self._tables for tensor in _tensors(table)}
        self._devices = [device for device in devices if device.type == "cuda"]
        attributes = [value for child in module.modules() for value in vars(child).values()]
        self._own_generators = [value for value in attributes if isinstance(value, torch.Generator)]

    @contextmanager
    def restored_afterwards(self, seed: int | None = None) -> Iterator[Changes]:
        """Run something; say what it changed; put everything back, random generators included.

        Args:
            seed: What random generators start from; left out, from where they are.
        """
        changes = Changes()
        generators = started = self._generators()
        try:
            if seed is not None:
                self._seed(seed)
                started = self._generators()
            yield changes
        finally:
            try:
                changes.random = started != self._generators()
                changes.state = self._changed()
            finally:
                self._put_back(generators)

    def _put_back(self, generators: list[Any]) -> None:
        """Put everything back, also if Ctrl-C comes between."""
        try:
            self._set_generators(generators)
            self._restore()
        except BaseException:
            self._set_generators(generators)
            self._restore()
            raise

    def _changed(self) -> dict[str, Tensor]:
        found = {}
        for path, table, before in self._tables:
            for name, tensor in table.items():
                old = before.get(name)
                value = None if tensor is None else tensor.detach()
                known = None if old is None else self._values[id(old)]
                if value is not None and (known is None or not same(value, known)):
                    found[_name(path, name)] = value.clone()
        return found

    @torch.no_grad()
    def _restore(self) -> None:
        for _, table, before in self._tables:
            table.clear()
            table.update(before)
            for tensor in _tensors(before):
                if not same(tensor, self._values[id(tensor)]):
                    tensor.copy_(self._values[id(tensor)])
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for child, training in self._modes:
            child.training = training

    def _generators(self) -> list[Any]:
        states = [torch.get_rng_state(), *(generator.get_state() for generator in self._own_generators)]
        states += [torch.cuda.get_rng_state(device) for device in self._devices]
        state: Any = np.random.get_state()
        name, keys, *rest = state
        return [random.getstate(), (name, keys.tobytes(), *rest), *(state.numpy().tobytes() for state in states)]

    def _seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        for generator in self._own_generators:
            generator.manual_seed(seed)
        for device in self._devices:
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)

    def _set_generators(self, states: list[Any]) -> None:
        random.setstate(states[0])
        name, keys, *rest = states[1]
        np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
        others = iter([torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states[2:]])
        torch.set_rng_state(next(others))
        for generator in self._own_generators:
            generator.set_state(next(others))
        for device in self._devices:
            torch.cuda.set_rng_state(next(others), device)


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
