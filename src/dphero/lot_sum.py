"""The clipped sum of one lot, physical batch by physical batch. Private: it never leaves without noise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dphero.clipping import Clipping, total
from dphero.tape import GradientBatch

__all__ = ["Diagnostics", "LotSum"]


@dataclass(frozen=True)
class Diagnostics:
    """What the data's owner may look at while tuning; private, outside every guarantee.

    Attributes:
        examples: Examples seen since the model was made private.
        clipped: Those whose gradient was scaled down.
        nonfinite: Those whose gradient was NaN or infinite, and which counted for nothing.
        mean_norm: Mean norm, in the whitened space, of the latest lot's gradients before clipping.
    """

    examples: int = 0
    clipped: int = 0
    nonfinite: int = 0
    mean_norm: float = 0.0


class LotSum:
    """Accumulates Σ_i w̄_i over the physical batches of a lot.

    Attributes:
        sums: Σ_i w̄_i in parameter space; a name that is missing stands for zero.
        count: The count that an adaptive clip rule releases along, over the whole lot (zero for an empty one);
            ``None`` for other rules.
        diagnostics: Notes on what was added.
    """

    def __init__(self, clipping: Clipping) -> None:
        self._clipping = clipping
        self.diagnostics = Diagnostics()
        self.clear()

    def clear(self) -> None:
        """Start a new lot."""
        self.sums: dict[str, Tensor] = {}
        self.count = None if self._clipping.count_noise is None else torch.zeros((), dtype=torch.float64)
        self._finite, self._norms = 0.0, 0.0  # number of finite gradients in this lot, and the sum of their norms

    def add(self, batch: GradientBatch, real: int, scale: float) -> None:
        """Clip and add one physical batch.

        Args:
            batch: Per-example gradients of the loss as the user computed it.
            real: How many of its first rows are examples; the rest is padding.
            scale: What turns those gradients into the gradients of each example's own loss: the number of
                rows where the loss was a mean over them.

        Raises:
            RuntimeError: If the model was called on another number of rows than the loader handed out; nothing
                is added then.
        """
        for name, norms in batch.square_norms.items():
            if len(norms) != batch.rows:
                raise RuntimeError(
                    f"parameter {name!r} has gradients of {len(norms)} rows, but the private loader handed out "
                    f"{batch.rows}: call the model on the whole batch, one row per example"
                )
        if real == 0 or not batch.pieces:
            return
        squares = {name: norms[:real] * scale**2 for name, norms in batch.square_norms.items()}
        weights, pieces = self._clipping.weights(squares), batch.pieces
        overall = total(squares)
        finite = overall.isfinite()
        bad = self._note(overall, finite, weights.values(), real)
        if bad or real < batch.rows:
            keep = torch.zeros(batch.rows, dtype=torch.bool, device=finite.device)
            keep[:real] = finite
            squares = {name: norms[finite] for name, norms in squares.items()}
            weights = {name: values[finite] for name, values in weights.items()}
            pieces = {name: piece.take(keep) for name, piece in pieces.items()}
        for name, piece in pieces.items():
            part = piece.weighted_sum(weights[name] * scale)
            self.sums[name] = self.sums[name].add_(part) if name in self.sums else part
        count = self._clipping.observe(squares)
        if count is not None:
            assert self.count is not None
            self.count = self.count.to(count.device) + count

    def _note(self, squares: Tensor, finite: Tensor, weights: Iterable[Tensor], real: int) -> int:
        """Bring the diagnostics up to date; return how many gradients are not finite. One wait for the device."""
        distinct = list({id(values): values for values in weights}.values())
        shrunk = torch.stack(distinct).amin(0) < 1
        norms = torch.where(finite, squares, 0).sqrt()
        numbers = torch.stack([finite.sum(), (shrunk & finite).sum(), norms.sum()]).to(torch.float64)
        good, clipped, norm = numbers.tolist()
        self._finite, self._norms = self._finite + good, self._norms + norm
        seen = self.diagnostics
        self.diagnostics = Diagnostics(
            examples=seen.examples + real,
            clipped=seen.clipped + int(clipped),
            nonfinite=seen.nonfinite + real - int(good),
            mean_norm=self._norms / max(self._finite, 1.0),
        )
        return real - int(good)
