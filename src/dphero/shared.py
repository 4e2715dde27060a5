"""Values that are the same for all examples, and where examples first meet them.

A bare parameter (a class token, a temperature, a LoRA matrix) or the output of a layer whose input does
not carry the batch (a position embedding over an ``arange``) has no batch axis, so autograd would hand back
a gradient that is already summed over the examples. A :class:`Shared` tensor follows such a value through
the model's own code. Operations among shared values stay shared. The first operation with a batched result
is given the value *once per example*, and there the per-example gradient is read off exactly; an
operation for which that is not known is refused, and the module falls back to the generic rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from dphero.layers.convolution import conv_piece, convolution_arguments
from dphero.layout import Layout
from dphero.pieces import Explicit, Outer, Piece, Rows

if TYPE_CHECKING:
    from dphero.taps import Site, Taps

__all__ = ["NoSharedRule", "Origin", "Shared"]


class NoSharedRule(Exception):
    """An operation mixes a shared value with a batch in a way for which no rule is known."""

    def __init__(self, site: Site, operation: str) -> None:
        super().__init__(f"{site.label}: no per-example rule for {operation} with a shared value")
        self.site = site


class _Unfit(Exception):
    """The operation's arguments are not of the form that a rule knows."""


class Origin:
    """Where a shared value comes from: a leaf of its own little graph, and what takes its gradients."""

    def __init__(self, leaf: Tensor, sink: Callable[[Piece], None]) -> None:
        self.leaf, self.sink = leaf, sink

    @classmethod
    def of_parameter(cls, parameter: Tensor, sink: Callable[[Piece], None]) -> SharedValue:
        """Return a shared value that is the parameter itself."""
        leaf = parameter.detach().requires_grad_()
        return SharedValue(leaf, (cls(leaf, sink),))

    @classmethod
    def after(cls, out: Tensor, sink: Callable[[Tensor], None]) -> SharedValue:
        """Return a shared value that a layer computed; gradients also flow on to what it was computed from."""
        before = out.value if isinstance(out, Shared) else None
        leaf = (out.plain if isinstance(out, Shared) else out).detach().requires_grad_()

        def take(piece: Piece) -> None:
            gradients = piece.instantiate()
            with torch.no_grad():
                sink(gradients)
            if before is not None:
                before.receive(Explicit(gradients))

        return SharedValue(leaf, (cls(leaf, take),))


class SharedValue:
    """The plain tensor behind a :class:`Shared`, and its origins."""

    def __init__(self, plain: Tensor, origins: tuple[Origin, ...]) -> None:
        self.plain, self.origins = plain, origins

    def receive(self, piece: Piece) -> None:
        """Carry per-example gradients of this value back to its origins."""
        for origin in self.origins:
            if origin.leaf is self.plain:
                origin.sink(piece)
                continue
            (gradient,) = torch.autograd.grad(
                self.plain,
                origin.leaf,
                piece.instantiate(),
                is_grads_batched=True,
                retain_graph=True,
                allow_unused=True,
            )
            if gradient is not None:
                origin.sink(Explicit(gradient))


class Shared(torch.Tensor):
    """A tensor without a batch axis that remembers where it comes from."""

    value: SharedValue
    taps: Taps
    site: Site

    @staticmethod
    def wrap(value: SharedValue, taps: Taps, site: Site) -> Shared:
        """Wrap a plain value."""
        tensor = torch.Tensor._make_subclass(Shared, value.plain.detach(), False)
        tensor.value, tensor.taps, tensor.site = value, taps, site
        return tensor

    @property
    def plain(self) -> Tensor:
        """The ordinary tensor, with its graph."""
        return self.value.plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            flat, _ = tree_flatten((args, kwargs))
            shared = [value for value in flat if isinstance(value, Shared)]
            if not shared:
                return func(*args, **kwargs)
            first = shared[0]
            return _run(first.taps, first.site, func, args, kwargs, shared)


