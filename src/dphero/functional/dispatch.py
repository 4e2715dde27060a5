"""Unbatched values are followed through the model's code, up to the operation that combines one with the batch.

Elementwise operations get the value once per example (a view, no memory), and autograd does the rest. Products,
convolutions and look-ups give pieces without forming anything (:mod:`dphero.functional.rules`). Any other operation is
differentiated example by example under ``vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dphero.batch_axis.axis import BatchAxis
from dphero.batch_axis.plan import Key, UnknownCallError
from dphero.functional.context import Context, GradientSink
from dphero.functional.operation import Operation
from dphero.functional.rules import PRODUCTS, PieceRule, piece_rules
from dphero.functional.unbatched import CannotFollowError, ParameterOrigin, Unbatched, UnbatchedTensor, plain
from dphero.functional.vmap import example_gradients
from dphero.gradients.piece import Explicit, Piece
from dphero.numerics.precision import as_multiplied, widened
from dphero.row_form.form import Call, row_form


def follow(taps: Context, operation: Operation, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
    """Run an operation on unbatched values, which are among the tensors of its arguments."""
    return _FollowedCall(taps, operation, tensors, args, kwargs).run()


class _FollowedCall:
    """One call of an operation on unbatched values."""

    def __init__(self, taps: Context, operation: Operation, tensors: list[Tensor], args: Any, kwargs: Any) -> None:
        self._taps, self._operation, self._tensors, self._args, self._kwargs = taps, operation, tensors, args, kwargs
        self._unbatched = [tensor for tensor in tensors if isinstance(tensor, UnbatchedTensor)]
        self._inputs = [tensor for tensor in tensors if not isinstance(tensor, UnbatchedTensor)]
        self._forms = {id(tensor): tensor.value.form for tensor in self._unbatched}
        self._path, self._label = self._unbatched[0].path, self._unbatched[0].label
        self._origins = list({id(origin): origin for each in self._unbatched for origin in each.value.origins}.values())

    def run(self) -> Any:
        """Run the operation; its result is unbatched, or watched where it carries the examples."""
        taps, operation, kwargs = self._taps, self._operation, self._kwargs
        key = taps.key(self._path, operation.name)
        target = self._args[0] if operation.in_place or kwargs.get("inplace") is True else None
        if isinstance(target, UnbatchedTensor):
            self._make_writable(target)
            operation.run([plain(tensor) for tensor in self._tensors])
            return None if operation.name == "__setitem__" else target
        if operation.name == "__setitem__" or kwargs.get("out") is not None:
            raise self._refused()
        known = taps.axis_lookup.next(key)
        if known is not None and known[0][1] is not None:
            return self._run_with_batch(key, known[0][1])
        out = operation.run([plain(tensor) for tensor in self._tensors])
        leaves = [out] if isinstance(out, Tensor) else tree_flatten(out)[0]
        outs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not outs:
            return out  # a shape, a device, a mask: nothing with a gradient
        layouts = self._layouts(key, *outs)[: len(outs)]
        batched = {id(tensor) for tensor, layout in zip(outs, layouts, strict=True) if not layout.unbatched}
        if taps.tape is not None and (batched or target is not None):
            raise self._refused()

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad or value is target:
                return value
            if id(value) in batched:
                return value.detach()
            form = row_form(operation.func, Call(self._args, kwargs, self._forms, value))
            return UnbatchedTensor.wrap(Unbatched(value, self._origins, taps, form), taps, self._path, self._label)

        return wrap(out) if isinstance(out, Tensor) else tree_map(wrap, out)

    def _layouts(self, key: Key, *outs: Tensor) -> list[BatchAxis]:
        """Return where outputs, and behind them the inputs, carry the examples."""
        return self._taps.axis_lookup.layouts(key, outs, self._inputs, self._taps.rows, self._label)

    def _refused(self) -> CannotFollowError:
        owner = self._taps.stack[-1] if self._taps.stack else None  # whose code this is
        names = set(owner.names.values()) if owner is not None else set()
        own = all(isinstance(origin, ParameterOrigin) and origin.name in names for origin in self._origins)
        return CannotFollowError(self._label, self._operation.name, owner if own else None)

    def _make_writable(self, target: UnbatchedTensor) -> None:
        """Let an operation change an unbatched value in place: where torch forbids that, a copy of it.

        A view of it that was taken before does not see the change then; the comparison of outputs would find that out.
        """
        base = target.plain if target.plain._base is None else target.plain._base
        first = [origin for origin in self._origins if origin.leaf is base]
        if any(isinstance(origin, ParameterOrigin) for origin in first):
            raise self._refused()  # torch itself refuses to change a parameter
        if first or len(self._origins) > len(target.value.origins):
            target.value = Unbatched(target.plain.clone(), self._origins, self._taps)

    def _run_with_batch(self, key: Key, axis: int) -> Any:
        """Run an operation that combines the values with the batch; ``axis`` of its result carries the examples."""
        operation, tape = self._operation, self._taps.tape
        assert tape is not None
        if operation.func in _ELEMENTWISE or operation.func in _REPEATING:
            out = self._elementwise(tape, axis)
            self._layouts(key, out)
            return out
        result = operation.run([t.plain.detach() if isinstance(t, UnbatchedTensor) else t for t in self._tensors])
        leaves, structure = tree_flatten(result)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(places) != 1 or operation.in_place:
            raise self._refused()
        layouts = self._layouts(key, leaves[places[0]])
        leaves[places[0]] = out = attached(leaves[places[0]], [plain(tensor) for tensor in self._tensors])
        for each in self._unbatched:
            each.value.expect(tape)
        layout_of = {id(tensor): layout for tensor, layout in zip(self._inputs, layouts[1:], strict=True)}
        rules = piece_rules(operation.func, self._args, self._kwargs, self._unbatched)
        if rules is None or any(layout_of[id(x)] != layouts[0] for rule in rules for x in rule[2]):
            self._example_by_example(tape, out, layouts, places[0])
        else:
            self._apply_rules(tape, out, layouts[0], rules)
        return tree_unflatten(leaves, structure)

    def _apply_rules(self, tape: GradientSink, out: Tensor, layout: BatchAxis, rules: list[PieceRule]) -> None:
        """Watch the output once for every unbatched argument."""
        for unbatched, make, saved in rules:
            if self._operation.func in PRODUCTS:
                saved = tuple(map(as_multiplied, saved))

            def carry(*tensors: Tensor, value: Unbatched = unbatched.value, make: Any = make) -> dict[str, Piece]:
                value.receive(tape, make(*tensors).folded(layout.fold))
                return {}

            self._taps.watch(out, [layout] * (1 + len(saved)), carry, saved, unbatched.label)

    def _example_by_example(self, tape: GradientSink, out: Tensor, layouts: Sequence[BatchAxis], place: int) -> None:
        """Watch the output (at its place in the result) once, and differentiate anew when its gradient arrives."""
        operation, failure = self._operation, self._refused()
        values = [tensor.value if isinstance(tensor, UnbatchedTensor) else None for tensor in self._tensors]

        def one(wanted: dict[str, Tensor], *inputs: Tensor) -> Tensor:
            rest = iter(inputs)
            out = operation.run([next(rest) if value is None else wanted[str(i)] for i, value in enumerate(values)])
            return tree_flatten(out)[0][place]

        def carry(gradients: Tensor, *inputs: Tensor) -> dict[str, Piece]:
            wanted = {str(i): value.plain.detach() for i, value in enumerate(values) if value is not None}
            try:
                found = example_gradients(one, wanted, gradients, inputs)
            except RuntimeError as error:
                raise failure from error
            for number, gradient in found.items():
                value = values[int(number)]
                assert value is not None
                value.receive(tape, Explicit(gradient))
            return {}

        self._taps.watch(out, layouts, carry, tuple(self._inputs), f"the operation {operation.name}", split=True)

    def _elementwise(self, tape: GradientSink, axis: int) -> Tensor:
        """Run an operation that broadcasts, with a copy of each unbatched value for each example."""
        taps, operation, args, func = self._taps, self._operation, self._args, self._operation.func
        if func in _REPEATING:
            shape = operation.run([plain(tensor).detach() for tensor in self._tensors]).shape
        else:
            shape = _broadcast([tensor.shape for tensor in self._tensors])
        layout = BatchAxis.fit(axis, shape, taps.rows)
        times = list(args[1] if isinstance(args[1], Sequence) else args[1:]) if func is torch.Tensor.repeat else []
        values: list[Tensor] = []
        for tensor in self._tensors:
            if not isinstance(tensor, UnbatchedTensor):
                values.append(tensor)
                continue
            aligned = [1] * (len(shape) - tensor.dim()) + list(tensor.shape)
            if layout is None:
                raise UnknownCallError(
                    f"{tensor.label}: {operation.name} gave shape {tuple(shape)} for {taps.rows} examples"
                )
            if aligned[axis] != 1 and times and times[axis] % taps.rows == 0:
                return _repeated(taps, tape, layout, aligned, times, tensor)
            if aligned[axis] != 1:
                raise self._refused()
            values.append(_once_per_example(taps, tape, layout, aligned, tensor))
        if times:
            times[axis] = 1  # the copies are there already
            return values[0].repeat(times)
        return operation.run(values)


def _broadcast(shapes: Sequence[Sequence[int]]) -> torch.Size:
    """Return the shape of a result (torch's own function takes half a second to import what it needs)."""
    axes = max(map(len, shapes))
    aligned = [(1,) * (axes - len(shape)) + tuple(shape) for shape in shapes]
    return torch.Size([next((size for size in sizes if size != 1), 1) for sizes in zip(*aligned, strict=True)])


def _once_per_example(
    taps: Context, tape: GradientSink, layout: BatchAxis, aligned: list[int], unbatched: UnbatchedTensor
) -> Tensor:
    """Return a copy of an unbatched value for each example, in the batch axis of the result."""
    assert layout.axis is not None
    value, own, rows = unbatched.value, unbatched.plain.shape, taps.rows
    size = list(aligned)
    size[layout.axis] = rows * layout.fold
    copy = _fresh(unbatched.plain.detach().reshape(aligned).expand(size))
    value.expect(tape)

    def carry(gradient: Tensor) -> dict[str, Piece]:
        value.receive(tape, Explicit(widened(gradient).reshape(rows, layout.fold, -1).sum(1).reshape(rows, *own)))
        return {}

    taps.watch(copy, [layout], carry, (), unbatched.label)
    return copy


def _repeated(
    taps: Context,
    tape: GradientSink,
    layout: BatchAxis,
    aligned: list[int],
    times: list[int],
    unbatched: UnbatchedTensor,
) -> Tensor:
    """Repeat an unbatched value in an axis of its own, for each example (heads that are folded into the batch)."""
    assert layout.axis is not None
    value, own, rows = unbatched.value, unbatched.plain.shape, taps.rows
    copy = _fresh(unbatched.plain.detach().repeat(times))
    each = [count // rows if axis == layout.axis else count for axis, count in enumerate(times)]
    value.expect(tape)

    def carry(gradient: Tensor) -> dict[str, Piece]:
        parts = widened(gradient).reshape(rows, *(size for pair in zip(each, aligned, strict=True) for size in pair))
        summed = parts.sum([1 + 2 * axis for axis in range(len(each))])
        value.receive(tape, Explicit(summed.reshape(rows, *own)))
        return {}

    taps.watch(copy, [layout], carry, (), unbatched.label, split=True)
    return copy


def attached(out: Tensor, beside: Sequence[Tensor]) -> Tensor:
    """Give an output a place of its own in the graph, where a hook stays even if an in-place operation follows.

    So it is no leaf, though nothing that it was computed from may require a gradient; and no view, from which such an
    operation would take the hook away. Memory that it shares with tensors ``beside`` it must not be written.
    """
    if out._is_view():
        memory = out.untyped_storage().data_ptr()
        held = any(tensor.untyped_storage().data_ptr() == memory for tensor in beside)
        out = out.clone() if held else torch.ops.aten._unsafe_view(out, out.shape)
    return out if out.requires_grad else _fresh(out)


def _fresh(out: Tensor) -> Tensor:
    return _Fresh.apply(torch.empty(0, device=out.device, requires_grad=True), lambda: out)


class _Fresh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


_OPERATORS = "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__"
_FUNCTIONS = "add sub subtract mul multiply div divide true_divide pow maximum minimum where lerp addcmul addcdiv clamp"
_CHANGING = "add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__"
_ELEMENTWISE = {
    *(getattr(torch.Tensor, name) for name in f"{_OPERATORS} {_FUNCTIONS} {_CHANGING}".split()),
    *(getattr(torch, name) for name in _FUNCTIONS.split()),
}
_REPEATING = {
    torch.Tensor.expand,
    torch.Tensor.expand_as,
    torch.Tensor.repeat,
    torch.Tensor.broadcast_to,
    torch.broadcast_to,
}
