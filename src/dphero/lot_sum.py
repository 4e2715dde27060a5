"""The clipped sum of one lot, physical batch by physical batch. Private: it never leaves without noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dphero.clipping import Clipping, total
from dphero.tape import GradientBatch

__all__ = ["Diagnostics", "LotSum"]


@dataclass
class Diagnostics:
    """What the data's owner may look at while tuning; private, outside every guarantee.

    Attributes:
        examples: Examples seen.
        clipped: Those that were clipped.
        nonfinite: Those whose gradient was NaN or infinite, and which counted for nothing.
        mean_norm: Mean norm in the whitened space of the last physical batch.
    """

    examples: int = 0
    clipped: int = 0
    nonfinite: int = 0
    mean_norm: float = 0.0


class LotSum:
    """Accumulates Σ_i w̄_i over the physical batches of a lot."""

    def __init__(self, clipping: Clipping) -> None:
        self._clipping = clipping
        self.diagnostics = Diagnostics()
        self.clear()

    def clear(self) -> None:
        """Start a new lot."""
        self.sums: dict[str, Tensor] = {}
        self.count: Tensor | None = None

    def add(self, batch: GradientBatch, real: int, scale: float) -> None:
        """Clip and add one physical batch.

        Args:
            batch: Per-example gradients of the loss as the user computed it.
            real: How many of its first rows are examples; the rest is padding.
            scale: What turns those gradients into the gradients of each example's own loss: the number of
                rows where the loss was a mean over them.
        """
        if real == 0 or not batch.pieces:
            return
        squares = {name: norms[:real] * scale**2 for name, norms in batch.square_norms.items()}
        pieces = batch.pieces
        overall = total(squares)
        finite = overall.isfinite()
        bad = int(real - finite.sum())
        if bad or real < batch.rows:
            keep = torch.zeros(batch.rows, dtype=torch.bool, device=finite.device)
            keep[:real] = finite
            squares = {name: norms[finite] for name, norms in squares.items()}
            pieces = {name: piece.take(keep) for name, piece in pieces.items()}
        weights = self._clipping.weights(squares)
        for name, piece in pieces.items():
            part = piece.weighted_sum(weights[name] * scale)
            self.sums[name] = self.sums[name].add_(part) if name in self.sums else part
        count = self._clipping.observe(squares, torch.ones_like(overall[finite]))
        if count is not None:
            self.count = count if self.count is None else self.count + count
        self._note(overall[finite], real, bad)

    def _note(self, squares: Tensor, real: int, bad: int) -> None:
        notes = self.diagnostics
        notes.examples += real
        notes.nonfinite += bad
        self._last = squares

    def summary(self) -> Diagnostics:
        """Return the diagnostics, brought up to date."""
        return self.diagnostics
