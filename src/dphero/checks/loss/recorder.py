"""Write down what the user's code computes from a batch and the model's outputs, so that it can be computed again.

The tensors of the batch and of the model's outputs are *sources*. Everything that torch computes from them is a call:
a function, its arguments and its results. A tensor is known by its number; nothing is kept but the sources, and what
came from outside (weights, constants, other models). The private model itself is not followed: what it was called with
is noted, and its outputs are sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import get_default_nowrap_functions

from dphero.checks.loss.calls import Call, ModelCall, Ref, Source, leaves, map_values, tensors, tensors_in
from dphero.hooks.twins import Twin
from dphero.numerics.generators import torch_generators

_PYTHON = (bool, int, float, complex, torch.Size, tuple, list, np.ndarray)
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_IN_PLACE |= {"__setitem__", "__set__", "__delitem__"}
_NOT_COMPUTING = {"register_hook", "retain_grad", "requires_grad_", "__repr__", "__format__", "__hash__", "__dir__"}
_DEVICES = ("cpu", "cuda")


class Watched(Tensor):
    """What all classes of watched tensors have in common; each private model has one of its own."""


@dataclass
class Recorder:
    """The calls that follow from one batch."""

    rows: int  # the number of examples
    kind: type[Watched]  # the class of the tensors that are followed
    sources: list[Source] = field(default_factory=list)  # where they start
    calls: list[Call | ModelCall] = field(default_factory=list)  # in the order in which they were made
    trouble: str = ""  # why they cannot be repeated, if that is known already
    arrays: bool = False  # whether the batch holds numbers that are no tensors
    earlier: set[int] = field(default_factory=set)  # numbers of sources that hold values of an earlier batch
    in_place: bool = False  # whether a tensor was changed in place
    generators: list[torch.Generator] = field(default_factory=list)  # the user's own that were drawn from
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

    def output(
        self, tensor: Tensor, axis: int | None, fold: int, edge: GradientEdge | None, twin: Twin | None = None
    ) -> None:
        """Follow a tensor that the model returned; ``twin`` is where its values stand besides."""
        source = Source(self._next(), tensor, axis, fold, edge)
        if twin is not None:
            source.value, source.holds = twin.value.detach(), twin.holds
        else:
            with torch._C.DisableTorchFunctionSubclass():
                source.value = tensor.detach().as_subclass(Tensor).clone()
        self.add(tensor, source)
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
    def model(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Note with what the model is called; for the model itself, tensors are ordinary ones."""
        with torch._C.DisableTorchFunctionSubclass():
            noted = leaves(map_values((args, kwargs), self._reference))
            self.calls.append(ModelCall([each for each in noted if isinstance(each, Ref | Tensor)]))
        with ordinary(args, kwargs):
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
        # what is followed may share its memory with what is changed in place
        others = [
            each for each in tensors((args, kwargs)) if not (changed and self.number(each)) if not each.is_inference()
        ]
        versions = [each._version for each in others]
        own = [each for each in (kwargs.get("generator"),) if isinstance(each, torch.Generator)]
        self.generators += own
        generators = torch_generators(own)
        before = [generator.get_state() for generator in generators]
        modes = _torch_modes()
        result = function(*args, **kwargs)
        if versions != [each._version for each in others]:
            self.trouble = self.trouble or f"{name} changes a tensor without saying so by its name"
        drawn = any(not torch.equal(a, g.get_state()) for a, g in zip(before, generators, strict=True))
        random = (lambda: _set(generators, before)) if drawn else None
        found = tensors(result)
        value = result if not found and isinstance(result, _PYTHON) else None
        if found or value is not None or changed:
            numbers = [self._follow(tensor) for tensor in found]
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


def ordinary(args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Let the tensors among arguments that are followed or watched be ordinary ones."""
    if all(type(each) is Tensor for each in (*args, *kwargs.values())):  # mostly, and much faster
        return _AS_THEY_ARE
    return _made_ordinary(args, kwargs)


_AS_THEY_ARE = nullcontext()


@contextmanager
def _made_ordinary(*arguments: Any) -> Iterator[None]:
    found = [(each, type(each)) for each in tensors_in(arguments).tensors if isinstance(each, Watched)]
    for tensor, _ in found:
        tensor.__class__ = Tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for tensor, kind in found:
            tensor.__class__ = kind


def _changed_in_place(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    changed = tensors(kwargs.get("out"))
    by_name = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if by_name or kwargs.get("inplace") is True:
        changed += [args[0]] if args and isinstance(args[0], Tensor) else []
    return changed


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


# -- the class of the tensors that are followed ------------------------------------------------------------------------


def watched_class(
    announce: Callable[[Tensor, Tensor | None], None], recorder: Callable[[], Recorder | None] = lambda: None
) -> type[Watched]:
    """Make the class of tensors that ``announce`` their ``backward``, with the gradient that was given.

    While there is a recorder, it writes down all calls on these tensors. Results become members of the class in place.
    A view of the result would do as well, but arithmetic in place on a view (``loss /= 2``) hides in the graph which
    arithmetic it was.
    """

    class WatchedTensor(Watched):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is Tensor.backward:
                announce(args[0], args[1] if len(args) > 1 else kwargs.get("gradient"))
            if func in _AS_PLAIN:
                return func(args[0].as_subclass(Tensor), *args[1:], **kwargs)
            if not all(issubclass(other, Watched) or issubclass(cls, other) for other in types):
                return NotImplemented
            recording = recorder() if func not in _UNWATCHED else None
            with torch._C.DisableTorchFunctionSubclass():
                if recording is not None:
                    return recording.call(func, args, kwargs)
                result = func(*args, **kwargs)
            if func not in _UNWATCHED:
                watch(result)
            return result

    def watch(result: Any) -> None:
        if type(result) is Tensor:
            if result.requires_grad:  # what is detached is the user's to keep
                result.__class__ = WatchedTensor
        elif isinstance(result, tuple | list):
            for each in result:
                watch(each)

    return WatchedTensor


_AS_PLAIN = {Tensor.backward, Tensor.__reduce_ex__, Tensor.__deepcopy__}
_UNWATCHED = get_default_nowrap_functions()
