"""One piece from several: layers that are called more than once, and parameters that layers share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dphero.geometry.geometry import Geometry
from dphero.gradients.outer import Outer
from dphero.gradients.piece import Explicit, Piece, whitened, whitened_squares
from dphero.gradients.rows import Rows
from dphero.numerics.products import product, rounded_weights


def combine(pieces: Sequence[Piece]) -> Piece:
    """Return one piece whose per-example gradients are the sums of those of ``pieces``.

    A layer that is called several times, and a parameter that several layers share, has one gradient
    per example: its norm is not the sum of the pieces' norms.
    """
    if len(pieces) == 1:
        return pieces[0]
    outers = [piece for piece in pieces if isinstance(piece, Outer)]
    rows = [piece for piece in pieces if isinstance(piece, Rows)]
    if len(outers) + len(rows) == len(pieces):
        outer = (
            Outer(_joined([p.left for p in outers]), _joined([p.right for p in outers]), outers[0].shape)
            if outers
            else None
        )
        table = Rows(_joined([p.index for p in rows]), _joined([p.right for p in rows]), rows[0].rows) if rows else None
        if outer and table:
            return _Tied(table, outer)
        return outer or table  # type: ignore[return-value]
    total = pieces[0].instantiate().clone()
    for piece in pieces[1:]:
        total += piece.instantiate().reshape(total.shape)
    return Explicit(total)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the positions of all parts, one after the other; no copy of one part alone."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


class _Tied(Piece):
    """Rows and outer products on one parameter: an embedding that is also the output layer."""

    def __init__(self, rows: Rows, outer: Outer) -> None:
        self.parts = (rows, outer)
        self.shape = outer.shape

    @property
    def rounding(self) -> float:  # type: ignore[override]
        """See :class:`~dphero.gradients.piece.Piece`."""
        return self.parts[1].rounding

    def instantiate(self) -> Tensor:
        rows, outer = self.parts
        return rows.instantiate() + outer.instantiate()

    def square_norms(self, geometry: Geometry) -> Tensor:
        if geometry.flat is not None or geometry.left is not None:
            return whitened_squares(self.instantiate(), geometry)
        rows, outer = self.parts
        # ⟨e_a vᵀ, l rᵀ⟩ = l[a] ⟨v, r⟩
        positions = outer.left.shape[1]
        picked = outer.left.gather(2, rows.index.unsqueeze(1).expand(-1, positions, -1))
        right = whitened(geometry.right, outer.right)
        cross = (picked * product(right, whitened(geometry.right, rows.right).transpose(1, 2))).sum((1, 2))
        # |cross| is at most half the sum of what the two parts could be without cancellation
        of_rows, of_outer = rows.gram_norms(geometry), outer.gram_norms(geometry)
        squares = of_rows.squares + of_outer.squares + 2 * cross
        return squares.clamp_(min=0).add_(of_rows.room + of_outer.room, alpha=2)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.rounding:  # the two parts may cancel
            weights = rounded_weights(weights)
        return self.parts[0].weighted_sum(weights) + self.parts[1].weighted_sum(weights)

    def take(self, keep: Tensor | slice) -> Piece:
        rows, outer = (part.take(keep) for part in self.parts)
        if isinstance(rows, Rows) and isinstance(outer, Outer):
            return _Tied(rows, outer)
        return Explicit(rows.instantiate() + outer.instantiate())
