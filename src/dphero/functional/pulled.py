"""Per-example gradients of a parameter, from those of a value that is computed from it.

A value v = f(p) without a batch axis (standardised weights, a product of low-rank matrices) has per-example gradients
ĝ_i, and those of the parameter are g_i = Jᵀ ĝ_i. That is linear: so the weighted sum Σ w_i g_i = Jᵀ Σ w_i ĝ_i takes
one backward pass through f. Norms take one for each example, some examples at a time, and nothing is kept of them.
Where f keeps rows apart in a simple way, one pass of three gradients tells all of Jᵀ (:mod:`dphero.row_form.norms`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from dphero.geometry.geometry import Geometry
from dphero.gradients.piece import Piece, by_example, whitened_squares
from dphero.numerics.compare import distinct_numbers
from dphero.numerics.precision import at_least_single, full_precision, matmul_tf32
from dphero.row_form.jacobian import ROUNDINGS, RowMap, row_map
from dphero.row_form.norms import pulled_square_norms
from dphero.row_form.row_sums import RowSums

_CPU_BUFFER, _GPU_BUFFER = 1 << 21, 1 << 25
"""Elements of gradients to handle at a time; what they are computed from takes some times as much."""


def is_single(value: Tensor) -> bool:
    """Tell whether a backward pass to what a value was computed from rounds no more than float32 does.

    One that goes through a shorter format (autocast) rounds a sum much more than each of what it is a sum of.
    """
    waiting, seen = [value.grad_fn], {value.grad_fn}
    while waiting:
        node: Any = waiting.pop()
        if any(each.dtype != at_least_single(each.dtype) for each in node._input_metadata):
            return False
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return True


def pulled(value: Tensor, leaves: Sequence[Tensor], gradients: Tensor) -> list[Tensor | None]:
    """Return Jᵀ ĝ_i of each leaf for each ĝ_i of ``gradients``; ``None`` where the value does not depend on it."""
    try:
        return list(
            torch.autograd.grad(value, leaves, gradients, is_grads_batched=True, retain_graph=True, allow_unused=True)
        )
    except RuntimeError:  # an operation that vmap does not know
        rows = [
            torch.autograd.grad(value, leaves, gradient, retain_graph=True, allow_unused=True) for gradient in gradients
        ]
        return [None if parts[0] is None else torch.stack(parts) for parts in zip(*rows, strict=True)]


class Pulled(Piece):
    """The per-example gradients g_i = Jᵀ ĝ_i of a leaf.

    What f lets through may be much less than what goes in, and the sum rounds where all are added up: the norms leave
    room for what rounding can make of each example's share.

    Args:
        value: v, with its graph.
        leaf: p.
        inner: The per-example gradients ĝ_i.
        n: Their number.
        collecting: Inside it, gradients may reach the leaf.
        rows: What norms need of the ĝ_i if v has row form.
    """

    def __init__(
        self,
        value: Tensor,
        leaf: Tensor,
        inner: Piece,
        n: int,
        collecting: Callable[[], AbstractContextManager[None]],
        rows: RowSums | None = None,
    ) -> None:
        self._rows = rows
        self._map: RowMap | None = None  # known once norms were asked for
        self._value, self._leaf, self._inner, self._n, self._collecting = value, leaf, inner, n, collecting
        self.shape = leaf.shape

    @property
    def rounding(self) -> float:  # type: ignore[override]
        """See :class:`~dphero.gradients.piece.Piece`."""
        return self._inner.rounding

    def instantiate(self) -> Tensor:
        return self._pull(self._inner.instantiate())

    def square_norms(self, geometry: Geometry) -> Tensor:
        size = max(self._value.numel(), self._leaf.numel())
        count = max(1, (_CPU_BUFFER if self._value.device.type == "cpu" else _GPU_BUFFER) // size)
        if self._rows is not None:
            if self._map is None:
                self._map = row_map(self._rows.span, self._pull, self._value.shape)
            return pulled_square_norms(self._rows, self._map, geometry, count)
        probe = distinct_numbers(self._value).to(self._value.dtype).unsqueeze(0)
        room = self._pull(probe).abs().amax() * (ROUNDINGS * torch.finfo(probe.dtype).eps / geometry.smallest)
        squares = []
        for gradients in self._inner.some_at_a_time(self._n, count):
            rounds = torch.linalg.vector_norm(by_example(gradients), dim=1).mul_(room)
            squares.append(whitened_squares(self._pull(gradients), geometry).sqrt_().add_(rounds).square_())
        return torch.cat(squares)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self._inner.weighted_sum(weights)
        if self._map is None:
            return self._pull(total.unsqueeze(0))[0]
        return self._map.pull_sum(total).to(self._leaf.dtype).view(self.shape)

    def take(self, keep: Tensor | slice) -> Piece:
        n = len(range(self._n)[keep]) if isinstance(keep, slice) else int(keep.sum())
        inner = self._inner.take(keep)
        rows = None if self._rows is None else RowSums(inner, n, self._rows.main)
        part = Pulled(self._value, self._leaf, inner, n, self._collecting, rows)
        part._map = self._map  # which norms and sums must share
        return part

    def _pull(self, gradients: Tensor) -> Tensor:
        with full_precision(), matmul_tf32(gradients, allow=False), self._collecting():
            (found,) = pulled(self._value, [self._leaf], gradients.to(self._value.dtype).contiguous())
        return gradients.new_zeros(len(gradients), *self.shape) if found is None else found
