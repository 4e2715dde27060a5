"""Make the calls that led to a loss again, with other examples in place of some."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dphero.checks.loss.calls import Call, ModelCall, Ref, Source, leaves, map_values, tensors
from dphero.checks.loss.recorder import Recorder
from dphero.numerics.compare import axis_of_rows, by_row, marks
from dphero.numerics.generators import generators_restored

SLACK = 1e-5
"""Relative change of a row that rounding may bring about."""


_ROWS, _GPU_ENTRIES = 16, 1 << 22
"""So many rows are compared at a time, on a GPU as many entries: copies of all, in double precision, take memory."""


_LARGE, _ROOM = 1 << 27, 4
"""Bytes from which on gradients wait in the computer's own memory until they are compared, where so many times their
bytes are not free: the way there and back takes a second or two for a language model."""


class _Failed:
    """In place of a result of a call that could not be repeated."""


@dataclass
class RepeatedPass:
    """What one repetition gives."""

    loss: Any
    gradients: list[Tensor | None]  # at the outputs that have one, in the order of the sources
    marks: list[Tensor | None]  # of the bits of each of them
    inputs: list[list[Any]]  # what the model was called with, call by call
    orders: list[Tensor]  # for each of these calls, which row of the first pass each row is
    python: dict[int, Any]  # what left torch, by the number of the call


class _Start(torch.autograd.Function):
    """Lets the graph begin at a tensor, and does not keep it: a language model's outputs are large."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class Repetition:
    """Makes the calls of a recorder again, with other examples in place of some, up to the loss (number ``target``)."""

    def __init__(self, recorder: Recorder, target: int, gradient: Tensor | None) -> None:
        self.recorder, self._target = recorder, target
        self._gradient = None if gradient is None else map_values(gradient, recorder._reference)
        last: dict[int, int] = {}  # the number of the last call that needs a tensor
        for place, call in enumerate(recorder.calls):
            needed = call.inputs if isinstance(call, ModelCall) else leaves((call.args, call.kwargs))
            last |= {each.number: place for each in needed if isinstance(each, Ref)}
            if isinstance(call, Call):
                last |= {number: place for number in call.made if number not in last}
        kept = {each.number for each in (Ref(target), self._gradient) if isinstance(each, Ref)}
        self._gone: dict[int, list[int]] = {}  # what nobody needs after a call, by the number of the call
        for number, place in last.items():
            if number not in kept:
                self._gone.setdefault(place, []).append(number)

    def run(self, index: Tensor, plain: RepeatedPass | None) -> RepeatedPass | None:
        """Make all calls again with the examples of rows ``index``; ``None`` if they do not lead to the loss.

        ``plain`` is the pass in which nothing was replaced.
        """
        recorder, values = self.recorder, {}
        found = RepeatedPass(None, [], [], [], [], {})
        starts: list[GradientEdge] = []
        returned = {source.number for call in recorder.calls if isinstance(call, ModelCall) for source in call.outputs}
        for source in recorder.sources:
            if source.number not in returned:
                values[source.number] = self._start(source, index, starts)
        with generators_restored(recorder.generators):
            for place, call in enumerate(recorder.calls):
                if isinstance(call, ModelCall):
                    inputs = [_value(values, each) for each in call.inputs]
                    order = _order(inputs if plain is None else plain.inputs[len(found.inputs)], inputs, index)
                    found.inputs.append(inputs)
                    found.orders.append(order)
                    for source in call.outputs:
                        values[source.number] = self._start(source, order.clamp(min=0), starts)
                else:
                    self._make(call, place, values, found.python)
                for number in self._gone.get(place, ()):
                    values.pop(number, None)
            try:
                return found if self._finish(found, values, starts) else None
            except (RuntimeError, ValueError, TypeError):
                return None

    def _start(self, source: Source, index: Tensor, starts: list[GradientEdge]) -> Tensor:
        value = _take(source, index)
        if source.edge is not None:
            with torch.enable_grad():
                value = _Start.apply(torch.empty(0, device=value.device, requires_grad=True), value)
            assert value.grad_fn is not None
            starts.append(GradientEdge(value.grad_fn, value.output_nr))
        return value.clone() if self.recorder.in_place else value

    def _make(self, call: Call, place: int, values: dict[int, Any], python: dict[int, Any]) -> None:
        args, kwargs = (map_values(each, lambda x: _value(values, x)) for each in (call.args, call.kwargs))
        if any(isinstance(each, _Failed) for each in leaves((args, kwargs))):
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
        found = tensors(result)
        for position, number in enumerate(call.results):
            if number is not None:
                values[number] = found[position] if len(found) == len(call.results) else _Failed()
        if isinstance(result, _Failed):
            values |= {number: result for number in call.changes}

    def _finish(self, found: RepeatedPass, values: dict[int, Any], starts: list[GradientEdge]) -> bool:
        """Fill in the loss and its gradients; return whether there are any."""
        loss, given = values.get(self._target), _value(values, self._gradient)
        if not isinstance(loss, Tensor) or not loss.requires_grad or (given is None and loss.numel() > 1):
            return False
        with torch.enable_grad():
            found.gradients = list(torch.autograd.grad(loss, starts, given, allow_unused=True))
        found.marks = [marks(each, self.recorder.rows) for each in found.gradients]
        found.loss = loss.detach()
        return True


