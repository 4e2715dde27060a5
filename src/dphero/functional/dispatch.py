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
from dphero.functional.rules import PieceRule, piece_rules
from dphero.functional.unbatched import CannotFollowError, Origin, ParameterOrigin, Unbatched, UnbatchedTensor, plain
from dphero.functional.vmap import example_gradients
from dphero.gradients.piece import Explicit, Piece

__all__ = ["attached", "follow"]


def follow(taps: Context, operation: Operation, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
    """Run an operation on unbatched values.

    Args:
        taps: The taps of the model.
        operation: The operation.
        tensors: The tensors in its arguments, some of them unbatched.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    unbatched = [tensor for tensor in tensors if isinstance(tensor, UnbatchedTensor)]
    inputs = [tensor for tensor in tensors if not isinstance(tensor, UnbatchedTensor)]
    path, label, key = unbatched[0].path, unbatched[0].label, taps.key(unbatched[0].path, operation.name)
    origins = list({id(origin): origin for value in unbatched for origin in value.value.origins}.values())

    def refused() -> CannotFollowError:
        owner = taps.stack[-1] if taps.stack else None  # whose code this is
        names = set(owner.names.values()) if owner is not None else set()
        own = all(isinstance(origin, ParameterOrigin) and origin.name in names for origin in origins)
        return CannotFollowError(label, operation.name, owner if own else None)

    target = args[0] if operation.in_place or kwargs.get("inplace") is True else None
    if isinstance(target, UnbatchedTensor):
        _make_writable(target, origins, taps, refused)
        operation.run([plain(tensor) for tensor in tensors])
        return None if operation.name == "__setitem__" else target
    if operation.name == "__setitem__" or "out" in kwargs:
        raise refused()
    known = taps.axis_lookup.next(key)
    if known is not None and known[0][1] is not None:
        return _run_with_batch(taps, key, known[0][1], operation, tensors, args, kwargs, refused)
    out = operation.run([plain(tensor) for tensor in tensors])
    leaves = [out] if isinstance(out, Tensor) else tree_flatten(out)[0]
    outs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outs:
        return out  # a shape, a device, a mask: nothing with a gradient
    layouts = taps.axis_lookup.layouts(key, outs, inputs, taps.rows, label)[: len(outs)]
    batched = {id(tensor) for tensor, layout in zip(outs, layouts, strict=True) if not layout.unbatched}
    if taps.tape is not None and (batched or target is not None):
        raise refused()

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad or value is target:
            return value
        if id(value) in batched:
            return value.detach()
        return UnbatchedTensor.wrap(Unbatched(value, origins, taps), taps, path, label)

    return wrap(out) if isinstance(out, Tensor) else tree_map(wrap, out)


def _make_writable(
    target: UnbatchedTensor, origins: Sequence[Origin], taps: Context, refused: Callable[[], CannotFollowError]
) -> None:
    """Let an operation change an unbatched value in place: where torch forbids that, a copy of it.

    A view of it that was taken before does not see the change then; the comparison of outputs would find that out.
    """
    base = target.plain if target.plain._base is None else target.plain._base
    first = any(origin.leaf is base for origin in origins)
    if any(origin.leaf is base and isinstance(origin, ParameterOrigin) for origin in origins):
        raise refused()  # torch itself refuses to change a parameter
    if first or len(origins) > len(target.value.origins):
        target.value = Unbatched(target.plain.clone(), origins, taps)


def _run_with_batch(
    taps: Context,
    key: Key,
    axis: int,
    operation: Operation,
    tensors: list[Tensor],
    args: Any,
    kwargs: Any,
    refused: Callable[[], CannotFollowError],
) -> Any:
    """Run an operation that combines unbatched values with the batch; ``axis`` of its result carries the examples."""
    unbatched = [tensor for tensor in tensors if isinstance(tensor, UnbatchedTensor)]
    inputs = [tensor for tensor in tensors if not isinstance(tensor, UnbatchedTensor)]
    tape, label = taps.tape, unbatched[0].label
    assert tape is not None
    if operation.func in _ELEMENTWISE or operation.func in _REPEATING:
        out = _elementwise(taps, tape, axis, operation, args, tensors, refused)
        taps.axis_lookup.layouts(key, [out], inputs, taps.rows, label)
        return out
    result = operation.run([t.plain.detach() if isinstance(t, UnbatchedTensor) else t for t in tensors])
    leaves, structure = tree_flatten(result)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(places) != 1 or operation.in_place:
        raise refused()
    layouts = taps.axis_lookup.layouts(key, [leaves[places[0]]], inputs, taps.rows, label)
    leaves[places[0]] = out = attached(leaves[places[0]], [plain(tensor) for tensor in tensors])
    for value in unbatched:
        value.value.expect(tape)
    layout_of = {id(tensor): layout for tensor, layout in zip(inputs, layouts[1:], strict=True)}
    rules = piece_rules(operation.func, args, kwargs, unbatched)
    if rules is None or any(layout_of[id(x)] != layouts[0] for rule in rules for x in rule[2]):
        _example_by_example(taps, tape, out, layouts, operation, tensors, places[0], refused)
    else:
        _apply_rules(taps, tape, out, layouts[0], rules)
    return tree_unflatten(leaves, structure)


def _apply_rules(taps: Context, tape: GradientSink, out: Tensor, layout: BatchAxis, rules: list[PieceRule]) -> None:
    """Watch the output once for every unbatched argument."""
    for unbatched, make, saved in rules:

        def carry(*tensors: Tensor, value: Unbatched = unbatched.value, make: Any = make) -> dict[str, Piece]:
            value.receive(tape, make(*tensors).folded(layout.fold))
            return {}

        taps.watch(out, [layout] * (1 + len(saved)), carry, saved, unbatched.label)


def _example_by_example(
    taps: Context,
    tape: GradientSink,
    out: Tensor,
    layouts: Sequence[BatchAxis],
    operation: Operation,
    tensors: list[Tensor],
    place: int,
    refused: Callable[[], CannotFollowError],
) -> None:
    """Watch the output (at its place in the result) once, and differentiate anew when its gradient arrives."""
    values = [tensor.value if isinstance(tensor, UnbatchedTensor) else None for tensor in tensors]
    inputs = tuple(tensor for tensor in tensors if not isinstance(tensor, UnbatchedTensor))
    failure = refused()

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

    taps.watch(out, layouts, carry, inputs, f"the operation {operation.name}", split=True)


# -- elementwise ----------------------------------------------------------------------------------------------------


def _elementwise(
    taps: Context,
    tape: GradientSink,
    axis: int,
    operation: Operation,
    args: Any,
    tensors: list[Tensor],
    refused: Callable[[], CannotFollowError],
) -> Tensor:
    """Run an operation that broadcasts, with a copy of each unbatched value for each example."""
    func = operation.func
    if func in _REPEATING:
        shape = operation.run([plain(tensor).detach() for tensor in tensors]).shape
    else:
        shape = _broadcast([tensor.shape for tensor in tensors])
    layout = BatchAxis.fit(axis, shape, taps.rows)
    times = list(args[1] if isinstance(args[1], Sequence) else args[1:]) if func is torch.Tensor.repeat else []
    values: list[Tensor] = []
    for tensor in tensors:
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
            raise refused()
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
        value.receive(tape, Explicit(gradient.reshape(rows, layout.fold, -1).sum(1).reshape(rows, *own)))
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
        parts = gradient.reshape(rows, *(size for pair in zip(each, aligned, strict=True) for size in pair))
        summed = parts.sum([1 + 2 * axis for axis in range(len(each))])
        value.receive(tape, Explicit(summed.reshape(rows, *own)))
        return {}

    taps.watch(copy, [layout], carry, (), unbatched.label, split=True)
    return copy


def attached(out: Tensor, beside: Sequence[Tensor]) -> Tensor:
    """Give an output a place of its own in the graph, where a hook stays even if an in-place operation follows.

    So it is no leaf, though nothing that it was computed from may require a gradient; and no view, from which such an
    operation would take the hook away.

    Args:
        out: The output.
        beside: Tensors that may lie in the same memory, which then must not be written.
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