def _run(taps: Taps, site: Site, func: Any, args: Any, kwargs: Any, shared: list[Shared]) -> Any:
    def plain(value: Any) -> Any:
        return value.plain if isinstance(value, Shared) else value

    plan = taps.plan
    assert plan is not None
    key = taps.next_key(site.path + " shared")
    if not plan.recording:
        layout = taps.layout(key, site.label)
        if layout is not None and not layout.shared:
            return _meet(taps, layout, plan.dimensions[key], func, args, kwargs, shared)
    out = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    if plan.recording:
        plan.record(key, out, site)
        if isinstance(out, Tensor) and not plan.guess(out).shared:
            try:
                return _meet(taps, plan.guess(out), out.dim(), func, args, kwargs, shared)
            except _Unfit:
                raise NoSharedRule(site, getattr(func, "__name__", str(func))) from None
    if not isinstance(out, Tensor):
        return out  # a shape, a device, a size
    origins = {id(origin): origin for value in shared for origin in value.value.origins}
    return Shared.wrap(SharedValue(out, tuple(origins.values())), taps, site)


def _meet(
    taps: Taps, layout: Layout, dimensions: int, func: Any, args: Any, kwargs: Any, shared: list[Shared]
) -> Tensor:
    """Run the operation in which a shared value first meets the batch."""
    if func in _MEETINGS:
        return _MEETINGS[func](taps, layout, *args, **kwargs)
    if func not in _BROADCAST:
        raise _Unfit
    copies = {id(value): _once_per_example(taps, layout, dimensions, value) for value in shared}

    def batched(value: Any) -> Any:
        return copies.get(id(value), value)

    return func(*tree_map(batched, args), **tree_map(batched, kwargs))


def _once_per_example(taps: Taps, layout: Layout, dimensions: int, shared: Shared) -> Tensor:
    """Give each example its own copy (no memory) of a shared value, aligned with the result's batch axis."""
    axis, fold, rows, tape = layout.axis, layout.fold, taps.rows, taps.tape
    assert axis is not None
    shape = [1] * (dimensions - shared.plain.dim()) + list(shared.plain.shape)
    if shape[axis] != 1:
        raise _Unfit
    shape[axis] = rows * fold
    copy = shared.plain.detach().reshape([1 if i == axis else size for i, size in enumerate(shape)])
    copy = copy.expand(shape)
    if tape is None:
        return copy
    copy.requires_grad_()
    value, own = shared.value, shared.plain.shape

    def arrive(gradient: Tensor) -> None:
        tape.start()
        gradient = gradient.detach().movedim(axis, 0).reshape(rows, fold, -1).sum(1).reshape(rows, *own)
        tape.defer(lambda: value.receive(Explicit(gradient)))

    copy.register_hook(arrive)
    return copy


def _watch(taps: Taps, layout: Layout, out: Tensor, shared: Any, make: Callable[..., Piece], *saved: Tensor) -> None:
    """Tap the output of a matrix product or convolution with a shared value."""
    tape = taps.tape
    if tape is None or not isinstance(shared, Shared):
        return
    value = shared.value
    kept = tuple(tensor.detach() for tensor in saved)

    def arrive(gradient: Tensor) -> None:
        tape.start()
        piece = make(layout.rows(gradient.detach()), *map(layout.rows, kept)).folded(layout.fold)
        tape.defer(lambda: value.receive(piece))

    out.register_hook(arrive)


def _plain(value: Any) -> Any:
    return value.plain.detach() if isinstance(value, Shared) else value


def _flat(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1, x.shape[-1])


def _attached(compute: Callable[[], Tensor], *inputs: Any) -> Tensor:
    from dphero.taps import _anchor, _Fresh

    if any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
        return compute()
    return _Fresh.apply(_anchor(inputs), compute)


def _linear(taps: Taps, layout: Layout, input: Any, weight: Any, bias: Any = None) -> Tensor:
    if isinstance(input, Shared):
        raise _Unfit
    out = _attached(lambda: F.linear(input, _plain(weight), _plain(bias)), input)
    _watch(taps, layout, out, weight, lambda d, x: Outer(_flat(d), _flat(x)), input)
    _watch(taps, layout, out, bias, lambda d: Explicit(_flat(d).sum(1)))
    return out


