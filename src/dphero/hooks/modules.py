"""Hooked modules: those that own trainable parameters, and how their ``forward`` is replaced and given back."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from dphero.layers import Rule, find_rule

Slot = tuple[dict[str, nn.Parameter | None], str]
"""Where a module keeps a parameter."""

_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
"""Modules without a ``forward``: their parameters count as their parent's own."""


class HookedModule:
    """A module that owns trainable parameters, and the rule that taps it.

    Attributes:
        names: The module's own trainable parameters: local name to name in the whole model.
        parameters: Local name to parameter.
        rule: What computes and taps its output.
        original: Its own ``forward``.
        memory: What its rule keeps from one batch to the next; it goes when the model is no longer private.
    """

    def __init__(self, path: str, module: nn.Module, slots: dict[str, Slot], name_of: Mapping[int, str]) -> None:
        self.path, self.module, self._slots = path, module, slots
        self.parameters = {local: cast(nn.Parameter, where[name]) for local, (where, name) in slots.items()}
        self.names = {local: name_of[id(parameter)] for local, parameter in self.parameters.items()}
        self.rule: Rule = find_rule(module)
        self.original = module.forward
        self.memory: dict[str, Any] = {}

    @property
    def label(self) -> str:
        """Name and type of the module, for messages."""
        return f"{self.path or 'the model'!r} ({type(self.module).__name__})"

    def holding(self, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Let the module's code see these values in place of its parameters."""
        return swapped((*self._slots[local], value) for local, value in values.items())


def find_hooked_modules(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[HookedModule]:
    """Return the hooked modules of a model, given the parameters whose gradients are wanted."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    hooked_modules = []
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise ValueError(
                f"{path or 'the model'!r} is a scripted module, which cannot be tapped; use the module itself"
            )
        if isinstance(child, _CONTAINERS):
            continue
        slots = {local: slot for local, slot in _slots(child) if id(slot[0][slot[1]]) in name_of}
        if slots:
            hooked_modules.append(HookedModule(path, child, slots, name_of))
    return hooked_modules


def _slots(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    for local in module._parameters:
        yield local, (module._parameters, local)
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            for local, slot in _slots(child):
                yield f"{name}.{local}", slot


@contextmanager
def swapped(values: Iterable[tuple[dict[str, Any], str, Tensor]]) -> Iterator[None]:
    """Put tensors in place of parameters for a while: (where, name, tensor)."""
    values = list(values)
    tables = [where for where, _, _ in values]
    # To put them back is one call: Python handles no signal within, so that Ctrl-C cannot come between.
    back = map(dict.update, tables, [{name: where[name]} for where, name, _ in values])
    try:
        for where, name, value in values:
            where[name] = value
        yield
    finally:
        deque(back, 0)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace a module's ``forward`` on the instance; return what gives it back.

    Copies and pickles of the module are made as if nothing had been replaced.
    """
    attributes = vars(module)
    before: dict[str, Any] = {name: attributes[name] for name in ("forward", "__reduce_ex__") if name in attributes}

    def reduce(protocol: Any) -> tuple[Any, ...]:
        make, arguments, state, *rest = cast(tuple[Any, ...], type(module).__reduce_ex__(module, protocol))
        kept = {name: value for name, value in state.items() if name not in ("forward", "__reduce_ex__")}
        return make, arguments, kept | before, *rest

    attributes.update({"forward": functools.wraps(module.forward)(forward), "__reduce_ex__": reduce})

    def restore() -> None:
        del attributes["forward"], attributes["__reduce_ex__"]
        attributes.update(before)

    return restore


def eager(run: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a function from the compiler, which hooks and unbatched values are not for (to import it takes a second)."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    uncompiled = _disable_dynamo(forward)
    return lambda *args, **kwargs: (uncompiled if "torch._dynamo" in sys.modules else forward)(*args, **kwargs)