def set_aside(value: Tensor | None) -> Tensor | None:
    """Return a tensor that is to be compared later; a large one not on a GPU where memory is short."""
    if value is None or not value.is_cuda or value.nbytes < _LARGE:
        return value
    free, _ = torch.cuda.mem_get_info(value.device)
    return value if free >= _ROOM * value.nbytes else value.cpu()


def _take(source: Source, index: Tensor) -> Tensor:
    """Return a source with other rows."""
    if source.axis is None or bool((index == torch.arange(len(index))).all()):
        return source.value
    if source.fold > 1:
        index = (index[:, None] * source.fold + torch.arange(source.fold)).flatten()
    return source.value.index_select(source.axis, index.to(source.value.device))


def _order(before: list[Any], after: list[Any], index: Tensor) -> Tensor:
    """Return, for each row that the model is called with, which row of the first pass it is; -1 if it is none of them.

    Rows mostly stay where they are. But a loop may also sort its examples, or turn their order round.
    """
    rows = len(index)
    pairs = [
        (by_row(first.detach(), axis, rows), by_row(second.detach(), axis, rows))
        for first, second in zip(before, after, strict=True)
        if isinstance(first, Tensor) and isinstance(second, Tensor) and first is not second
        if first.shape == second.shape and not first.is_complex() and (axis := axis_of_rows(first, rows)) is not None
    ]
    if not pairs:
        return index
    stays = index == torch.arange(rows)
    moved, scale = _changes(pairs, rows)
    if bool((moved <= SLACK * scale)[stays].all()):
        return index
    first, second = (torch.cat([pair[side].double().cpu() for pair in pairs], 1).nan_to_num() for side in (0, 1))
    gaps, places = torch.cdist(second / scale, first / scale, p=math.inf).min(1)
    return torch.where(gaps <= SLACK, places, -1)


def _changes(pairs: list[tuple[Tensor, Tensor]], rows: int) -> tuple[Tensor, Tensor]:
    """Return by how much each row differs, and the largest entry of the first pass; where they lie, some at a time."""
    moved, largest, device = [], [], pairs[0][0].device
    columns = sum(first.shape[1] for first, _ in pairs)
    together = _ROWS if device.type == "cpu" else max(_ROWS, _GPU_ENTRIES // max(columns, 1))
    for some in torch.arange(rows).split(together):
        part = slice(int(some[0]), int(some[-1]) + 1)
        first, second = (
            torch.cat([pair[side][part].to(device, torch.float64) for pair in pairs], 1).nan_to_num() for side in (0, 1)
        )
        moved.append((second - first).abs().amax(1))
        largest.append(first.abs().amax())
    tiny = torch.finfo(torch.float64).tiny
    return torch.cat(moved).cpu(), torch.stack(largest).amax().cpu().clamp(min=tiny)


def _value(values: dict[int, Any], each: Any) -> Any:
    return values.get(each.number, _Failed()) if isinstance(each, Ref) else each
