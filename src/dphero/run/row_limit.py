"""How many rows a physical batch has at most: a number that is given, or one that is found in the first lots."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from dphero.run.memory import CudaMemory, memory_of

logger = logging.getLogger(__name__)

_ON_A_CPU = 256
"""On a CPU larger batches are hardly faster, and nobody tells how much memory may be taken."""
_FIRST = 4
"""Rows to begin with: enough to examine a model with."""
_FACTOR = 4
"""A size grows at most so much before it is measured again."""
_BATCHES = 2
"""So many batches of one size are measured."""
_WORTH = 1.1
"""It grows no more if it would grow by less; nor is one that is resumed given up for less."""
_SHARE, _SHARE_RECORDED = 0.8, 0.4
"""Part of the memory that a batch may take; a recording takes as much as the batch that it was made of once more."""
_AFTER_A_STEP = 4
"""Before the first step, room is left for so many tensors of each parameter: gradient, optimizer, noise."""
_MULTIPLE = 8
"""Larger sizes are a multiple of it."""


class RowLimit:
    """The most rows of a physical batch: a number that was given, and stays.

    Attributes:
        rows: The number; ``None`` for whole lots.
        settled: Whether it stays.
    """

    settled = True

    def __init__(self, rows: int | None) -> None:
        self.rows = rows

    def begin(self) -> None:
        """Called when a batch is handed out."""

    def note(self, rows: int, *, stepped: bool) -> None:
        """Called when the gradients of a batch have been summed: its rows, and whether there was a step before it."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a resumed run begins with, if anything."""
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Begin with that."""


class MeasuredRows(RowLimit):
    """As many rows as fit in memory: few at first, and more as the memory is known that batches take.

    With n rows a batch takes a + b n bytes: with m > n rows at most m / n times as many. As many rows as fit by this
    bound are the next size, but not more than some times this one, which is then measured too. Where a is not
    small, the bound is wide at first, and becomes close as m / n does. A size that ran is never taken back.

    Rows of a lot are clipped one by one, and added up: their number in a batch changes rounding, nothing else. Sizes
    follow from memory and from the numbers of rows alone.

    Args:
        memory: Measures it.
        most: Rows of the largest usual lot: with so many, lots come whole.
        share: Part of the memory that a batch may take.
        later: Bytes that will be taken from the first step on.
    """

    rows: int

    def __init__(self, memory: CudaMemory, most: int, *, share: float = _SHARE, later: int = 0) -> None:
        super().__init__(min(_FIRST, most))
        self._memory, self._most, self._share, self._later = memory, most, share, later
        self.settled = self.rows == most
        self._bytes = 0  # what a batch of so many rows takes, as far as is known
        self._examined = False  # in the first batch the model is examined, which takes memory of its own
        self._seen: list[tuple[int, int]] = []  # rows and bytes of batches of this size

    def begin(self) -> None:
        if not self.settled:
            self._memory.begin()

    def note(self, rows: int, *, stepped: bool) -> None:
        if self.settled or 2 * rows <= self.rows:  # the small rest of a lot, or a batch that was fetched before
            return
        if self._examined:
            self._seen.append((rows, max(1, self._memory.peak)))
        self._examined = True
        if len(self._seen) == _BATCHES:
            self._grow(stepped)
            self._seen = []

    def _grow(self, stepped: bool) -> None:
        rows, peak = max(self._seen)
        room = self._share * self._memory.room - (0 if stepped else self._later)
        wanted = min(int(room * rows / peak), _FACTOR * self.rows, self._most)
        if _MULTIPLE**2 <= wanted < self._most:
            wanted -= wanted % _MULTIPLE
        if wanted == self._most or wanted >= _WORTH * self.rows:
            self.rows, self.settled, self._bytes = wanted, wanted == self._most, peak * wanted // rows
        else:
            self.settled, self._bytes = stepped, peak  # before a step, less is left than there will be
        if self.settled:
            logger.info(
                'physical_batch_size="auto": lots come in batches of at most %d rows, which take about %.2g GiB.',
                self.rows,
                self._bytes / 2**30,
            )

    def state_dict(self) -> dict[str, Any] | None:
        return {"rows": self.rows, "bytes": self._bytes, "settled": self.settled}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Begin with the size of a saved run, unless there is less memory here than it takes."""
        if state is None:
            return
        self._memory.begin()
        if state["bytes"] <= _WORTH * self._share * self._memory.room:  # what is free differs a little each time
            self.rows, self._bytes = min(int(state["rows"]), self._most), int(state["bytes"])
            self.settled = bool(state["settled"]) or self.rows == self._most


def make_row_limit(
    asked: int | Literal["auto"] | None, most: int, parameters: Mapping[str, Tensor], *, recorded: bool
) -> RowLimit:
    """Return the limit that was asked for.

    Args:
        asked: ``physical_batch_size``.
        most: Rows of the largest usual lot.
        parameters: What is trained.
        recorded: Whether passes are certain to be recorded.

    Raises:
        ValueError: If it is to be found, and the model lies on several devices.
    """
    if asked != "auto":
        return RowLimit(asked)
    memory = memory_of(parameters.values())
    if memory is None:
        return RowLimit(min(most, _ON_A_CPU))
    later = _AFTER_A_STEP * sum(parameter.nbytes for parameter in parameters.values())
    return MeasuredRows(memory, most, share=_SHARE_RECORDED if recorded else _SHARE, later=later)
