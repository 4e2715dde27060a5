"""What was learned about a model: in which axis each of its calls carries the examples.

A *call* is one tapped output of a layer rule, or one operation on an unbatched value. Calls are counted within one
forward pass under a key: the path of the module that owns the parameters, the operation, and the place in the
model's code from which it is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dphero.batch_axis.axis import BatchAxis
from dphero.batch_axis.call_site import CallSite

Key = tuple[str, str, CallSite]
Call = tuple[Key, int]
Traced = tuple[str, Key | None, int]
"""The label of a module, the call inside it (``None``: its own output), and how many such came before."""
Axes = tuple[tuple[int, int | None, bool], ...]
"""For each tensor of a call, outputs first: how many axes it has, which one carries the examples, whether folded."""


_MOST_ANSWERS = 1 << 14
"""How many layouts are remembered, of calls at various batch sizes."""


class UnknownCallError(RuntimeError):
    """The model did something that it had not done when it was examined."""


class AxisPlan:
    """Where the tensors of each call carry the examples.

    Calls under one key that are all alike may come in any number (one per time step, say); others must come exactly as
    often as they did when the model was examined.
    """

    def __init__(
        self,
        calls: Mapping[Call, Axes],
        arguments: Sequence[tuple[Any, Sequence[int | None]]],
        examples_independent: bool,
        written: Iterable[str] = (),
    ) -> None:
        self.calls = dict(calls)
        self.arguments = list(arguments)  # where they carry the examples, for each structure in which they came
        self.examples_independent = examples_independent  # whether rows could be compared: one alone says nothing
        self.written = frozenset(written)  # buffers that a pass writes, without looking at the examples
        self._counter: Counter[Key] = Counter()
        self._known: dict[Key, list[Axes]] = {}
        for (key, _), axes in calls.items():
            self._known.setdefault(key, []).append(axes)
        self._answers: dict[tuple[Axes | None, tuple[torch.Size, ...], int], list[BatchAxis]] = {}
        self._varied = {key: len(axes) for key, axes in self._known.items() if len(set(axes)) > 1}

    def joined(self, other: AxisPlan) -> AxisPlan:
        """Return the plan that also knows what another one knows, which prevails."""
        replaced = {key for key, _ in other.calls}
        calls = {call: axes for call, axes in self.calls.items() if call[0] not in replaced}
        arguments = [pair for pair in self.arguments if pair not in other.arguments] + other.arguments
        independent = self.examples_independent and other.examples_independent
        return AxisPlan(calls | other.calls, arguments, independent, self.written | other.written)

    def axes(self, structure: Any, leaves: Sequence[Any], rows: int) -> Sequence[int | None] | None:
        """Return where these arguments carry the examples, if they do so as earlier ones did."""
        for known, axes in self.arguments:
            if structure == known and all(
                axis is None or (isinstance(leaf, Tensor) and leaf.dim() > axis and leaf.shape[axis] == rows)
                for leaf, axis in zip(leaves, axes, strict=True)
            ):
                return axes
        return None

    def begin(self) -> None:
        """Start a forward pass."""
        self._counter.clear()

    def end(self) -> None:
        """Finish it."""
        for key, number in self._varied.items():
            if self._counter[key] not in (0, number):
                raise UnknownCallError(
                    f"{key[0] or 'the model'!r} made {self._counter[key]} calls of {key[1]}, not {number}"
                )

    def next(self, key: Key) -> Axes | None:
        """Return what is known of the next call; ``None`` for operations without gradient."""
        known = self._known.get(key)
        if known is None:
            return None
        if key not in self._varied:
            return known[0]
        return known[self._counter[key]] if self._counter[key] < len(known) else None

    def layouts(
        self, key: Key, outputs: Sequence[Tensor], inputs: Sequence[Tensor], rows: int, label: str
    ) -> list[BatchAxis]:
        """Return where the examples lie in the tensors of this call."""
        shapes = tuple([tensor.shape for tensor in (*outputs, *inputs)])
        axes = self.next(key)
        self._counter[key] += 1
        question = (axes, shapes, rows)
        found = self._answers.get(question)
        if found is None:
            if len(self._answers) >= _MOST_ANSWERS:
                self._answers.clear()
            found = self._answers[question] = _fit(*question, f"{label} ({key[1] or 'forward'})")
        return found


def _fit(axes: Axes | None, shapes: Sequence[torch.Size], rows: int, call: str) -> list[BatchAxis]:
    """Return where tensors of these shapes carry the examples, if they do so in these axes."""
    if axes is None or len(axes) != len(shapes):
        raise UnknownCallError(f"{call} made a call that it had not made when it was examined")
    fits = [
        BatchAxis.fit(axis, shape, rows) if len(shape) == dimensions else None
        for (dimensions, axis, _), shape in zip(axes, shapes, strict=True)
    ]
    layouts = [
        layout
        for layout, (_, _, folded) in zip(fits, axes, strict=True)
        if layout is not None and (folded or layout.fold == 1)
    ]
    if len(layouts) < len(fits):
        raise UnknownCallError(
            f"{call}: shapes {[*map(tuple, shapes)]} do not carry {rows} examples where they did before"
        )
    return layouts


@dataclass
class TracedCall:
    """One call, as it was recorded: the label of its module, its tensors' shapes, what was assumed of the outputs."""

    label: str
    shapes: list[torch.Size]
    assumed: list[BatchAxis]


class AxisTrace:
    """Notes the calls of one forward pass at one batch size.

    Of calls without hints, the layout of the outputs is guessed from their shape, and the comparison of two recordings
    confirms or corrects the guess.
    """

    def __init__(self, rows: int, hints: Mapping[Call, Axes]) -> None:
        self.rows = rows
        self.calls: dict[Call, TracedCall] = {}
        self.outputs: dict[Traced, Tensor] = {}
        """Those of modules, and of calls inside them, in the order in which they came."""
        self._hints = hints
        self._counter: Counter[Key] = Counter()
        self._noted: Counter[tuple[str, Key | None]] = Counter()

    def begin(self) -> None:
        self._counter.clear()

    def end(self) -> None:
        pass

    def next(self, key: Key) -> Axes | None:
        return None

    def layouts(
        self, key: Key, outputs: Sequence[Tensor], inputs: Sequence[Tensor], rows: int, label: str
    ) -> list[BatchAxis]:
        call, tensors = (key, self._counter[key]), [*outputs, *inputs]
        self._counter[key] += 1
        axes = self._hints.get(call, ())
        if len(axes) != len(tensors):
            layouts = [self._guess(tensor) for tensor in tensors]
        else:
            layouts = [
                BatchAxis.fit(axis, t.shape, rows) or BatchAxis(None)
                for (_, axis, _), t in zip(axes, tensors, strict=True)
            ]
        self.calls[call] = TracedCall(label, [tensor.shape for tensor in tensors], layouts[: len(outputs)])
        for output in outputs:
            self.note(label, output, key)
        return layouts

    def note(self, label: str, output: Tensor, key: Key | None = None) -> None:
        """Keep an output of a module, or of one call inside it, for the comparison of its rows."""
        self.outputs[label, key, self._noted[label, key]] = output.detach()
        self._noted[label, key] += 1

    def _guess(self, tensor: Tensor) -> BatchAxis:
        for axis, size in enumerate(tensor.shape):
            if size == self.rows:
                return BatchAxis(axis)
        return (BatchAxis.fit(0, tensor.shape, self.rows) if tensor.dim() else None) or BatchAxis(None)


AxisLookup = AxisPlan | AxisTrace
"""What a forward pass consults at each call: a plan, or the recording from which one is made."""
