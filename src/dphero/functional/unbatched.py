"""Values that are the same for all examples, followed to where they are first combined with the batch.

A bare parameter (a class token, a temperature, a LoRA matrix) or the output of a layer whose input does
not carry the batch (a position embedding over an ``arange``) has no batch axis, so autograd would hand back
a gradient that is already summed over the examples. A :class:`UnbatchedTensor` tensor follows such a value through
the model's own code. Operations among unbatched values stay unbatched. At the first operation with a batched result
the per-example gradient is read off exactly (:mod:`dphero.functional.dispatch`) and carried back to the parameters.

A gradient that reaches an unbatched value on any other way raises an error: none is ever lost in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dphero.functional.context import Context, GradientSink, Owner
from dphero.functional.operation import take_apart
from dphero.functional.pulled import Pulled, is_single, pulled
from dphero.functional.rules import SIMPLER
from dphero.gradients.outer import Outer
from dphero.gradients.piece import Explicit, Piece
from dphero.numerics.precision import full_precision
from dphero.row_form.form import RowForm, leaf_form
from dphero.row_form.row_sums import RowSums

_LARGE = 1 << 22
"""Elements of per-example gradients, of a value and of what it is made from, above which they are not all formed."""


class CannotFollowError(RuntimeError):
    """An operation takes an unbatched value to a batch in a way that cannot be followed.

    Attributes:
        owner: The module in whose code it happened, where all parameters in question are its own.
    """

    def __init__(self, label: str, operation: str, owner: Owner | None) -> None:
        super().__init__(
            f"{label}: what {operation} does to its parameters cannot be followed example by example. Use the "
            "out-of-place form of the operation, or move it into a module of its own and register a rule for "
            "that with @dphero.register."
        )
        self.owner = owner


class Origin:
    """Where an unbatched value comes from: a leaf of its own little graph, and what takes its gradients.

    A recorded pass goes back through that graph after the optimizer has changed weights in place, which autograd would
    refuse. So the leaf counts no changes of its memory; :attr:`version` does.
    """

    def __init__(self, plain: Tensor, taps: Context, label: str) -> None:
        self.leaf, self._plain, self.label = plain.data.requires_grad_(), plain.detach(), label
        self.leaf.register_hook(_guard(taps, label))

    @property
    def version(self) -> int:
        """How often the value was changed in place."""
        return self._plain._version

    def expect(self, tape: GradientSink) -> None:
        """Announce, in the forward pass, one coming piece."""
        raise NotImplementedError

    def take(self, tape: GradientSink, piece: Piece) -> None:
        """Take the per-example gradients of the leaf."""
        raise NotImplementedError


class ParameterOrigin(Origin):
    """A parameter itself."""

    def __init__(self, name: str, parameter: Tensor, taps: Context, label: str) -> None:
        super().__init__(parameter, taps, label)
        self.name = name

    def expect(self, tape: GradientSink) -> None:
        tape.expect([self.name])

    def take(self, tape: GradientSink, piece: Piece) -> None:
        tape.deliver(self.name, piece)


class LayerOrigin(Origin):
    """The output of a tapped layer on an unbatched input; gradients also flow on to that input.

    ``make`` returns the layer's pieces, by parameter name, from the per-example gradients of the output.
    """

    def __init__(
        self, out: Tensor, names: Sequence[str], make: Callable[[Tensor], dict[str, Piece]], taps: Context, label: str
    ) -> None:
        self.before = out.value if isinstance(out, UnbatchedTensor) else None
        super().__init__(out.plain if isinstance(out, UnbatchedTensor) else out, taps, label)
        self._names, self._make = names, make

    def expect(self, tape: GradientSink) -> None:
        tape.expect(self._names)
        if self.before is not None:
            self.before.expect(tape)

    def take(self, tape: GradientSink, piece: Piece) -> None:
        gradients = piece.instantiate()
        for name, part in self._make(gradients).items():
            tape.deliver(name, part)
        if self.before is not None:
            self.before.receive(tape, Explicit(gradients))


class Unbatched:
    """The plain tensor behind a :class:`UnbatchedTensor`, and its origins."""

    def __init__(self, plain: Tensor, origins: Sequence[Origin], taps: Context, form: RowForm | None = None) -> None:
        self.plain, self.origins, self._taps = plain, tuple(origins), taps
        self._form, self._version = form, plain._version
        self._versions = [origin.version for origin in self.origins]

    @property
    def form(self) -> RowForm | None:
        """Its row form, if it is known to have one, and was not changed since."""
        if self.plain is self.origins[0].leaf:
            return leaf_form(self.plain)
        return self._form if self.plain._version == self._version else None

    def expect(self, tape: GradientSink) -> None:
        """Announce, in the forward pass, that the value is combined with the batch once more."""
        if self.plain is self.origins[0].leaf:  # which stays from one pass to the next
            self._versions = [origin.version for origin in self.origins]
        for origin in self.origins:
            origin.expect(tape)

    def receive(self, tape: GradientSink, piece: Piece) -> None:
        """Carry per-example gradients of this value back to its origins."""
        for origin, version in zip(self.origins, self._versions, strict=True):
            if origin.version != version:
                raise RuntimeError(
                    f"a parameter of {origin.label} was changed in place after the model had used it; its gradient "
                    "would be wrong. Change it after backward()."
                )
        origin = self.origins[0]
        if origin.leaf is self.plain:
            origin.take(tape, piece)
        elif isinstance(piece, Outer) and len(self.origins) == 1 and _is_transpose(self.plain, origin.leaf):
            origin.take(tape, Outer(piece.right, piece.left))
        else:
            tape.defer(lambda: self._pull(tape, piece))

    def _pull(self, tape: GradientSink, piece: Piece) -> None:
        leaves, n = [origin.leaf for origin in self.origins], tape.rows
        if n * (self.plain.numel() + sum(leaf.numel() for leaf in leaves)) > _LARGE and is_single(self.plain):
            rows = self._row_sums(piece, n)
            for origin in self.origins:
                origin.take(tape, Pulled(self.plain, origin.leaf, piece, n, self._taps.collecting, rows))
            return
        gradients = piece.instantiate().to(self.plain.dtype)
        with full_precision(), self._taps.collecting():
            found = pulled(self.plain, leaves, gradients)
        for origin, gradient in zip(self.origins, found, strict=True):
            if gradient is not None:
                origin.take(tape, Explicit(gradient))

    def _row_sums(self, piece: Piece, n: int) -> RowSums | None:
        form = self.form
        if form is None or form.main is None or form.axis or form.degree > 1:
            return None
        return RowSums(piece, n, form.main) if RowSums.fits(self.plain, form.main) else None


class UnbatchedTensor(torch.Tensor):
    """A tensor without a batch axis that remembers where it comes from.

    It requires a gradient, so that code which torch does not let us follow (a custom autograd function, a scripted
    one) is found out when that gradient arrives.
    """

    value: Unbatched
    taps: Context
    path: str
    label: str

    @staticmethod
    def wrap(value: Unbatched, taps: Context, path: str, label: str) -> UnbatchedTensor:
        """Wrap a plain value of the module at ``path``."""
        tensor = torch.Tensor._make_subclass(UnbatchedTensor, value.plain.detach(), True)
        tensor.value, tensor.taps, tensor.path, tensor.label = value, taps, path, label
        with torch._C.DisableTorchFunctionSubclass():
            tensor.register_hook(_guard(taps, label))
        return tensor

    @property
    def plain(self) -> Tensor:
        """The ordinary tensor, with its graph."""
        return self.value.plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            return func(plain(args[0]), *args[1:], **kwargs)
        if func in SIMPLER and args and not isinstance(args[0], UnbatchedTensor):
            result = SIMPLER[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            operation, tensors = take_apart(func, args, kwargs)
            if operation.name == "__set__":
                raise CannotFollowError(args[0].label, "setting an attribute of a parameter", None)
            unbatched = next((tensor for tensor in tensors if isinstance(tensor, UnbatchedTensor)), None)
            if unbatched is not None and unbatched.taps.following and torch.is_grad_enabled():
                return unbatched.taps.follow(operation, tensors, args, kwargs)
            return operation.run([plain(tensor) for tensor in tensors])


_ABOUT = {getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")}
_ABOUT |= {getattr(torch.Tensor, name) for name in ("dim", "size", "numel", "__len__", "is_floating_point", "stride")}
"""Questions that concern no gradient."""


def plain(value: Any) -> Any:
    """Return the ordinary tensor behind an unbatched one; anything else as it is."""
    return value.plain if isinstance(value, UnbatchedTensor) else value


def _guard(taps: Context, label: str) -> Callable[[Tensor], None]:
    def refuse(gradient: Tensor) -> None:
        if not taps.is_collecting:
            raise RuntimeError(
                f"a gradient reached a parameter of {label} by a way that could not be followed example by example: "
                "a custom autograd function, a scripted function, or a value without a batch axis that the model "
                "returned and that entered the loss. Register a rule for the module (@dphero.register), or keep the "
                "value out of the loss."
            )

    return refuse


def _is_transpose(tensor: Tensor, leaf: Tensor) -> bool:
    """Tell whether a tensor is the transposed view of a matrix."""
    if leaf.dim() != 2 or tensor.dim() != 2 or tensor.data_ptr() != leaf.data_ptr():
        return False
    return (tensor.shape, tensor.stride()) == (leaf.T.shape, leaf.T.stride())
