"""Whether a recording does what the pass does that it was made of: compared before it is trusted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dphero.cuda_graphs.recorded_pass import Pass, Results
from dphero.cuda_graphs.replay_guards import CannotRecordError
from dphero.numerics.compare import largest_gap

_TOLERANCE = 1e-2
"""Relative difference allowed between a recording and the pass that it repeats (TF32 and atomic sums round freely)."""
_SHORT_TOLERANCE = 0.1
"""The same in bfloat16 and float16, where a model may choose other operations while it is recorded (masks, say)."""
_SOME = 1 << 20
"""So many numbers are compared at a time: copies of all of a language model's logits would take memory."""


def require_equal(expected: Results, made: Pass, *, short: bool) -> None:
    """Raise ``CannotRecordError`` if a recording does not repeat the pass that it was made of, as far as that rounds.

    ``short`` tells whether it computes in a format shorter than float32. The outputs that are expected are forgotten:
    they take memory.
    """
    slack = _SHORT_TOLERANCE if short else _TOLERANCE
    made.repeat_forward()
    for pair in zip(expected.outs, made.outs, strict=True):
        if isinstance(pair[0], Tensor):
            _require_close([pair], slack)
    expected.outs.clear()
    made.repeat_backward()
    for pair in zip(expected.norms, made.norms, strict=True):
        _require_close([pair], slack)
    _require_close([pair for pair in zip(expected.sums, made.added, strict=True) if len(pair[0])], slack)


def _require_close(pairs: Sequence[tuple[Tensor, Tensor]], slack: float) -> None:
    """Raise if pairs differ by more than a part of what is largest in them (where both are finite)."""
    found = [
        largest_gap(one, two)
        for first, second in pairs
        for one, two in zip(first.reshape(-1).split(_SOME), second.reshape(-1).split(_SOME), strict=True)
    ]
    gap, scale = (max(each, default=0.0) for each in zip(*found, strict=True)) if found else (0.0, 0.0)
    if gap > slack * scale:
        raise CannotRecordError(f"replayed, it computes something else (by {gap / max(scale, 1e-30):.2g} of its size)")


def require_bounded(made: Pass) -> None:
    """Raise ``CannotRecordError`` if an example adds more to the sums than its norms say: else it is not clipped."""
    largest = made.norms.double().amax(1)
    for norms, added in made.shares():
        if bool((added - norms.double() > _TOLERANCE * largest).any()):
            raise CannotRecordError("replayed, an example adds more to the sums than its norms say")
