"""CUDA graphs: the forward and backward pass of a private model, recorded once and replayed.

A private step makes some hundred small operations more than an ordinary one. On a GPU they take little time, but
starting each of them from Python takes longer than running it. A *recording* holds the operations of a whole pass,
taps, norms and sums included, and starts them all at once.

A recording reads and writes fixed places in memory. So inputs, output gradients, geometry and weights are copied there
before each replay, smaller lots are filled up with copies of their first row (of zero output gradient and zero
weight), and outputs are copied out. Lots vary: a pass is recorded at a few sizes, the largest first, all in the same
memory. Whatever else a pass depends on is compared before each replay, as far as it can be (:mod:`replay_guards`
says what cannot); where it changed, new recordings are made. A fresh recording is compared with the pass that it
should repeat before it is trusted.

Unasked, passes are recorded only where that is safe and pays: after some batches as usual, for a model that is called
once a batch and whose Python code leaves no trace of having run, where starting the operations takes longer than
running them, and if there is memory left for a pass as usual.

Nothing here knows of clipping or noise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dphero.batch_axis.plan import UnknownCallError
from dphero.cuda_graphs import pool
from dphero.cuda_graphs.autocast import Autocast, autocast_now, computing_in
from dphero.cuda_graphs.live_geometry import LiveGeometry
from dphero.cuda_graphs.pool import Pool
from dphero.cuda_graphs.recorded_pass import Pass, Setting, Shared
from dphero.cuda_graphs.replay_guards import PLAIN, CannotRecordError, ReplayConditions
from dphero.cuda_graphs.same_pass import require_bounded, require_equal
from dphero.functional.unbatched import CannotFollowError
from dphero.hooks.snapshot import ModelSnapshot
from dphero.numerics.compare import is_short
from dphero.numerics.generators import RandomState

if TYPE_CHECKING:
    from dphero.hooks.taps import Taps


logger = logging.getLogger(__name__)

_DEVICES = ("cuda",)
_MOST_RECORDINGS = 24
"""After so many recordings of one size the model is not one whose passes repeat."""
_STEP = 8
"""Recordings have a multiple of so many rows."""
_LEAST = 1 / 4
"""Batches up to this part of a recording run as usual: to fill them up would take longer than it saves."""
_FIRST = 2
"""Unasked, so many batches of each shape run as usual."""
_FEW, _SHORT = 20, 2
"""Unasked, this often recordings may be good for so few batches before something has changed."""
_BUSY = 0.5
"""Part of a pass in which Python has to be busy to start it, for recording to be tried."""
_WORTH = 0.95
"""Part of its time as usual that a replayed pass may take, to be worth its memory."""


@dataclass
class _Calls:
    """Calls of the model that differ in the number of rows alone, and in what their tensors hold."""

    structure: Any
    axes: Sequence[int | None]
    arguments: tuple[Any, ...]
    autocast: Autocast
    seen: int = field(default=0, compare=False)
    passes: list[Pass] = field(default_factory=list, compare=False)  # recorded; the smallest first


class Graphs:
    """Runs the passes of a tapped model as recordings, where that is possible.

    Args:
        taps: The model's.
        sizes: Tells how many rows recordings have room for (larger batches run as usual), once that is known.
        before: Called before a replay or a recording, which write over what earlier ones left.
        required: Whether to raise where passes cannot be recorded, instead of running as usual.

    Raises:
        ValueError: If the model is not on a GPU, and recordings are required.
    """

    def __init__(
        self,
        taps: Taps,
        sizes: Callable[[], Sequence[int]],
        *,
        before: Callable[[], None] = lambda: None,
        required: bool = True,
    ) -> None:
        for name, parameter in taps.module.named_parameters():
            if required and not can_be_recorded(parameter):
                raise ValueError(
                    f"cuda_graphs=True needs a model on a CUDA device, but {name!r} is on {parameter.device}; "
                    "move the model there before make_private, or leave cuda_graphs out"
                )
        self._taps, self._before, self._required = taps, before, required
        self._wanted, self._sizes = sizes, list[int]()
        self._known: list[_Calls] = []
        self._shared = Shared()
        self._conditions: ReplayConditions | None = None  # of the recordings, or of the first batches before them
        self._made = self._turn = self._short = 0
        self._asked_for_gain = required
        self._given_up = False

    def run(self, leaves: Sequence[Any], axes: Sequence[int | None], structure: Any, rows: int) -> Any:
        """Run one forward pass from a recording; return ``NotImplemented`` where it must run as usual.

        ``leaves`` are the arguments of the model, put together by ``structure``; ``axes`` says where each carries the
        examples.

        Raises:
            ValueError: If the model's passes cannot be recorded, and recordings are required.
        """
        if self._given_up or not self._knows_sizes() or not self._suits(leaves, axes):
            return NotImplemented
        if not _LEAST * self._sizes[0] < rows <= self._sizes[-1]:
            return NotImplemented  # a rare large lot, or the small rest of one that came in parts
        self._before()
        calls = self._calls(leaves, axes, structure)
        if not self._are_ready(calls, leaves, rows):
            if self._made:  # whatever was recorded is gone; a pass as usual needs the memory
                pool.give_back()
            return NotImplemented
        known = next(each for each in calls.passes if rows <= each.rows)
        return known.run(leaves, rows, self._taps.new_tape(rows, replayed=True))

    def _are_ready(self, calls: _Calls, leaves: Sequence[Any], rows: int) -> bool:
        """Make recordings where there are none that are up to date; return whether there are then."""
        try:
            if self._recordings and not self._up_to_date():
                self._require_seldom()
                self._forget()  # their memory is needed
            return bool(calls.passes) or self._record(calls, leaves, rows)
        except CannotRecordError as error:
            self._forget()
            if self._required:
                raise ValueError(
                    f"cuda_graphs=True: this model's passes cannot be recorded: {error}. Leave cuda_graphs out."
                ) from error
            self._give_up(str(error))
            return False

    def _knows_sizes(self) -> bool:
        if not self._sizes:
            self._sizes = sorted({-(-size // _STEP) * _STEP for size in self._wanted()})
        return bool(self._sizes)

    def _calls(self, leaves: Sequence[Any], axes: Sequence[int | None], structure: Any) -> _Calls:
        """Return the calls that this one is among."""
        found = _Calls(structure, tuple(axes), _arguments(leaves, axes), autocast_now())
        for known in self._known:
            if known == found:
                return known
        self._known.append(found)
        return found

    @property
    def _recordings(self) -> bool:
        return any(calls.passes for calls in self._known)

    def _up_to_date(self) -> bool:
        """Tell whether recordings do what the model would do now."""
        assert self._conditions is not None
        same = not self._shared.outgrown and self._conditions.still_hold()
        return same and self._live.follow(self._taps.geometry)

    def _require_seldom(self) -> None:
        """Raise ``CannotRecordError``, unasked, if recordings were good for few batches only, time and again."""
        self._short = self._short + 1 if self._shared.turn - self._turn < _FEW else 0
        self._turn = self._shared.turn
        if self._short > _SHORT and not self._required:
            raise CannotRecordError("attributes of its modules, or global variables, change every few batches")

    def _forget(self) -> None:
        for calls in self._known:
            calls.passes.clear()

    def _give_up(self, why: str, level: int = logging.INFO) -> None:
        self._known.clear()
        self._conditions, self._given_up = None, True
        logger.log(level, "The model's passes run one operation after another, without a recording: %s.", why)

    def _suits(self, leaves: Sequence[Any], axes: Sequence[int | None]) -> bool:
        """Tell whether a call is one that recordings are made for; any other runs as usual."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return (
            all(isinstance(leaf, Tensor) or type(leaf) in PLAIN for leaf in leaves)
            and can_be_recorded(*tensors)
            and not any(leaf.requires_grad for leaf in tensors)
            and all(axis in (0, None) for axis in axes)
            and not torch.is_anomaly_enabled()
        )

    # -- recording ----------------------------------------------------------------------------------------------

    def _record(self, calls: _Calls, leaves: Sequence[Any], rows: int) -> bool:
        """Record the pass of this call at all sizes; return whether that was done."""
        if not self._required and not self._may_record(calls):
            return False
        self._made += 1
        if self._made > _MOST_RECORDINGS:
            why = f"arguments or attributes of the model changed {_MOST_RECORDINGS} times"
            self._give_up(why, logging.WARNING)
            return False
        device = self._device(leaves)
        if not self._recordings:
            self._conditions = ReplayConditions(self._taps.module)
            self._conditions.require_no_hooks()
            self._pool, self._shared.outgrown = Pool(device), False
            self._live = _live(self._taps, device)
        setting = Setting(self._taps, self._live, calls.autocast, calls.structure, calls.axes, self._shared)
        try:
            with computing_in(()):
                calls.passes = self._recorded(setting, leaves, rows, device)
        except CannotRecordError:
            raise
        except Exception as error:
            if self._required and (
                isinstance(error, (UnknownCallError, CannotFollowError)) or not isinstance(error, RuntimeError)
            ):
                raise
            raise CannotRecordError(_reason(error)) from error
        return bool(calls.passes)

    def _device(self, leaves: Sequence[Any]) -> torch.device:
        """Return where everything lies; raise ``CannotRecordError`` if that is not one device."""
        module = self._taps.module
        tensors = [*module.parameters(), *module.buffers(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        places = {tensor.device for tensor in tensors}
        if len(places) > 1:
            raise CannotRecordError(f"its tensors are on {' and '.join(sorted(map(str, places)))}")
        return places.pop()

    def _may_record(self, calls: _Calls) -> bool:
        """Tell whether it is time to record, unasked."""
        tape = self._taps.tape
        if tape is not None and not tape.done:
            raise CannotRecordError("it is called more than once for a batch")
        if torch.are_deterministic_algorithms_enabled():
            raise CannotRecordError("deterministic algorithms are asked for, and recordings round in other ways")
        if len(self._known) > _MOST_RECORDINGS:
            raise CannotRecordError("its arguments change from batch to batch")
        calls.seen += 1
        if self._conditions is None:
            self._conditions = ReplayConditions(self._taps.module)
            self._conditions.require_no_hooks()
        if calls.seen <= _FIRST:
            return False
        if not self._made and not self._conditions.still_hold():
            raise CannotRecordError("attributes of its modules, or global variables, change from batch to batch")
        return True

    def _recorded(self, setting: Setting, leaves: Sequence[Any], rows: int, device: torch.device) -> list[Pass]:
        """Record a pass at all sizes; return none where it does not pay."""
        snapshot, usual = ModelSnapshot(self._taps.module), float("inf")
        if not self._asked_for_gain:
            with snapshot.restored_afterwards():
                trial = Pass(setting, rows, leaves)
                trial.fill(leaves, rows)
                trial.as_usual()
                usual, issued = pool.seconds(trial.as_usual, device)
                del trial
            if issued < _BUSY * usual:
                self._give_up(
                    f"the GPU is busy anyway (of {usual:.2g} s for a pass, Python takes {issued:.2g} s to start it)"
                )
                return []
        free, short = pool.free_memory(device), bool(setting.autocast) or is_short(*self._taps.module.parameters())
        made = [Pass(setting, size, leaves) for size in self._sizes]
        # as usual first, at all sizes: this also lets libraries do what they do at first use
        expected = []
        for each in made:
            each.fill(leaves, min(rows, each.rows))
            with snapshot.restored_afterwards():
                host = RandomState(snapshot.own_generators, besides=device.type)
                expected.append(each.as_usual())
                if not host.is_current:
                    raise CannotRecordError("its forward draws random numbers in Python or on the CPU")
            if self._conditions is None or not self._conditions.still_hold():
                raise CannotRecordError("its forward changes attributes of its modules, or global variables")
        for each, results in [*zip(made, expected, strict=True)][::-1]:  # the largest first: others fit in its memory
            with snapshot.restored_afterwards():
                each.record(self._pool)
            with snapshot.restored_afterwards():
                require_equal(results, each, short=short)
                require_bounded(each)
        if not self._asked_for_gain:
            self._require_gain(next(each for each in made if rows <= each.rows), usual, free, device, snapshot)
        return made

    def _require_gain(
        self, made: Pass, usual: float, free: float, device: torch.device, snapshot: ModelSnapshot
    ) -> None:
        """Raise ``CannotRecordError`` if a replayed pass is hardly faster, or leaves no memory for one as usual."""
        with snapshot.restored_afterwards():
            replayed, _ = pool.seconds(made.repeat, device)
        if replayed > _WORTH * usual:
            raise CannotRecordError(f"replayed, a pass takes {replayed:.2g} s, and {usual:.2g} s without")
        left = pool.free_memory(device)
        if left < free - left:
            raise CannotRecordError("it would leave too little memory for a pass as usual")
        self._asked_for_gain = True
        logger.info(
            "Passes are recorded at %s rows and replayed (%.2g s, replayed %.2g s); cuda_graphs=False prevents it.",
            ", ".join(map(str, self._sizes)),
            usual,
            replayed,
        )


def can_be_recorded(*tensors: Tensor) -> bool:
    """Tell whether tensors are on a device whose operations can be recorded."""
    return all(tensor.device.type in _DEVICES for tensor in tensors)


def _reason(error: BaseException) -> str:
    while error.__context__ is not None:  # the end of a recording that failed is an error of its own
        error = error.__context__
    return (str(error) or type(error).__name__).splitlines()[0]


def _live(taps: Taps, device: torch.device) -> LiveGeometry:
    try:
        return LiveGeometry(taps.geometry, device)
    except ValueError as error:
        raise CannotRecordError(str(error)) from error


def _arguments(leaves: Sequence[Any], axes: Sequence[int | None]) -> tuple[Any, ...]:
    """Return what must stay the same of the arguments: all but the number of rows, and what tensors hold."""
    return tuple(
        (leaf.shape if axis is None else leaf.shape[1:], leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
        for leaf, axis in zip(leaves, axes, strict=True)
    )
