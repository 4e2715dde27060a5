"""The clipped sum of one lot, physical batch by physical batch. Private: it never leaves without noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dphero.geometry.geometry import Geometry
from dphero.gradients.batch import GradientBatch
from dphero.mechanism.clipped_sum import ClippedSum
from dphero.mechanism.clipping import Clipping, SquareNorms
from dphero.numerics.one_piece import room_for
from dphero.numerics.transfer import Fetched


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
    """Accumulates Σ_i w̄_i / B over the physical batches of a lot.

    What was added last is *settled* when someone looks: only then is it known whether all its gradients are finite, and
    on a GPU that has to be waited for. The sums of a recorded pass lie where the next one writes: whoever runs it has
    to settle before.
    """

    def __init__(self, clipping: Clipping) -> None:
        self._clipping = clipping
        self._diagnostics = Diagnostics()
        self._added: _Added | None = None
        self.clear()

    def clear(self) -> None:
        """Start a new lot."""
        self.settle()
        self._sums: dict[str, Tensor] = {}
        self._clipped_to: tuple[float, float, Mapping[str, Geometry] | None] | None = None  # C, B and A of the lot
        self._count = None if self._clipping.count_noise is None else torch.zeros((), dtype=torch.float64, device="cpu")
        self._marks: list[Tensor] = []
        self._finite, self._norms = 0.0, 0.0  # number of finite gradients in this lot, and the sum of their norms

    def finish(self, divisor: float = 1.0) -> ClippedSum:
        """Give away the sum of the whole lot, with the bound and the geometry it was clipped by.

        It holds until the next recorded pass: what such a pass left of the last batch is not copied for a release that
        follows at once.

        Args:
            divisor: B, for a lot in which there is nobody.
        """
        self._settle(copied=False)
        bound, divided_by, geometry = self._clipped_to or (self._clipping.norm, divisor, None)
        sums, self._sums = self._sums, {}
        return ClippedSum(
            sums, bound=bound, geometry=geometry, divisor=divided_by, count=self._count, marks=self._marks
        )

    @property
    def sums(self) -> dict[str, Tensor]:
        """Σ_i w̄_i / B in parameter space; a name that is missing stands for zero."""
        self.settle()
        return self._sums

    @property
    def count(self) -> Tensor | None:
        """The count over the whole lot that an adaptive clip rule releases along (0 if it is empty), or ``None``."""
        self.settle()
        return self._count

    @property
    def diagnostics(self) -> Diagnostics:
        """Notes on what was added."""
        self.settle()
        return self._diagnostics

    def add(self, batch: GradientBatch, real: int, scale: float, divisor: float = 1.0) -> None:
        """Clip and add one physical batch.

        Args:
            batch: Per-example gradients of the loss as the user computed it.
            real: How many of its first rows are examples; the rest is padding.
            scale: What turns those gradients into the gradients of each example's own loss: the number of
                rows where the loss was a mean over them.
            divisor: B. It costs nothing to divide here, where each example gets its weight.

        Raises:
            RuntimeError: If the model was called on another number of rows than the loader handed out, or if bound,
                divisor or geometry are others than in this lot's earlier batches; nothing is added then.
        """
        for name, norms in batch.square_norms.items():
            if norms.shape[0] != batch.rows:
                raise RuntimeError(
                    f"parameter {name!r} has gradients of {len(norms)} rows, but the private loader handed out "
                    f"{batch.rows}: call the model on the whole batch, one row per example"
                )
        self.settle()
        if real == 0 or not batch.pieces:
            return
        self._require_same_lot(divisor, batch.geometry)
        slack = 1 + max(piece.rounding for piece in batch.pieces.values())
        stacked = batch.stacked_norms()[:, :real] * (scale * slack) ** 2
        finite = _are_finite(stacked)  # before the next line, which would make a 0 of minus infinity
        stacked.clamp_(min=0)  # a square below zero by rounding would make a weight of NaN
        keep = None
        if real < batch.rows:
            keep = torch.arange(batch.rows, device=finite.device) < real
        # The sums are formed as if all were finite. Whether they are is asked before: on a GPU, reading the answer then
        # waits for the norms alone, and the sums are computed while Python goes on. On a CPU the answer is there.
        squares, weights = self._weigh(batch, stacked)
        reading = Fetched([_numbers(squares.total, finite, weights)])
        factor = scale / divisor
        final = reading.is_here and float(reading.arrived()[0][0]) == real
        sums = _sums(batch, weights, keep, factor, final=final)
        self._added = _Added(batch, real, factor, stacked, finite, squares, reading, sums)

    def _require_same_lot(self, divisor: float, geometry: Mapping[str, Geometry] | None) -> None:
        """Refuse a batch that is clipped otherwise than those before it: one noise must cover them all."""
        now = (self._clipping.norm, divisor, geometry)
        if self._clipped_to is None:
            self._clipped_to = now
        elif self._clipped_to[:2] != now[:2] or self._clipped_to[2] is not geometry:
            raise RuntimeError("bound, divisor or geometry changed within a lot: its noise would not cover its sum")

    def settle(self) -> None:
        """Take the batch that was added last into the lot, less what is not finite; its gradients may then go."""
        self._settle(copied=True)

    def _settle(self, *, copied: bool) -> None:
        """Do so; if sums need not be copied, some may lie where the next recorded pass writes."""
        if self._added is None:
            return
        added, self._added = self._added, None
        bad = self._note(added.reading, added.real)
        if bad == added.real:
            return
        squares, sums, lent = added.squares, added.sums, added.batch.recorded and added.real == added.batch.rows
        if bad:
            keep = torch.zeros(added.batch.rows, dtype=torch.bool, device=added.finite.device)
            keep[: added.real] = added.finite
            squares, weights = self._weigh(added.batch, added.stacked[:, added.finite])
            sums, lent = _sums(added.batch, weights, keep, added.factor, final=True), False
        new = {name: part for name, part in sums.items() if name not in self._sums}
        for name in sums.keys() - new.keys():
            self._sums[name].add_(sums[name])
        self._sums.update(_copies(new) if new and lent and copied else new)
        count = self._clipping.observe(squares)
        if count is not None:
            assert self._count is not None
            self._count = self._count.to(count.device) + count

    def _weigh(self, batch: GradientBatch, stacked: Tensor) -> tuple[SquareNorms, Mapping[str, Tensor]]:
        """Return ‖w_i‖² and the weights of some examples, by parameter."""
        squares = SquareNorms(batch.square_norms, stacked)
        return squares, self._clipping.weights(squares)

    def _note(self, reading: Fetched, real: int) -> int:
        """Bring the diagnostics up to date; return how many gradients are not finite."""
        numbers = reading.arrived()[0]
        self._marks.append(numbers)
        good, clipped, norm, _ = numbers.tolist()
        self._finite, self._norms = self._finite + good, self._norms + norm
        seen = self._diagnostics
        self._diagnostics = Diagnostics(
            examples=seen.examples + real,
            clipped=seen.clipped + int(clipped),
            nonfinite=seen.nonfinite + real - int(good),
            mean_norm=self._norms / max(self._finite, 1.0),
        )
        return real - int(good)


@dataclass(frozen=True, eq=False)
class _Added:
    """A batch whose gradients may not all be finite."""

    batch: GradientBatch
    real: int  # how many of its first rows are examples
    factor: float  # what they are multiplied by in the sums, besides their weights
    stacked: Tensor  # ‖w_i‖² of these, a row for each parameter
    finite: Tensor  # which of them are finite
    squares: SquareNorms  # ‖w_i‖² by parameter
    reading: Fetched  # what `_numbers` found
    sums: dict[str, Tensor]  # the clipped sums, right if all are finite


def _are_finite(stacked: Tensor) -> Tensor:
    """Tell which examples have finite norms alone (in two operations; ``isfinite`` takes four on a GPU)."""
    return stacked.sum(0).abs() < math.inf


def _numbers(total: Tensor, finite: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return how many gradients are finite, how many of these are scaled down, and sums of their norms and weights.

    The weights tell a lot from the same one under another clip rule.
    """
    distinct = list({id(values): values for values in weights.values()}.values())
    least = weighed = distinct[0]
    if len(distinct) > 1:
        stacked = torch.stack(distinct)
        least, weighed = stacked.amin(0), stacked.sum(0)
    each = torch.stack([finite, least < 1, total.sqrt(), weighed])
    return torch.where(finite, each, 0).sum(1, dtype=torch.float64)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    copies = room_for(tensors.values())
    torch._foreach_copy_(copies, list(tensors.values()))
    return dict(zip(tensors, copies, strict=True))


def _sums(
    batch: GradientBatch, weights: Mapping[str, Tensor], keep: Tensor | None, factor: float, *, final: bool
) -> dict[str, Tensor]:
    """Return ``factor`` times the clipped sums of the examples in ``keep`` (``None``: of all)."""
    return batch.weighted_sums(_map(weights, lambda values: values * factor), keep, final=final)


def _map(weights: Mapping[str, Tensor], function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Apply a function to each distinct tensor; parameters that shared one still do (pieces rely on it for speed)."""
    done = {id(values): function(values) for values in {id(values): values for values in weights.values()}.values()}
    return {name: done[id(values)] for name, values in weights.items()}
