"""The clipped sum of one lot, physical batch by physical batch. Private: it never leaves without noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dphero.clipping import Clipping
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
        slack = 1 + max(piece.rounding for piece in batch.pieces.values())
        stacked = torch.stack(list(batch.square_norms.values()))[:, :real] * (scale * slack) ** 2
        stacked.clamp_(min=0)  # a square below zero by rounding would make a weight of NaN
        finite = stacked.sum(0).isfinite()
        keep = None
        if real < batch.rows:
            keep = torch.arange(batch.rows, device=finite.device) < real
        # The sums are formed as if all were finite. Whether they are is asked last: on a GPU the answer waits for all
        # that was asked before.
        clipped = self._clip(batch, stacked, keep, scale)
        bad = self._note(stacked, finite, clipped[0], real)
        if bad == real:
            return
        if bad:
            keep = torch.zeros(batch.rows, dtype=torch.bool, device=finite.device)
            keep[:real] = finite
            clipped = self._clip(batch, stacked[:, finite], keep, scale)
        _, sums, count = clipped
        for name, part in sums.items():
            self.sums[name] = self.sums[name].add_(part) if name in self.sums else part
        if count is not None:
            assert self.count is not None
            self.count = self.count.to(count.device) + count

    def _clip(
        self, batch: GradientBatch, stacked: Tensor, keep: Tensor | None, scale: float
    ) -> tuple[Mapping[str, Tensor], dict[str, Tensor], Tensor | None]:
        """Return the weights, the clipped sums and the count of the examples in ``keep`` (``None``: of all)."""
        squares = dict(zip(batch.square_norms, stacked.unbind(0), strict=True))
        weights = self._clipping.weights(squares)
        scaled = _map(weights, lambda values: values * scale)
        sums = {
            name: (piece if keep is None else piece.take(keep)).weighted_sum(scaled[name])
            for name, piece in batch.pieces.items()
        }
        return weights, sums, self._clipping.observe(squares)

    def _note(self, stacked: Tensor, finite: Tensor, weights: Mapping[str, Tensor], real: int) -> int:
        """Bring the diagnostics up to date; return how many gradients are not finite. One wait for the device."""
        shrunk = torch.stack(list({id(values): values for values in weights.values()}.values())).amin(0) < 1
        norms = torch.where(finite, stacked.sum(0), 0).sqrt()
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


def _map(weights: Mapping[str, Tensor], function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Apply a function to each distinct tensor; parameters that shared one still do (pieces rely on it for speed)."""
    done = {id(values): function(values) for values in {id(values): values for values in weights.values()}.values()}
    return {name: done[id(values)] for name, values in weights.items()}
