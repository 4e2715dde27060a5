"""Write down what the user's code computes from a batch and the model's outputs, so that it can be computed again.

The tensors of the batch and of the model's outputs are *sources*. Everything that torch computes from them is a call:
a function, its arguments and its results. A tensor is known by its number; nothing is kept but the sources, and what
came from outside (weights, constants, other models). The private model itself is not followed: what it was called with
is noted, and its outputs are sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

__all__ = ["Call", "ModelCall", "Recorder", "Ref", "Source", "Watched", "map_values", "ordinary", "tensors_in"]

_DEPTH = 4
_PYTHON = (bool, int, float, complex, torch.Size, tuple, list, np.ndarray)
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_IN_PLACE |= {"__setitem__", "__set__", "__delitem__"}
_NOT_COMPUTING = {"register_hook", "retain_grad", "requires_grad_", "__repr__", "__format__", "__hash__", "__dir__"}
_DEVICES = ("cpu", "cuda")


class Watched(Tensor):
    """What all classes of watched tensors have in common; each private model has one of its own."""


@dataclass(frozen=True)
class Ref:
    """Stands for the tensor with a number."""

    number: int


@dataclass
class Source:
    """A tensor from which the calls start.

    Attributes:
        number: Its number.
        value: A copy.
        axis: Where it carries the examples; ``None`` if it does not.
        fold: How many entries along that axis belong to one example.
        edge: Its place in the graph, if it has a gradient.
    """

    number: int
    value: Tensor
    axis: int | None
    fold: int = 1
    edge: GradientEdge | None = None


@dataclass
class Call:
    """One call of a torch function.

    Attributes:
        function: The function.
        args: Its arguments, with numbers in place of tensors that are followed.
        kwargs: Those with names.
        results: The numbers of the tensors that it returned, in order; ``None`` for those that are not followed.
        changes: The numbers of tensors that it changed in place.
        value: What it returned, if that is no tensor but a value of Python.
        random: Sets the random generators to where they were, if it drew from them.
        context: Makes the state of torch in which it ran.
    """

    function: Any
    args: Any
    kwargs: Any
    results: list[int | None]
    changes: frozenset[int] = frozenset()
    value: Any = None
    random: Callable[[], None] | None = None
    context: Callable[[], AbstractContextManager[Any]] = ExitStack

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
class Recorder:
    """The calls that follow from one batch.

    Attributes:
        rows: The number of examples.
        kind: The class of the tensors that are followed.
        sources: Where they start.
        calls: In the order in which they were made.
        trouble: Why they cannot be repeated, if that is known already.
        arrays: Whether the batch holds numbers that are no tensors.
        earlier: Numbers of sources that hold values of an earlier batch.
        in_place: Whether a tensor was changed in place.
        generators: Random generators of the user's own that were drawn from.
    """

    rows: int
    kind: type[Watched]
    sources: list[Source] = field(default_factory=list)
    calls: list[Call | ModelCall] = field(default_factory=list)
    trouble: str = ""
    arrays: bool = False
    earlier: set[int] = field(default_factory=set)
    in_place: bool = False
    generators: list[torch.Generator] = field(default_factory=list)
    open: bool = True
    _count: int = 0
    _switched: list[Tensor] = field(default_factory=list)

    def begin(self, batch: Any) -> None:
        """Follow the tensors of a batch, in whatever they lie."""
        found = tensors_in(batch)
        self.arrays = found.arrays
        for tensor in found.tensors:
            if type(tensor) is Tensor:
                axis = next((axis for axis, size in enumerate(tensor.shape[:2]) if size == self.rows), None)
                self.add(tensor, Source(self._next(), tensor.detach().clone(), axis))
                tensor.__class__ = self.kind
                self._switched.append(tensor)

    def add(self, tensor: Tensor, source: Source) -> None:
        """Follow a tensor from here on."""
        self.sources.append(source)
        tensor._dphero_number = (self, source.number)  # type: ignore[attr-defined]

    def output(self, tensor: Tensor, axis: int | None, fold: int, edge: GradientEdge | None) -> None:
        """Follow a tensor that the model returned."""
        with torch._C.DisableTorchFunctionSubclass():
            value = tensor.detach().as_subclass(Tensor).clone()
        self.add(tensor, Source(self._next(), value, axis, fold, edge))
        last = [call for call in self.calls if isinstance(call, ModelCall)][-1]
        last.outputs.append(self.sources[-1])

    def close(self) -> None:
        """Follow nothing any more; the batch's tensors are ordinary ones again."""
        self.open = False
        for tensor in self._switched:
            tensor.__class__ = Tensor
            vars(tensor).pop("_dphero_number", None)
        self._switched.clear()
        self.sources.clear()
        self.calls.clear()

    def number(self, tensor: Any) -> int | None:
        """Return the number of a tensor that is followed."""
        recorder, number = getattr(tensor, "_dphero_number", (None, None))
        return number if recorder is self else None

    @contextmanager
    def model(self, *arguments: Any) -> Iterator[None]:
        """Note with what the model is called; for the model itself, tensors are ordinary ones."""
        with torch._C.DisableTorchFunctionSubclass():
            self.calls.append(ModelCall(_references(map_values(arguments, self._reference))))
        with ordinary(*arguments):
            yield

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Make a call and write it down (with subclasses of tensors disabled)."""
        name = getattr(function, "__name__", "")
        if name in _NOT_COMPUTING:
            return function(*args, **kwargs)
        changed = _changed_in_place(name, args, kwargs)
        for tensor in changed:
            self._adopt(tensor)
        noted = map_values((args, kwargs), self._reference)
        outside = [each for each in _flat((args, kwargs)) if isinstance(each, Tensor) and self.number(each) is None]
        versions = [each._version for each in outside if not each.is_inference()]
        generators = _generators(kwargs)
        self.generators += [each for each in generators if each is kwargs.get("generator")]
        before = [generator.get_state() for generator in generators]
        modes = _torch_modes()
        result = function(*args, **kwargs)
        if versions != [each._version for each in outside if not each.is_inference()]:
            self.trouble = self.trouble or f"{name} changes a tensor of its own"
        drawn = any(not torch.equal(a, g.get_state()) for a, g in zip(before, generators, strict=True))
        random = (lambda: _set(generators, before)) if drawn else None
        tensors = [each for each in _flat(result) if isinstance(each, Tensor)]
        value = result if not tensors and isinstance(result, _PYTHON) else None
        if tensors or value is not None or changed:
            numbers = [self._follow(tensor) for tensor in tensors]
            changes = frozenset(number for tensor in changed if (number := self.number(tensor)) is not None)
            self.calls.append(Call(function, noted[0], noted[1], numbers, changes, value, random, modes))
        self.in_place |= bool(changed)
        return result

    def _reference(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        number = self.number(value)
        if number is not None:
            return Ref(number)
        if isinstance(value, self.kind) and getattr(value, "_dphero_number", None) is not None:
            source = Source(self._next(), value.detach().as_subclass(Tensor).clone(), None)
            self.earlier.add(source.number)
            self.add(value, source)
            return Ref(source.number)
        return value

    def _adopt(self, tensor: Tensor) -> None:
        """Follow a tensor from outside that is about to be changed in place."""
        if self.number(tensor) is not None:
            return
        if type(tensor) not in (Tensor, self.kind):
            self.trouble = self.trouble or f"a {type(tensor).__name__} is changed in place"
            return
        if isinstance(self._reference(tensor), Ref):  # of an earlier batch
            return
        tensor.__class__ = self.kind
        self.add(tensor, Source(self._next(), tensor.detach().as_subclass(Tensor).clone(), None))

    def _follow(self, tensor: Tensor) -> int | None:
        if type(tensor) is Tensor:
            tensor.__class__ = self.kind
        if type(tensor) is not self.kind:
            return None
        number = self.number(tensor)
        if number is None:
            number = self._next()
            tensor._dphero_number = (self, number)  # type: ignore[attr-defined]
        return number

    def _next(self) -> int:
        self._count += 1
        return self._count


@contextmanager
def ordinary(*arguments: Any) -> Iterator[None]:
    """Let the tensors among arguments that are followed or watched be ordinary ones."""
    found = [(each, type(each)) for each in tensors_in(arguments).tensors if isinstance(each, Watched)]
    for tensor, _ in found:
        tensor.__class__ = Tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for tensor, kind in found:
            tensor.__class__ = kind


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


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    elif isinstance(value, slice):
        yield from _flat((value.start, value.stop, value.step))
    else:
        yield value


def _references(value: Any) -> list[Any]:
    return [each for each in _flat(value) if isinstance(each, Ref | Tensor)]


def _changed_in_place(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    changed = [each for each in _flat(kwargs.get("out")) if isinstance(each, Tensor)]
    by_name = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if by_name or kwargs.get("inplace") is True:
        changed += [args[0]] if args and isinstance(args[0], Tensor) else []
    return changed


def _generators(kwargs: Mapping[str, Any]) -> list[torch.Generator]:
    own = kwargs.get("generator")
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *devices, *([own] if isinstance(own, torch.Generator) else [])]


def _set(generators: list[torch.Generator], states: list[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _torch_modes() -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the present state of torch: gradients on or off, mixed precision."""
    gradients = torch.is_grad_enabled()
    casts = [(device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device)]

    def make() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(gradients))
        for device, dtype in casts:
            stack.enter_context(torch.autocast(device, dtype))
        return stack

    return make