def _matmul(taps: Taps, layout: Layout, input: Any, other: Any) -> Tensor:
    if isinstance(input, Shared) and isinstance(other, Shared):
        raise _Unfit
    out = _attached(lambda: torch.matmul(_plain(input), _plain(other)), _plain(input), _plain(other))
    if isinstance(other, Shared) and other.plain.dim() == 2:
        _watch(taps, layout, out, other, lambda d, x: Outer(_flat(x), _flat(d)), input)
    elif isinstance(input, Shared) and input.plain.dim() == 2 and other.dim() == 3 and layout == Layout(0):
        _watch(taps, layout, out, input, lambda d, x: Outer(d.transpose(1, 2), x.transpose(1, 2)), other)
    else:
        raise _Unfit
    return out


def _addmm(taps: Taps, layout: Layout, bias: Any, input: Any, weight: Any) -> Tensor:
    if isinstance(input, Shared):
        raise _Unfit
    out = _attached(lambda: torch.addmm(_plain(bias), input, _plain(weight)), input)
    _watch(taps, layout, out, weight, lambda d, x: Outer(_flat(x), _flat(d)), input)
    _watch(taps, layout, out, bias, lambda d: Explicit(_flat(d).sum(1)))
    return out


def _embedding(
    taps: Taps, layout: Layout, input: Any, weight: Any, padding_idx: int | None = None, *rest: Any
) -> Tensor:
    if isinstance(input, Shared) or any(rest):
        raise _Unfit
    out = _attached(lambda: F.embedding(input, _plain(weight), padding_idx), input)
    rows = weight.plain.shape[0]
    _watch(taps, layout, out, weight, lambda d, i: Rows(i.reshape(len(i), -1), _flat(d), rows), input)
    return out


def _convolution(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(
        taps: Taps,
        layout: Layout,
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        if isinstance(input, Shared) or isinstance(padding, str):
            raise _Unfit
        out = _attached(lambda: original(input, _plain(weight), _plain(bias), stride, padding, dilation, groups), input)
        arguments = convolution_arguments(_plain(weight), stride, padding, dilation, groups)
        _watch(taps, layout, out, weight, lambda d, x: conv_piece(x, d, arguments), input)
        _watch(taps, layout, out, bias, lambda d: Explicit(d.flatten(2).sum(2)))
        return out

    return run


def _normalised(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Layer, RMS norm with shared affine parameters: normalise without them, then scale and shift."""

    def run(
        taps: Taps,
        layout: Layout,
        input: Any,
        shape: Any,
        weight: Any = None,
        bias: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        if isinstance(input, Shared):
            raise _Unfit
        if norm is F.rms_norm:  # (input, shape, weight, eps)
            rest, bias = ((bias, *rest) if bias is not None else rest), None
            out = norm(input, shape, None, *rest, **options)
        else:
            out = norm(input, shape, None, None, *rest, **options)
        for value, combine in ((weight, torch.mul), (bias, torch.add)):
            if isinstance(value, Shared):
                out = combine(out, _once_per_example(taps, layout, out.dim(), value))
            elif value is not None:
                out = combine(out, value)
        return out

    return run


_BROADCAST = {
    getattr(torch.Tensor, name)
    for name in ["add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__", "div", "__truediv__", "__rtruediv__", "true_divide", "pow", "__pow__", "__rpow__", "maximum", "minimum", "expand", "expand_as", "broadcast_to", "addcmul", "lerp", "where"]
} | {
    getattr(torch, name)
    for name in ["add", "sub", "mul", "div", "true_divide", "pow", "maximum", "minimum", "broadcast_to", "addcmul", "lerp", "where"]
}

_MEETINGS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: lambda taps, layout, other, input: _matmul(taps, layout, input, other),
    torch.mm: _matmul,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    F.layer_norm: _normalised(F.layer_norm),
    F.rms_norm: _normalised(F.rms_norm),
    **{conv: _convolution(conv) for conv in (F.conv1d, F.conv2d, F.conv3d)},
}
