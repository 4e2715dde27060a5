"""What a pass of a model depends on besides its arguments: where its tensors lie, and what its Python code reads."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Types of arguments and attributes that are compared by value."""

_SEQUENCES = (list, tuple, set, frozenset, deque)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
_DEEPEST = 4
"""How far into lists in lists, and objects in them, one looks."""
_LONGEST = 1000
"""Longer lists and tables are data."""
_MOST_FUNCTIONS = 200
_OTHERS = ("torch", "dphero", "numpy", "builtins")
"""Packages whose functions are not looked into."""


class CannotRecordError(ValueError):
    """The passes of a model cannot be recorded: why not."""


_Source = dict[Any, Any] | Callable[[], Iterable[Any]]
"""A table, or what yields the objects that a list or a piece of code holds now."""


class ReplayConditions:
    """What can be compared of a model's state at one moment, soon.

    These are places of parameters and buffers; attributes of modules, and in them lists, tables and simple objects
    (such as a configuration or a schedule); global variables, and those of enclosing functions, that the code of
    ``forward`` names, or a function that it calls by its name; and the precision of products.

    Not part of it: what other objects hold, what a method of another object reads, and the world outside (files,
    clocks).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        sources = [*_sources(module)]
        # Tables, of which a module has eight, are looked through apart from the rest: that takes half the time.
        self._tables = [source for source in sources if isinstance(source, dict)]
        self._others = [source for source in sources if not isinstance(source, dict)]
        self._objects = self._all()
        self._tensors = [value for value in self._objects if isinstance(value, Tensor)]
        self._known_places, self._known_settings = self._places(), self._settings()
        held = [source.values() if isinstance(source, dict) else source() for source in sources]
        self._values = [[_value(each) for each in objects] for objects in held]

    def still_hold(self) -> bool:
        """Tell whether everything is as it was."""
        if self._settings() != self._known_settings:
            return False
        # Mostly the very same objects are still there, which is soon seen.
        objects = self._all()
        if len(objects) == len(self._objects) and (
            all(map(is_, objects, self._objects)) or all(map(_alike, objects, self._objects))
        ):
            return self._places() == self._known_places
        now = ReplayConditions(self._module)
        if now._values != self._values:
            return False
        vars(self).update(vars(now))
        return True

    def require_no_hooks(self) -> None:
        """Raise ``CannotRecordError`` if a submodule has hooks: a recording would not run their code."""
        children = [child for child in self._module.modules() if child is not self._module]
        if any(getattr(child, name) for child in children for name in _HOOKS) or any(
            getattr(torch_module, name) for name in _GLOBAL_HOOKS
        ):
            raise CannotRecordError("a submodule has forward hooks, or backward hooks, whose code would not run")

    def _all(self) -> list[Any]:
        others = [source() for source in self._others]
        return [*chain.from_iterable(map(dict.values, self._tables)), *chain.from_iterable(others)]

    def _places(self) -> list[Any]:
        return [(tensor.data_ptr(), tensor.shape, tensor.requires_grad) for tensor in self._tensors]

    @staticmethod
    def _settings() -> tuple[Any, ...]:
        return (
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
        )


def _alike(first: Any, second: Any) -> bool:
    """Tell whether two objects are one, or plain and equal."""
    return first is second or (type(first) is type(second) and type(first) in PLAIN and first == second)


def _sources(module: nn.Module) -> Iterator[_Source]:
    """Yield where the state of a model lies."""
    seen: set[int] = set()
    methods: dict[str, list[types.FunctionType]] = {}
    for child in module.modules():
        hooks = [getattr(child, name) for name in _HOOKS]
        for table in (vars(child), child._parameters, child._buffers, child._modules, *hooks):
            seen.add(id(table))
            yield table
    for child in module.modules():
        for value in [*vars(child).values()]:
            yield from _inside(value, seen, _DEEPEST)
            if isinstance(value, types.FunctionType):
                methods.setdefault("forward", []).append(value)
        for kind in type(child).__mro__:
            if id(kind) not in seen and not _is_foreign(kind.__module__):
                seen.add(id(kind))
                yield partial(_plain_of, kind)
                for name, each in vars(kind).items():
                    if isinstance(each, types.FunctionType):
                        methods.setdefault(name, []).append(each)
    yield from _read_by(methods, seen)


def _inside(value: Any, seen: set[int], depth: int) -> Iterator[_Source]:
    """Yield a container or simple object, and those inside."""
    if depth == 0 or id(value) in seen:
        return
    table = _table(value)
    if table is None or len(table) > _LONGEST:
        return
    seen.add(id(value))
    yield table if isinstance(table, dict) else table.__iter__
    for each in [*table.values()] if isinstance(table, dict) else [*table]:
        yield from _inside(each, seen, depth - 1)


def _table(value: Any) -> Any:
    """Return the members of a container, or the attributes of a simple object; ``None`` for anything else."""
    if isinstance(value, (*_SEQUENCES, dict)):
        return value
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict and not isinstance(value, (nn.Module, Tensor, type, types.FunctionType)):
        simple = all(isinstance(each, (*PLAIN, *_SEQUENCES, dict)) for each in attributes.values())
        return attributes if simple and not _is_foreign(type(value).__module__) else None
    return None


def _is_foreign(module: str) -> bool:
    return module.split(".")[0] in _OTHERS


def _plain_of(kind: type) -> list[Any]:
    """Return the plain attributes of a class: a counter that all its objects share, say."""
    return [value for value in vars(kind).values() if type(value) in PLAIN or type(value) in (list, dict)]


def _read_by(methods: dict[str, list[types.FunctionType]], seen: set[int]) -> Iterator[_Source]:
    """Yield the global variables, and those of enclosing functions, that ``forward`` and what it calls can read."""
    waiting, done = deque(methods.get("forward", ())), 0
    while waiting and done < _MOST_FUNCTIONS:
        function = waiting.popleft()
        if id(function.__code__) in seen or _is_foreign(function.__module__ or ""):
            continue
        seen.add(id(function.__code__))
        done += 1
        mentioned = _names(function.__code__)
        waiting += chain.from_iterable(methods.get(name, ()) for name in mentioned)
        names = [name for name in mentioned if name in function.__globals__]
        values = [function.__globals__[name] for name in names]
        waiting += [value for value in values if isinstance(value, types.FunctionType)]
        watched = [name for name, value in zip(names, values, strict=True) if _is_watched(value)]
        if watched:
            yield partial(_globals, function.__globals__, watched)
        for value in values:
            yield from _inside(value, seen, _DEEPEST)
        for cell in function.__closure__ or ():
            yield partial(_content, cell)
            for value in _content(cell):
                if isinstance(value, types.FunctionType):
                    waiting.append(value)
                yield from _inside(value, seen, _DEEPEST)


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a function's code mentions, with those of functions inside it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*inner)


def _is_watched(value: Any) -> bool:
    return type(value) in PLAIN or isinstance(value, Tensor) or _table(value) is not None


def _globals(table: dict[str, Any], names: Sequence[str]) -> list[Any]:
    return [table.get(name) for name in names]


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing was put there so far
        return []


def _value(value: Any, depth: int = _DEEPEST) -> Any:
    """Return what must be equal for a value to be the same."""
    if type(value) in PLAIN:
        return type(value), value
    if isinstance(value, Tensor):
        return id(value), value.data_ptr(), value.shape, value.requires_grad
    table = _table(value) if depth else None
    if table is None or len(table) > _LONGEST:
        return id(value)
    if isinstance(table, dict):
        return type(value), {name: _value(each, depth - 1) for name, each in table.items()}
    if isinstance(table, (set, frozenset)):
        return type(value), frozenset(_value(each, 0) for each in table)
    return type(value), [_value(each, depth - 1) for each in table]
