"""Taps: a model's layers report their input and output gradient while the user's own loop runs.

While a model is private, each module that owns trainable parameters (a *hooked module*) has its ``forward``
replaced, on the instance, by the rule of its layer family. A rule computes the same output from *detached*
parameters, so that autograd spends nothing on parameter gradients, and taps that output. All other code that
uses a parameter finds an :class:`~dphero.functional.unbatched.UnbatchedTensor` in its place. The model keeps its
class, its attributes and its ``state_dict``; copies of it are ordinary models; :meth:`Taps.detach` undoes everything.

Nothing here knows of clipping or noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dphero.batch_axis.axis import BatchAxis, arrange
from dphero.batch_axis.call_site import find_call_site
from dphero.batch_axis.plan import AxisLookup, AxisPlan, AxisTrace, Key, UnknownCallError
from dphero.functional.custom import custom_code_followed
from dphero.functional.dispatch import follow
from dphero.functional.operation import Operation
from dphero.functional.unbatched import ParameterOrigin, Unbatched, UnbatchedTensor, plain
from dphero.geometry.geometry import Geometry
from dphero.gradients.batch import GradientBatch, PieceMaker
from dphero.gradients.piece import Piece
from dphero.hooks.model_tables import ModelTables, written_between
from dphero.hooks.modules import HookedModule, Slot, eager, find_hooked_modules, replace_forward, swapped
from dphero.hooks.tape import Tape
from dphero.hooks.tapped_call import TappedCall
from dphero.numerics.trees import arguments_flatten, tree_map

Examine = Callable[["Taps", tuple[Any, ...], dict[str, Any], int], AxisPlan]
"""Examines a model on the arguments of one call that carries so many rows; raises if it cannot be made private."""

_ATTEMPTS = 8
"""How often a model that makes new calls is examined again before it is refused (it may drop layers at random)."""


class Replay(Protocol):
    """Runs recorded passes of a model instead of its code."""

    def run(self, leaves: Sequence[Any], axes: Sequence[int | None], structure: Any, rows: int) -> Any:
        """Run one forward pass; return ``NotImplemented`` where the model itself must run."""


class Taps:
    """Attaches rules to the hooked modules of a model and opens a tape for each physical batch.

    Args:
        module: The model.
        parameters: Name to parameter, of those whose gradients are wanted.
        geometry: Name to geometry in which norms are taken; read anew for each batch.
        rows: Returns the number of rows of the physical batch in hand, or raises if there is none.
        consume: Receives the gradients of each physical batch when its backward pass has finished.
        entered: Sees what the model is called with; the model runs inside the context that it returns.
        returned: Sees what the model returns, and may put something else in its place.
        called: Sees the arguments that it was called with, before that.
        examine: Called for the first batch, and whenever the model does what it had not done before.
        replay: Makes what runs recorded passes, if any are to be recorded.

    Attributes:
        plan: What was learned about where each call carries the examples.
        following: Whether a forward pass is being tapped.
        stack: The hooked modules that are running, one inside the other.
        is_paused: Whether the model runs untapped.
        is_collecting: Whether gradients of unbatched values are being carried back to their parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        geometry: Callable[[], Mapping[str, Geometry]],
        rows: Callable[[], int],
        consume: Callable[[GradientBatch], None],
        examine: Examine,
        entered: Callable[..., AbstractContextManager[None]] = lambda *arguments: nullcontext(),
        returned: Callable[[Any], Any] = lambda out: out,
        called: Callable[[tuple[Any, ...], dict[str, Any]], None] = lambda args, kwargs: None,
        replay: Callable[[Taps], Replay] | None = None,
    ) -> None:
        self.module = module
        self._geometry, self._rows, self._consume, self._returned = geometry, rows, consume, returned
        self._examine, self._entered, self._called = examine, entered, called
        self.plan: AxisPlan | None = None
        self.following = self.is_paused = self.is_collecting = False
        self.tape: Tape | None = None
        self._axis_lookup: AxisLookup | None = None
        self.stack: list[HookedModule] = []
        self._unbatched: dict[int, UnbatchedTensor] = {}
        self._replay = None if replay is None else replay(self)
        self.hooked_modules = find_hooked_modules(module, parameters)
        self._names = {
            id(p): (hooked.names[local], hooked)
            for hooked in reversed(self.hooked_modules)
            for local, p in hooked.parameters.items()
        }
        self._slots = [
            (child._parameters, local)
            for child in module.modules()
            for local, parameter in child._parameters.items()
            if parameter is not None and (parameter.requires_grad or id(parameter) in self._names)
        ]
        # those that require a gradient now and are not trained are constants
        self._known = {id(table[local]): table[local] for table, local in self._slots}
        self._tables = ModelTables(module)
        forwards = {hooked.module: self._hooked_forward(hooked) for hooked in self.hooked_modules}
        self.root_forward = forwards.get(module, module.forward)
        forwards[module] = eager(self._run_root)
        self._undo = [replace_forward(child, forward) for child, forward in forwards.items()]

    # -- the user's side ------------------------------------------------------------------------------

    def detach(self) -> None:
        """Give every module its own ``forward`` back."""
        while self._undo:
            self._undo.pop()()
        self._replay = None
        self.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the model run without being tapped: its parameters then have ordinary gradients."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def clear(self) -> None:
        """Forget forward passes that no backward pass followed."""
        self.tape = None

    # -- forward --------------------------------------------------------------------------------------

    @property
    def _active(self) -> bool:
        return not self.is_paused and self.module.training and torch.is_grad_enabled()

    def _run_root(self, *args: Any, **kwargs: Any) -> Any:
        if not self._active or self.following:
            return self.root_forward(*args, **kwargs)
        self._require_known_parameters()
        with self._entered(args, kwargs):
            out = self._run_watching_buffers(args, kwargs)
        return self._returned(out)

    def _run_watching_buffers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self._tables.buffers()
        out = self._run_tapped(args, kwargs, self._rows())
        after = self._tables.buffers()
        if after != before:
            assert self.plan is not None
            if not written_between(before, after) <= self.plan.written:  # not so when the model was examined
                self.plan = self.plan.joined(self._examine(self, args, kwargs, self._rows()))
        self._called(args, kwargs)
        return out

    def _run_tapped(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> Any:
        leaves, structure = arguments_flatten(args, kwargs)
        if self.plan is None or not self.plan.examples_independent:
            self.plan = self._examine(self, args, kwargs, rows)
        elif self.plan.axes(structure, leaves, rows) is None:
            self.plan = self.plan.joined(self._examine(self, args, kwargs, rows))
        for attempt in range(_ATTEMPTS + 1):
            try:
                if self._replay is not None:
                    axes = self.plan.axes(structure, leaves, rows)
                    assert axes is not None
                    out = self._replay.run(leaves, axes, structure, rows)
                    if out is not NotImplemented:
                        return out
                tape = self.tape
                if tape is None or tape.done or tape.rows != rows or tape.replayed:
                    tape = self.new_tape(rows)
                out = self.run(self.plan, tape, args, kwargs)
                return plain(out) if isinstance(out, Tensor) else tree_map(plain, out)
            except UnknownCallError as error:
                if attempt == _ATTEMPTS:
                    raise RuntimeError(
                        f"{error}. A private model must make the same calls for every batch of one shape."
                    ) from None
                self.plan = self.plan.joined(self._examine(self, args, kwargs, rows))
        raise AssertionError

    def _require_known_parameters(self) -> None:
        """Refuse a parameter that was added, exchanged or unfrozen since: its gradient would be the plain one."""
        for parameter in self._tables.parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                name = next(name for name, other in self.module.named_parameters() if other is parameter)
                raise RuntimeError(
                    f"parameter {name!r} was not there, or frozen, when the model was made private: its gradient would "
                    "have no noise. Freeze it (requires_grad_(False)), or detach() the engine and make the model "
                    "private anew."
                )

    def new_tape(self, rows: int, *, replayed: bool = False) -> Tape:
        """Open the tape of a physical batch; no backward pass through an earlier one counts any more."""

        def finished(batch: GradientBatch) -> None:
            if tape is not self.tape:
                raise RuntimeError(
                    "this backward pass belongs to an earlier batch or an earlier call of the model; call backward() "
                    "before the next batch is drawn"
                )
            self._consume(batch)

        self.tape = tape = Tape(rows, self._geometry(), finished, replayed=replayed)
        return tape

    def run(self, axis_lookup: AxisLookup, tape: Tape | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward pass in which the hooked modules are tapped and their parameters are unbatched values."""
        before = (self._axis_lookup, self.tape)
        self._axis_lookup, self.tape, self.following = axis_lookup, tape, True
        axis_lookup.begin()
        try:
            with swapped((*slot, self._stand_in(slot)) for slot in self._slots), custom_code_followed():
                out = self.root_forward(*args, **kwargs)
            axis_lookup.end()
            return out
        finally:
            self._axis_lookup, self.tape, self.following = *before, False
            self.stack.clear()

    def _hooked_forward(self, hooked: HookedModule) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.following:
                self.stack.append(hooked)
                out = hooked.rule(TappedCall(self, hooked), *args, **kwargs)
                self.stack.pop()
                return out
            if not self._active:
                return hooked.original(*args, **kwargs)
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    f"{hooked.label} was called again during the backward pass, by gradient checkpointing of another "
                    "kind than torch.utils.checkpoint's. It would save no memory in private training, which keeps the "
                    "input of every layer: switch it off, and lower physical_batch_size to save memory."
                )
            raise RuntimeError(
                f"{hooked.label} was called by itself while the model is private. Call the whole model, so "
                "that each example's gradient is complete, or use `with engine.paused():` for other data."
            )

        return forward

    def _stand_in(self, slot: Slot) -> Tensor:
        """Return what the model's code sees in place of a parameter: an unbatched value, or a constant."""
        parameters, local = slot
        parameter = parameters[local]
        assert parameter is not None
        if id(parameter) not in self._names:
            return parameter.detach()
        unbatched = self._unbatched.get(id(parameter))
        if (
            unbatched is None
            or unbatched.plain.data_ptr() != parameter.data_ptr()
            or unbatched.plain.dtype != parameter.dtype
        ):
            name, hooked = self._names[id(parameter)]
            origin = ParameterOrigin(name, parameter, self, hooked.label)
            unbatched = UnbatchedTensor.wrap(Unbatched(origin.leaf, [origin], self), self, hooked.path, hooked.label)
            self._unbatched[id(parameter)] = unbatched
        return unbatched

    # -- taps -----------------------------------------------------------------------------------------

    def watch(
        self,
        out: Tensor,
        layouts: Sequence[BatchAxis],
        make: PieceMaker,
        saved: tuple[Any, ...],
        label: str,
        *,
        names: Mapping[str, str] | None = None,
        split: bool = False,
    ) -> None:
        """Have the gradient of ``out`` turned into pieces.

        Args:
            out: The output.
            layouts: Its layout, and those of the tensors in ``saved``.
            make: See :meth:`TappedCall.tap`.
            saved: What ``make`` needs besides.
            label: Who asks, for messages.
            names: Which parameters the pieces belong to.
            split: See :meth:`TappedCall.tap`.
        """
        assert self.tape is not None
        rows, layout = self.rows, layouts[0]
        if not split and any(other != layout for other in layouts):
            raise ValueError(
                f"{label}: its input and its output carry the examples in different ways ({layouts}). A rule for such "
                "a module must take its tensors example by example: call.tap(..., split=True)."
            )

        def arranged(*values: Any) -> dict[str, Piece]:
            if split:
                return make(*arrange(values, layouts, rows))
            pieces = make(*arrange(values, layouts))
            return pieces if layout.fold == 1 else {name: piece.folded(layout.fold) for name, piece in pieces.items()}

        self.tape.watch(out, names or {}, arranged, saved, label)

    # -- what unbatched values need ------------------------------------------------------------------------

    @property
    def geometry(self) -> Mapping[str, Geometry]:
        """The geometry in which the norms of the batch in hand are taken."""
        return self._geometry()

    @property
    def axis_lookup(self) -> AxisLookup:
        """What the forward pass in hand consults at each call."""
        assert self._axis_lookup is not None
        return self._axis_lookup

    def key(self, path: str, what: str) -> Key:
        """Return the key of the call that is being made: whose parameters, which operation, where in the code."""
        return path, what, find_call_site(Taps.run.__code__)

    @property
    def rows(self) -> int:
        """The number of rows of the batch that is running."""
        if self.tape is not None:
            return self.tape.rows
        assert isinstance(self._axis_lookup, AxisTrace)
        return self._axis_lookup.rows

    def follow(self, operation: Operation, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Run an operation on unbatched values."""
        return follow(self, operation, tensors, args, kwargs)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Carry gradients of unbatched values back to their parameters."""
        self.is_collecting = True
        try:
            yield
        finally:
            self.is_collecting = False
