"""CUDA graphs: the forward and backward pass of a private model, recorded once and replayed.

A private step makes some hundred small operations more than an ordinary one. On a GPU they take little time, but
starting each of them from Python takes longer than running it. A *recording* holds the operations of a whole pass,
taps, norms and sums included, and starts them all at once.

A recording reads and writes fixed places in memory. So inputs, output gradients, geometry and weights are copied there
before each replay, smaller lots are filled up with copies of their first row (of zero output gradient and zero
weight), and results are copied out. Whatever else a pass depends on (parameters' places, modes, plain attributes of
modules, arguments) is compared before each replay; where it changed, a new recording is made. A fresh recording is
compared with the pass that it should repeat before it is trusted.

What is not compared: attributes of other types (a list, a schedule object) that change from step to step, and plain
Python that runs in ``forward``. It ran once, when the recording was made.

Nothing here knows of clipping or noise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dphero.batch_axis.plan import UnknownCallError
from dphero.cuda_graphs.live_geometry import LiveGeometry
from dphero.cuda_graphs.recorded_pass import Pass, Results, refusal
from dphero.cuda_graphs.replay_guards import PLAIN, ReplayConditions
from dphero.functional.unbatched import CannotFollowError
from dphero.hooks.snapshot import ModelSnapshot
from dphero.numerics.compare import largest_gap

if TYPE_CHECKING:
    from dphero.hooks.taps import Taps

__all__ = ["Graphs"]

logger = logging.getLogger(__name__)

_DEVICES = ("cuda",)
_MOST_RECORDINGS = 24
"""After so many recordings the model is not one whose passes repeat."""
_STEP = 8
"""Recordings have a multiple of so many rows."""
_LEAST = 1 / 4
"""Batches up to this part of a recording run as usual: to fill them up would take longer than it saves."""
_TOLERANCE = 1e-2
"""Relative difference allowed between a recording and the pass that it repeats (TF32 and atomic sums round freely)."""


class Graphs:
    """Runs the passes of a tapped model as recordings, where that is possible.

    Buffers are made for ``rows`` rows; the few batches that are larger run as usual.

    Raises:
        ValueError: If the model is not on a GPU.
    """

    def __init__(self, taps: Taps, rows: int) -> None:
        for name, parameter in taps.module.named_parameters():
            if parameter.device.type not in _DEVICES:
                raise ValueError(
                    f"cuda_graphs needs a model on a CUDA device, but {name!r} is on {parameter.device}; "
                    "move the model there before make_private, or leave cuda_graphs out"
                )
        self._taps = taps
        self._rows = -(-rows // _STEP) * _STEP
        self._pass: Pass | None = None
        self._conditions: ReplayConditions  # of that pass
        self._made = 0

    def run(self, leaves: Sequence[Any], axes: Sequence[int | None], structure: Any, rows: int) -> Any:
        """Run one forward pass from a recording; return ``NotImplemented`` where it must run as usual.

        ``leaves`` are the arguments of the model, put together by ``structure``; ``axes`` says where each carries the
        examples.

        Raises:
            ValueError: If the model's passes cannot be recorded.
        """
        if self._made > _MOST_RECORDINGS or not self._suits(leaves, axes):
            return NotImplemented
        if not _LEAST * self._rows < rows <= self._rows:
            return NotImplemented  # a rare large lot, or the small rest of one that came in parts
        known, key = self._pass, (structure, _key(leaves, axes))
        if known is None or not self._repeats(known, key):
            self._pass = known = None  # its memory is needed
            self._made += 1
            if self._made > _MOST_RECORDINGS:
                logger.warning(
                    "cuda_graphs: arguments or attributes of the model changed %d times; it now runs without",
                    _MOST_RECORDINGS,
                )
                return NotImplemented
            known = self._pass = self._record(leaves, axes, structure, rows, key)
        return known.run(leaves, rows, self._taps.new_tape(rows, replayed=True))

    def _repeats(self, known: Pass, key: tuple[Any, ...]) -> bool:
        """Tell whether a recording does what the model would do now."""
        return known.key == key and self._conditions.still_hold() and known.geometry.follow(self._taps.geometry)

    def _suits(self, leaves: Sequence[Any], axes: Sequence[int | None]) -> bool:
        """Tell whether a call is one that recordings are made for; any other runs as usual."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return (
            all(isinstance(leaf, Tensor) or type(leaf) in PLAIN for leaf in leaves)
            and all(leaf.device.type in _DEVICES and not leaf.requires_grad for leaf in tensors)
            and all(axis in (0, None) for axis in axes)
            and not any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        )

    def _record(
        self,
        leaves: Sequence[Any],
        axes: Sequence[int | None],
        structure: Any,
        rows: int,
        key: tuple[Any, ...],
    ) -> Pass:
        self._conditions = before = ReplayConditions(self._taps.module)
        if before.has_hooks:
            raise ValueError(refusal("a submodule has forward hooks, whose code would not run"))
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        live = LiveGeometry(self._taps.geometry, device)
        made = Pass(self._taps, key, live, self._rows, structure, leaves, axes)
        made.fill(leaves, rows)
        snapshot = ModelSnapshot(self._taps.module)
        try:
            with snapshot.restored_afterwards():
                expected = made.as_usual()
            if not before.still_hold():
                raise ValueError(refusal("its forward changes attributes of its modules"))
            with snapshot.restored_afterwards():
                made.record()
            with snapshot.restored_afterwards():
                _require_equal(expected, made.repeated())
                _require_bounded(made)
        except (UnknownCallError, CannotFollowError):
            raise
        except RuntimeError as error:
            cause: BaseException = error
            while cause.__context__ is not None:  # the end of a recording that failed is an error of its own
                cause = cause.__context__
            raise ValueError(refusal(str(cause).splitlines()[0])) from error
        return made


def _require_equal(expected: Results, found: Results) -> None:
    """Raise ``ValueError`` if a recording does not repeat the pass that it was made of."""
    outs = [(x, y) for x, y in zip(expected.outs, found.outs, strict=True) if isinstance(x, Tensor)]
    for pair in (*outs, *zip(expected.norms, found.norms, strict=True)):
        _require_close([pair])
    _require_close([pair for pair in zip(expected.sums, found.sums, strict=True) if len(pair[0])])


def _require_close(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Raise ``ValueError`` if pairs differ by more than a part of what is largest in them (where both are finite)."""
    found = [largest_gap(first.double(), second.double()) for first, second in pairs]
    gap, scale = (max(each, default=0.0) for each in zip(*found, strict=True)) if found else (0.0, 0.0)
    if gap > _TOLERANCE * scale:
        raise ValueError(
            refusal(f"replayed, it computes something else (by {gap / max(scale, 1e-30):.2g} of its size)")
        )


def _require_bounded(made: Pass) -> None:
    """Raise ``ValueError`` if an example adds more to the sums than its norms say: the clip bound rests on that."""
    largest = made.norms.double().amax(1)
    for norms, added in made.shares():
        if bool((added - norms.double() > _TOLERANCE * largest).any()):
            raise ValueError(refusal("replayed, an example adds more to the sums than its norms say"))


def _key(leaves: Sequence[Any], axes: Sequence[int | None]) -> tuple[Any, ...]:
    """Return what must stay the same of the arguments: all but the number of rows, and what tensors hold."""
    return tuple(
        (leaf.shape if axis is None else leaf.shape[1:], leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
        for leaf, axis in zip(leaves, axes, strict=True)
    )
