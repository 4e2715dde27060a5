"""Compute a loss again with other examples in place of some: the gradients of the rest must not change.

What is computed from several examples and enters a loss as a constant (class weights counted in the batch, a median of
detached losses, a divisor) leaves no trace in the graph. So the calls that were written down between the loader and
``backward()`` (:mod:`dphero.checks.loss.recorder`) are made again, with copies of one example in place of half of them:
in the tensors of the batch and in the model's outputs alike. For the examples that stay,

* what the model is called with may not change (else they are mixed before the model), and
* the gradient of the loss at the model's outputs may not change.

First everything is repeated with nothing replaced: if that does not give the loss that the user has, nothing can be
said, and the statement says so. Values that leave torch (``item()``, ``if loss > 1``) cannot be followed. Most of them
are only shown to somebody; they matter if numbers that enter the loss from outside change from batch to batch too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dphero.checks.loss.coupling import halves
from dphero.checks.loss.recorder import Call, ModelCall, Recorder, Ref, Source, map_values

__all__ = ["OUTSIDE", "Constants", "Findings", "compare_losses", "not_repeated"]

_REPLACEMENTS = 6
_SLACK = 1e-5
"""Relative change of a row that rounding may bring about, and"""
_SLACK_OF_HALVES = 1e-2
"""in float16 and bfloat16."""
_UNEVEN = {"_standard_gamma", "poisson", "binomial", "_sample_dirichlet", "geometric_", "_sample_poisson"}
"""Random functions that draw more or fewer numbers by the values of their arguments, so that others shift."""


@dataclass(frozen=True)
class Findings:
    """What could not be found out about a loss.

    Attributes:
        notes: Sentences for the statement.
        constants: What entered the loss from outside torch, if something of the batch had left it before.
    """

    notes: list[str]
    constants: Constants | None = None


class _Failed:
    """In place of a result of a call that could not be repeated."""


@dataclass
class _Pass:
    """What one repetition gives.

    Attributes:
        loss: The loss.
        gradients: At the outputs that have one, in the order of the sources.
        inputs: What the model was called with, call by call.
        orders: For each of these calls, which row of the first pass each row is.
        python: What left torch, by the number of the call.
    """

    loss: Any
    gradients: list[Tensor | None]
    inputs: list[list[Any]]
    orders: list[Tensor]
    python: dict[int, Any]


def compare_losses(
    recorder: Recorder, loss: Tensor, gradient: Tensor | None, actual: list[Tensor | None] | None, number: int
) -> Findings:
    """Compute the loss again with other examples.

    Args:
        recorder: The calls that led to the loss.
        loss: The loss.
        gradient: What is back-propagated from it, if that was given.
        actual: Its gradients at the model's outputs, in the order of the sources that have a place in the graph;
            ``None`` if it is not known.
        number: Which examples are replaced.

    Returns:
        What could not be found out.

    Raises:
        ValueError: If examples change the gradients of others.
    """
    target = recorder.number(loss)
    if target is None:
        return Findings([not_repeated("it was not computed by torch functions alone")])
    if recorder.trouble:
        return Findings([not_repeated(recorder.trouble)])
    needed = _ancestors(recorder, target)
    if recorder.earlier & needed:
        raise ValueError(
            "the loss uses values that were computed from an earlier batch (a queue of keys, a running average of "
            "losses or counts). They hold private examples, and no noise was added to them. Use only what comes from "
            "the batch in hand, from the model, or from public data."
        )
    repetition = _Repetition(recorder, target, gradient)
    plain = repetition.run(torch.arange(recorder.rows), None)
    if plain is None or not _same_loss(plain, loss, actual):
        return Findings([not_repeated("computing it a second time gave something else")])
    tried, changed, uneven = 0, set(), False
    for half, row in _replacements(recorder, number):
        index = torch.arange(recorder.rows)
        index[half] = row
        other = repetition.run(index, plain)
        if other is not None:
            tried += 1
            changed |= {place for place, value in plain.python.items() if not _equal(value, other.python[place])}
            uneven |= not _compare(recorder, plain, other, index)
    places = [place for place, call in enumerate(recorder.calls) if isinstance(call, Call) and call.made & needed]
    taken = [recorder.calls[place] for place in changed if place < max(places)]
    notes = _limits(recorder, needed)
    if not tried:
        notes.append(not_repeated("with other examples it ends in an error"))
    if uneven:
        notes.append(not_repeated("other examples draw other random numbers"))
    if any(isinstance(call, Call) and isinstance(call.value, bool) for call in taken):
        notes.append(_STEERED)
    return Findings(notes, _constants(recorder, needed) if taken or recorder.arrays else None)


# -- the repetition ----------------------------------------------------------------------------------------------------


class _Repetition:
    def __init__(self, recorder: Recorder, target: int, gradient: Tensor | None) -> None:
        self._recorder, self._target = recorder, target
        self._gradient = None if gradient is None else map_values(gradient, recorder._reference)

    def run(self, index: Tensor, plain: _Pass | None) -> _Pass | None:
        """Make all calls again with other rows; ``None`` if they do not lead to the loss.

        Args:
            index: For each row, the row whose example is there.
            plain: The pass in which nothing was replaced.
        """
        recorder, values = self._recorder, {}
        leaves: list[Tensor] = []
        returned = {source.number for call in recorder.calls if isinstance(call, ModelCall) for source in call.outputs}
        for source in recorder.sources:
            if source.number not in returned:
                values[source.number] = self._start(source, index, leaves)
        inputs: list[list[Any]] = []
        orders: list[Tensor] = []
        python: dict[int, Any] = {}
        with _generators_kept(recorder.generators):
            for place, call in enumerate(recorder.calls):
                if isinstance(call, ModelCall):
                    inputs.append([_value(values, each) for each in call.inputs])
                    before = inputs[-1] if plain is None else plain.inputs[len(inputs) - 1]
                    orders.append(_order(before, inputs[-1], index))
                    for source in call.outputs:
                        values[source.number] = self._start(source, orders[-1].clamp(min=0), leaves)
                else:
                    self._make(call, place, values, python)
            try:
                return self._finish(values, leaves, inputs, orders, python)
            except (RuntimeError, ValueError, TypeError):
                return None

    def _start(self, source: Source, index: Tensor, leaves: list[Tensor]) -> Tensor:
        value = _take(source, index)
        if source.edge is not None:
            value = value.detach().requires_grad_()
            leaves.append(value)
        return value.clone() if self._recorder.in_place else value

    def _make(self, call: Call, place: int, values: dict[int, Any], python: dict[int, Any]) -> None:
        args, kwargs = (map_values(each, lambda x: _value(values, x)) for each in (call.args, call.kwargs))
        if _has_failed((args, kwargs)):
            result: Any = _Failed()
        else:
            try:
                if call.random is not None:
                    call.random()
                with call.context():
                    result = call.function(*args, **kwargs)
            except Exception:
                result = _Failed()
        if call.value is not None:
            python[place] = result
        tensors = _tensors(result)
        for position, number in enumerate(call.results):
            if number is not None:
                fits = len(tensors) == len(call.results)
                values[number] = tensors[position] if fits else _Failed()
        if isinstance(result, _Failed):
            values |= {number: result for number in call.changes}

    def _finish(
        self,
        values: dict[int, Any],
        leaves: list[Tensor],
        inputs: list[list[Any]],
        orders: list[Tensor],
        python: dict[int, Any],
    ) -> _Pass | None:
        loss = values.get(self._target)
        if not isinstance(loss, Tensor):
            return None
        if not loss.requires_grad:
            return None
        given = _value(values, self._gradient)
        if given is None and loss.numel() > 1:
            return None
        with torch.enable_grad():
            found = torch.autograd.grad(loss, leaves, given, allow_unused=True)
        return _Pass(loss.detach(), list(found), inputs, orders, python)


def _take(source: Source, index: Tensor) -> Tensor:
    """Return a source with other rows."""
    if source.axis is None or bool((index == torch.arange(len(index))).all()):
        return source.value
    if source.fold > 1:
        index = (index[:, None] * source.fold + torch.arange(source.fold)).flatten()
    return source.value.index_select(source.axis, index.to(source.value.device))


def _replacements(recorder: Recorder, number: int) -> Iterator[tuple[Tensor, int]]:
    """Yield which examples are replaced, and by which one: by those that stand out, since they move statistics most."""
    rows = recorder.rows
    standing_out: dict[int, None] = {}
    carrying = [source for source in recorder.sources if source.axis is not None and source.value.numel()]
    for source in sorted(carrying, key=lambda each: each.value.numel()):
        if not source.value.is_complex():
            sums = _by_row(source.value, source.axis or 0, rows).double().nan_to_num().sum(1)
            standing_out |= {int(sums.argmax()): None, int(sums.argmin()): None}
    chosen = [*standing_out, *range(rows)][:_REPLACEMENTS]
    first, second = halves(rows, number)
    for position, row in enumerate(chosen):
        yield (first, second, ~first, ~second)[position % 4], row


# -- comparing ---------------------------------------------------------------------------------------------------------


def _order(before: list[Any], after: list[Any], index: Tensor) -> Tensor:
    """Return, for each row that the model is called with, which row of the first pass it is; -1 if it is none of them.

    Rows mostly stay where they are. But a loop may also sort its examples, or turn their order round.
    """
    rows = len(index)
    pairs = [
        (_by_row(first.detach(), axis, rows).double(), _by_row(second.detach(), axis, rows).double())
        for first, second in zip(before, after, strict=True)
        if isinstance(first, Tensor) and isinstance(second, Tensor) and first is not second
        if first.shape == second.shape and not first.is_complex() and (axis := _axis(first, rows)) is not None
    ]
    if not pairs:
        return index
    first, second = (torch.cat([pair[side].cpu() for pair in pairs], 1).nan_to_num() for side in (0, 1))
    stays = index == torch.arange(rows)
    scale = first.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
    if bool(((first - second).abs().amax(1) <= _SLACK * scale)[stays].all()):
        return index
    gaps, places = torch.cdist(second / scale, first / scale, p=math.inf).min(1)
    return torch.where(gaps <= _SLACK, places, -1)


def _compare(recorder: Recorder, plain: _Pass, other: _Pass, index: Tensor) -> bool:
    """Raise if what belongs to the examples that stay is not as it was; return whether that can be said."""
    names = {call.name for call in recorder.calls if isinstance(call, Call)}
    if names & _UNEVEN:
        return False
    random = any(isinstance(call, Call) and call.random is not None for call in recorder.calls)
    orders = other.orders
    if any(bool((order < 0).any()) or not torch.equal(order, orders[0]) for order in orders):
        if random and any("sort" in name or name == "topk" for name in names):
            return False
        raise ValueError(
            "examples are mixed before they reach the model (mixup, a second call on other examples or in another "
            "order, standardising by the batch): where some are replaced, what the model is called with changes for "
            "the others. One example would change the gradients of others. Mix only what is public, and standardise by "
            "public numbers."
        )
    order = orders[0] if orders else index
    in_place = torch.equal(order, index)
    if random and not in_place:
        return False
    rows = order == torch.arange(len(order)) if in_place else torch.ones_like(order, dtype=torch.bool)
    for first, second in zip(plain.gradients, other.gradients, strict=True):
        if first is None and second is None:
            continue
        shape = first if first is not None else second
        assert shape is not None
        one, two = (torch.zeros_like(shape) if each is None else each for each in (first, second))
        how = _change(one, two, order, rows)
        if how > 0:
            raise ValueError(
                "the loss treats an example by the others of its batch: where some examples are replaced, the "
                f"gradients of those that stay change, by {how:.2g} of their size. Something that is computed from the "
                "whole batch enters it as a constant: class weights or a divisor counted in the batch, a threshold or "
                "median, keys of other examples, the loss's own value. Use public constants instead."
            )
    return True


def _axis(value: Tensor, rows: int) -> int | None:
    places = [axis for axis, size in enumerate(value.shape[:2]) if size == rows]
    return places[0] if places else 0 if value.dim() and value.shape[0] and value.shape[0] % rows == 0 else None


def _change(first: Tensor, second: Tensor, order: Tensor, which: Tensor) -> float:
    """Return by how much rows have changed, relative to their size; 0 if that is rounding.

    Args:
        first: Before.
        second: After some examples were replaced.
        order: For each row of ``second``, which row of ``first`` it is.
        which: The rows of ``second`` to look at.
    """
    rows = len(order)
    axis = _axis(first, rows)
    if first.shape != second.shape or axis is None or first.is_complex():
        return 0.0
    one = _by_row(first.detach(), axis, rows).double()[order.to(first.device)][which.to(first.device)]
    two = _by_row(second.detach(), axis, rows).double()[which.to(first.device)]
    finite = one.isfinite().all(1) & two.isfinite().all(1)
    one, two = one[finite], two[finite]
    if not one.numel():
        return 0.0
    gaps, sizes = (one - two).abs().amax(1), torch.maximum(one.abs().amax(1), two.abs().amax(1))
    scale = sizes + 1e-9 * float(sizes.max())
    share = torch.where(gaps > 0, gaps / scale.clamp(min=torch.finfo(torch.float64).tiny), 0)
    short = first.dtype in (torch.float16, torch.bfloat16)
    largest = float(share.max())
    return largest if largest > (_SLACK_OF_HALVES if short else _SLACK) else 0.0


def _by_row(value: Tensor, axis: int, rows: int) -> Tensor:
    moved = value.movedim(axis, 0)
    return moved.reshape(rows, -1)


def _same_loss(plain: _Pass, loss: Tensor, actual: list[Tensor | None] | None) -> bool:
    first, second = plain.loss.double(), loss.detach().as_subclass(Tensor).double()
    if first.shape != second.shape or not torch.allclose(first, second, rtol=1e-2, atol=1e-30, equal_nan=True):
        return False
    if actual is None:
        return any(each is not None for each in plain.gradients)
    for one, two in zip(plain.gradients, actual, strict=True):
        if (one is None) != (two is None) and float((one if one is not None else two).abs().max()) > 0:  # type: ignore[union-attr]
            return False
        if one is not None and two is not None:
            size = float(two.abs().max()) if two.numel() else 0.0
            if math.isfinite(size) and float((one - two).abs().max() if two.numel() else 0.0) > 1e-2 * size:
                return False
    return True


# -- what cannot be seen -------------------------------------------------------------------------------------------


_STEERED = (
    "Not checked: the training loop takes branches that depend on the data (if, while or a comparison on a tensor). If "
    "they change the loss, an example changes the gradients of others."
)
OUTSIDE = (
    "Not checked: the loss uses numbers that change from batch to batch and were made outside of torch, and the loop "
    "takes numbers of the batch out of torch (item(), tolist(), numpy()). If they are computed from several examples, "
    "an example changes the gradients of others."
)


def not_repeated(why: str) -> str:
    """Return the note for a loss that could not be computed again."""
    return (
        f"Not checked: the loss could not be computed again with other examples ({why}). If constants in it are made "
        "from several examples (weights counted in the batch, a median), an example changes the gradients of others."
    )


def _limits(recorder: Recorder, needed: set[int]) -> list[str]:
    """Name what the repetitions cannot see."""
    notes = []
    calls = [call for call in recorder.calls if isinstance(call, ModelCall)]
    followed = any(isinstance(each, Ref) for call in calls for each in call.inputs)
    if calls and not followed:
        notes.append(
            "Not checked: what the model is called with was not computed from the loader's tensors by torch functions. "
            "If it is made from several examples together, an example changes the gradients of others."
        )
    inner = [
        each
        for call in recorder.calls
        if isinstance(call, Call) and needed & call.made
        for each in _tensors((call.args, call.kwargs))
        if each.grad_fn is not None
    ]
    if inner:
        notes.append(
            "Not checked: the loss uses activations from inside the model, which were not computed again with other "
            "examples."
        )
    return notes


def _ancestors(recorder: Recorder, target: int) -> set[int]:
    """Return the numbers of all tensors on which a loss, or what the model is called with, depends."""
    needed = {target}
    for call in reversed(recorder.calls):
        if isinstance(call, ModelCall):
            needed |= {each.number for each in call.inputs if isinstance(each, Ref)}
        elif needed & call.made:
            needed |= _numbers((call.args, call.kwargs))
    return needed


@dataclass(frozen=True)
class Constants:
    """What enters a loss from outside torch, in the order in which it does.

    Attributes:
        rows: The number of examples.
        names: The functions that were called.
        values: The numbers, and marks of the tensors, among their arguments.
    """

    rows: int
    names: tuple[str, ...]
    values: tuple[Any, ...]

    def differ(self, other: Constants) -> bool:
        """Whether they are others than in another batch; what follows from the number of rows counts as the same."""
        if self.names != other.names or len(self.values) != len(other.values):
            return True
        return any(not self._equivalent(a, b, other.rows) for a, b in zip(self.values, other.values, strict=True))

    def _equivalent(self, first: Any, second: Any, rows: int) -> bool:
        if first == second or type(first) is not type(second) or isinstance(first, bool):
            return bool(first == second)
        if not isinstance(first, int | float):
            return False
        ways = ((first / self.rows, second / rows), (first * self.rows, second * rows))
        return any(math.isclose(a, b, rel_tol=1e-6) for a, b in ways)


def _constants(recorder: Recorder, needed: set[int]) -> Constants:
    """Collect what enters a loss from outside."""
    names, values = [], []
    for call in recorder.calls:
        if isinstance(call, Call) and needed & call.made:
            names.append(call.name)
            values += [_mark(each) for each in _leaves((call.args, call.kwargs)) if not isinstance(each, Ref)]
    return Constants(recorder.rows, tuple(names), tuple(values))


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        if isinstance(value, torch.nn.Parameter) or value.requires_grad:
            return "parameter"
        small = value.numel() <= 4096 and not value.is_complex()
        return (value.dim(), float(value.detach().double().nan_to_num().sum())) if small else ("tensor", id(value))
    return value if isinstance(value, bool | int | float) else None


# -- small helpers -----------------------------------------------------------------------------------------------------


def _value(values: dict[int, Any], each: Any) -> Any:
    return values.get(each.number, _Failed()) if isinstance(each, Ref) else each


def _leaves(value: Any) -> Iterator[Any]:
    found: list[Any] = []
    map_values(value, found.append)
    yield from found


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in _leaves(value) if isinstance(each, Tensor)]


def _numbers(value: Any) -> set[int]:
    return {each.number for each in _leaves(value) if isinstance(each, Ref)}


def _has_failed(value: Any) -> bool:
    return any(isinstance(each, _Failed) for each in _leaves(value))


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and np.array_equal(first, second)
    try:
        return type(first) is type(second) and bool(first == second)
    except (RuntimeError, ValueError):
        return False


@contextmanager
def _generators_kept(own: list[torch.Generator]) -> Iterator[None]:
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    generators = [torch.default_generator, *devices, *own]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
