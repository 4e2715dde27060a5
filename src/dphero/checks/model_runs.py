"""Forward passes of a model on a few rows, noted down: what its calls are, and where they carry the examples."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dphero.batch_axis.arguments import Arguments
from dphero.batch_axis.axis import compare_shapes
from dphero.batch_axis.plan import Axes, AxisPlan, AxisTrace, Call
from dphero.checks.tapped_pass import Objective, TappedPass, tapped_pass
from dphero.functional.unbatched import plain
from dphero.functional.vmap import vmapped
from dphero.hooks.snapshot import ModelSnapshot
from dphero.numerics.trees import tree_flatten

if TYPE_CHECKING:
    from dphero.hooks.taps import Taps

logger = logging.getLogger(__name__)

SIZES = (5, 7)
"""The two batch sizes at which a model is run."""
_PATIENCE = 2.0
"""Seconds after which a line in the log says what goes on."""
_ROUNDS = 64
"""How often it is run until what was assumed of its calls is confirmed."""


class MixedExamplesError(ValueError):
    """A model in which one example's output depends on another example."""

    inside: str | None = None
    """The path of the module inside whose code it was seen, if in none of the outputs so far."""


@dataclass
class RecordedRun:
    """A forward pass."""

    trace: AxisTrace  # its calls, and the outputs of its modules
    values: list[Tensor]  # the floating-point tensors that it returned
    written: dict[str, Tensor]  # what it wrote into parameters and buffers
    random: bool  # whether it drew random numbers

    def let_go(self) -> None:
        """Keep no tensor of what it computed."""
        self.trace.outputs.clear()
        self.values.clear()


class ModelRuns:
    """Runs a model on chosen rows of a batch, the arguments of one call; the model is as before afterwards."""

    def __init__(self, taps: Taps, batch: Arguments) -> None:
        self.taps, self.batch = taps, batch
        self.snapshot = ModelSnapshot(taps.module)
        self._hints: dict[Call, Axes] = {}
        self._started, self._told = time.monotonic(), False
        self._labels = {
            id(child): f"{path or 'the model'!r} ({type(child).__name__})"
            for path, child in taps.module.named_modules()
        }

    def forget(self) -> None:
        """Assume nothing of calls any more: a module is run in another way from now on."""
        self._hints.clear()

    def _tell(self) -> None:
        """Say, once, what takes so long."""
        if not self._told and time.monotonic() - self._started > _PATIENCE:
            self._told = True
            logger.info("Examining the model on a few rows of its first batch: once, before anything is trusted.")

    def record(self, rows: Sequence[int], *, training: bool = True, seed: int | None = None) -> RecordedRun:
        """Run the model on these rows and note all that is to be compared."""
        self._tell()
        trace = AxisTrace(len(rows), self._hints)

        def note(child: nn.Module, _: Any, out: Any) -> None:
            if any(hooked.rule is vmapped for hooked in self.taps.stack):
                return  # what counts is what comes out of such a module
            for leaf in tree_flatten(out)[0]:
                if isinstance(leaf, Tensor) and id(child) in self._labels:
                    trace.note(self._labels[id(child)], plain(leaf))

        hook = nn.modules.module.register_module_forward_hook(note)
        try:
            with self.snapshot.restored_afterwards(seed) as changes:
                if not training:
                    self.taps.module.eval()
                args, kwargs = self.batch.take(rows)
                out = self.taps.run(trace, None, args, kwargs)
                tensors = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
                if not tensors:
                    raise ValueError(
                        f"the model returns a {type(out).__name__}, and no tensor is found in it, so that it cannot be "
                        "examined. Return a tensor, or tuples, lists, dictionaries or dataclasses of them."
                    )
                note(self.taps.module, None, out)
        finally:
            hook.remove()
        values = [plain(tensor).detach() for tensor in tensors if tensor.is_floating_point()]
        return RecordedRun(trace, values, changes.state, changes.random)

    def tapped(
        self, plan: AxisPlan, rows: Sequence[int], objective: Objective = lambda outs: outs, *, training: bool = True
    ) -> TappedPass:
        """Run the model on these rows with its layers tapped, and back-propagate (:func:`tapped_pass`)."""
        self._tell()
        call = self.batch.take(rows)
        return tapped_pass(self.taps, plan, self.snapshot, call, len(rows), objective, training=training)

    def settle(self, mixed: list[list[int]]) -> tuple[dict[Call, Axes], RecordedRun, RecordedRun]:
        """Run at both sizes until what was assumed of every call is what the shapes say."""
        for _ in range(_ROUNDS):
            first, second = (self.record(rows) for rows in mixed)
            calls, agreed, misfit, inside = {}, True, "", None
            for call, seen in first.trace.calls.items():
                other = second.trace.calls.get(call)
                if other is None or len(other.shapes) != len(seen.shapes):
                    continue
                layouts = [compare_shapes(a, b, *SIZES) for a, b in zip(seen.shapes, other.shapes, strict=True)]
                fits = [layout for layout in layouts if layout is not None]
                if len(fits) < len(layouts):
                    shapes = ", ".join(
                        f"{tuple(a)} and {tuple(b)}" for a, b in zip(seen.shapes, other.shapes, strict=True)
                    )
                    inside = inside if misfit or not call[0][1] else call[0][0]
                    misfit = misfit or f"{seen.label}, {call[0][1] or 'output and input'}: {shapes}"
                    continue
                agreed &= all(
                    fit.axis == assumed.axis
                    for record in (seen, other)
                    for fit, assumed in zip(fits, record.assumed, strict=False)
                )
                calls[call] = tuple(
                    (len(shape), fit.axis, fit.fold > 1) for shape, fit in zip(seen.shapes, fits, strict=True)
                )
            if agreed and misfit:
                mixed_up = MixedExamplesError(
                    f"{misfit} at batch sizes {SIZES[0]} and {SIZES[1]}: these shapes do not carry the examples in "
                    "one axis. Such a model cannot be made private."
                )
                mixed_up.inside = inside
                raise mixed_up
            if agreed:
                return calls, first, second
            self._hints.update(calls)
            first.let_go()
            second.let_go()
        raise ValueError("the calls inside the model change from run to run, so that they could not be understood")
