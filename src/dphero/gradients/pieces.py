"""Per-example gradients that are never formed unless forming them is cheaper.

A *piece* is what one call of one layer adds to the gradient of one parameter, for each of the n
examples of a physical batch. It answers two questions:

* ``square_norms(geometry)``: ‖A⁻¹ g_i‖² for every example i;
* ``weighted_sum(weights)``: Σ_i weights_i · g_i.

Both are exact. Most layers give an *outer* piece, g_i = Σ_t l_it r_itᵀ over positions t, whose norm has a
closed form for one position, and for several is the cheaper of the Gram trick
Σ_{t,s} ⟨l_t, l_s⟩⟨r_t, r_s⟩ and the explicit gradient (which is then kept for the sum).

Whitening touches the norms alone: the clipped sum is coloured right after it would be whitened, so
A Σ f_i A⁻¹ g_i = Σ f_i g_i needs no geometry.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from dphero.geometry.factors import Factor
from dphero.geometry.geometry import Geometry
from dphero.numerics.buffers import RefCountedBuffer
from dphero.numerics.partial_norms import LEAST_SQUARE, PartialNorm, rank_one_norms, square_norms
from dphero.numerics.precision import matmul_tf32

__all__ = [
    "Bias",
    "Explicit",
    "Outer",
    "Piece",
    "Rows",
    "by_example",
    "combine",
    "gram_rounding",
    "rounding",
]


class Piece(ABC):
    """What one call adds to the per-example gradients of one parameter."""

    shape: torch.Size
    """Shape of the parameter."""
    rounding: float = 0.0
    """How much larger, relatively, the summed gradient may be than the one whose norm was taken."""

    @abstractmethod
    def instantiate(self) -> Tensor:
        """Return the per-example gradients, of shape ``(n, *shape)``."""

    @abstractmethod
    def square_norms(self, geometry: Geometry) -> Tensor:
        """Return ‖A⁻¹ g_i‖² for each example, of shape ``(n,)``."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i weights_i g_i, of the parameter's shape."""

    @abstractmethod
    def take(self, keep: Tensor) -> Piece:
        """Return the piece of the examples that ``keep`` (a boolean mask) names."""

    def folded(self, fold: int) -> Piece:
        """Return the piece in which each run of ``fold`` rows is one example."""
        if fold == 1:
            return self
        return Explicit(self.instantiate().unflatten(0, (-1, fold)).sum(1))


class Explicit(Piece):
    """Per-example gradients that were formed: ``gradients`` has shape ``(n, *shape)``."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients
        self.shape = gradients.shape[1:]

    def instantiate(self) -> Tensor:
        return self.gradients

    def square_norms(self, geometry: Geometry) -> Tensor:
        return _squares(_whitened(self.gradients, geometry))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        flat = by_example(self.gradients)
        return (weights.to(flat.dtype) @ flat).reshape(self.shape)

    def take(self, keep: Tensor) -> Explicit:
        return Explicit(self.gradients[keep])


class Outer(Piece):
    """A sum of outer products: g_i = Σ_t left_it right_itᵀ, seen as a matrix of shape (k, m).

    Args:
        left: Shape ``(n, T, k)`` or ``(n, k)``; the output gradient of a linear layer.
        right: Shape ``(n, T, m)`` or ``(n, m)``; its input.
        shape: The parameter's own shape, ``(k, m)`` unless given.
        room: Where to put the sum.
    """

    def __init__(
        self, left: Tensor, right: Tensor, shape: torch.Size | None = None, room: RefCountedBuffer | None = None
    ) -> None:
        self.left = left if left.dim() == 3 else left.unsqueeze(1)
        self.right = right if right.dim() == 3 else right.unsqueeze(1)
        self.shape = shape or torch.Size((left.shape[-1], right.shape[-1]))
        self._room = room
        self._kept: Tensor | None = None
        self._left_squares: tuple[Factor | None, Tensor] | None = None
        self._left_lengths: tuple[Factor | None, PartialNorm] | None = None
        self._left_total: tuple[Tensor, Tensor] | None = None
        self.has_bias = False
        self.rounding = rounding(left)

    def instantiate(self) -> Tensor:
        if self._kept is None:
            self._kept = torch.bmm(self.left.transpose(1, 2), self.right).reshape(len(self.left), *self.shape)
        return self._kept

    def square_norms(self, geometry: Geometry) -> Tensor:
        _, positions, rows = self.left.shape
        columns = self.right.shape[-1]
        if geometry.flat is not None:
            return _squares(_whitened(self.instantiate(), geometry))
        if positions == 1:
            return rank_one_norms({"": self.lengths(geometry)})[""]
        if positions * (rows + columns) < rows * columns:
            squares, room = self.gram_squares(geometry)
            return squares.clamp_(min=0).add_(room)
        return _squares(_whitened(self.instantiate(), geometry))

    def lengths(self, geometry: Geometry) -> tuple[PartialNorm, ...]:
        """Return what the norms of left and right are made of, where g_i is a single product: ``(left, right)``.

        That is all that has to be done while the two are at hand; :func:`rank_one_norms` does the rest. Empty where g_i
        is a sum, or is not whitened from left and right.
        """
        if geometry.flat is not None or self.left.shape[1] != 1:
            return ()
        return self.left_lengths(geometry.left), _lengths(geometry.right, self.right[:, 0])

    def left_lengths(self, factor: Factor | None) -> PartialNorm:
        """Return what the norms of left, and so those of the layer's bias, are made of."""
        if self._left_lengths is None or self._left_lengths[0] is not factor:
            self._left_lengths = (factor, _lengths(factor, self.left[:, 0]))
        return self._left_lengths[1]

    def gram_squares(self, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Return Σ_{t,s} ⟨l_t, l_s⟩⟨r_t, r_s⟩, and how much of it rounding may have swallowed."""
        left, right = _apply(geometry.left, self.left), _apply(geometry.right, self.right)
        with matmul_tf32(left, allow=False):
            lefts, rights = torch.bmm(left, left.transpose(1, 2)), torch.bmm(right, right.transpose(1, 2))
        left_lengths, right_lengths = (_diagonal(grams).clamp(min=LEAST_SQUARE).sqrt() for grams in (lefts, rights))
        terms, positions = self.left.shape[-1] + self.right.shape[-1], self.left.shape[1]
        if self.has_bias:
            room = left_lengths.sum(1).square() * gram_rounding(left, positions + self.left.shape[-1])
            self._left_squares = (geometry.left, lefts.sum((1, 2)).clamp_(min=0).add_(room))
        # Σ_{t,s} |⟨l_t, l_s⟩⟨r_t, r_s⟩| ≤ (Σ_t ‖l_t‖‖r_t‖)². The product of the traces bounds that too, but pairs the
        # left of one position with the right of another. Where a parameter is on both sides of a product
        # (softmax(h @ q.T) @ q) these are two activations, thousands of times larger than any gradient.
        room = (left_lengths * right_lengths).sum(1).square() * gram_rounding(left, positions + terms)
        return lefts.mul_(rights).sum((1, 2)), room

    def left_squares(self, factor: Factor | None) -> Tensor:
        """Return ‖L⁻¹ Σ_t left_it‖²: what the layer's bias adds, mostly known already."""
        if self._left_squares is None or self._left_squares[0] is not factor:
            self._left_squares = (factor, square_norms([_lengths(factor, self.left.sum(1))])[0])
        return self._left_squares[1]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._kept is not None:
            return Explicit(self._kept).weighted_sum(weights)
        left, right, spread = self.left, self.right, weights.to(self.left.dtype)[:, None, None]
        if 2 * right.shape[-1] <= left.shape[-1]:  # a copy is made of the smaller one
            right = right * spread
        else:
            left = left * spread
            if self.has_bias:  # while it is at hand
                self._left_total = (weights, left.flatten(0, 1).sum(0))
        left, right = left.flatten(0, 1).T, right.flatten(0, 1)
        room = None if self._room is None else self._room.lend(left, left.shape[0], right.shape[1])
        return torch.mm(left, right, out=room).reshape(self.shape)

    def weighted_left_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_it weights_i left_it: the sum for the layer's bias."""
        if self._left_total is None or self._left_total[0] is not weights:
            left = self.left[:, 0] if self.left.shape[1] == 1 else self.left.sum(1)
            self._left_total = (weights, weights.to(left.dtype) @ left)
        return self._left_total[1]

    def take(self, keep: Tensor) -> Outer:
        return Outer(self.left[keep], self.right[keep], self.shape)

    def folded(self, fold: int) -> Outer:
        if fold == 1:
            return self
        return Outer(_join(self.left, fold), _join(self.right, fold), self.shape)


class Bias(Piece):
    """The bias beside an outer piece: g_i = Σ_t left_it."""

    def __init__(self, outer: Outer) -> None:
        self.outer = outer
        outer.has_bias = True
        self.shape = outer.left.shape[-1:]

    def instantiate(self) -> Tensor:
        left = self.outer.left
        return left[:, 0] if left.shape[1] == 1 else left.sum(1)

    def square_norms(self, geometry: Geometry) -> Tensor:
        if geometry.flat is not None:
            return _squares(_whitened(self.instantiate(), geometry))
        if lengths := self.lengths(geometry):
            return rank_one_norms({"": lengths})[""]
        return self.outer.left_squares(geometry.left)

    def lengths(self, geometry: Geometry) -> tuple[PartialNorm, ...]:
        """Return what the norms are made of, beside a single product: ``(left,)``. See :meth:`Outer.lengths`."""
        if geometry.flat is not None or self.outer.left.shape[1] != 1:
            return ()
        return (self.outer.left_lengths(geometry.left),)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.outer.weighted_left_sum(weights)

    def take(self, keep: Tensor) -> Piece:
        return Explicit(self.instantiate()[keep])

    def folded(self, fold: int) -> Piece:
        return self if fold == 1 else Bias(self.outer.folded(fold))


class Rows(Piece):
    """Rows of a table: g_i = Σ_t e_{index_it} right_itᵀ, the gradient of an embedding.

    Args:
        index: Shape ``(n, T)``.
        right: Shape ``(n, T, d)``; the output gradient.
        rows: Number of rows of the table.
    """

    def __init__(self, index: Tensor, right: Tensor, rows: int) -> None:
        self.index, self.right, self.rows = index, right, rows
        self.shape = torch.Size((rows, right.shape[-1]))

    def instantiate(self) -> Tensor:
        n, _, d = self.right.shape
        out = self.right.new_zeros(n, self.rows, d)
        return out.scatter_add_(1, self.index.unsqueeze(-1).expand(-1, -1, d), self.right)

    def square_norms(self, geometry: Geometry) -> Tensor:
        if geometry.flat is not None or geometry.left is not None:
            return _squares(_whitened(self.instantiate(), geometry))
        squares, room = self.gram_squares(geometry)
        return squares.clamp_(min=0).add_(room)

    def gram_squares(self, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Return Σ_{t,s} [index_t = index_s]⟨r_t, r_s⟩, and how much of it rounding may have swallowed."""
        right = _apply(geometry.right, self.right)
        with matmul_tf32(right, allow=False):
            grams, positions = torch.bmm(right, right.transpose(1, 2)), right.shape[1]
        room = _diagonal(grams).clamp(min=0).sqrt().sum(1).square() * gram_rounding(right, positions + right.shape[-1])
        same = self.index.unsqueeze(2) == self.index.unsqueeze(1)
        return grams.mul_(same).sum((1, 2)), room

    def weighted_sum(self, weights: Tensor) -> Tensor:
        right = self.right * weights.to(self.right.dtype)[:, None, None]
        out = right.new_zeros(self.shape)
        return out.index_add_(0, self.index.reshape(-1), right.reshape(-1, right.shape[-1]))

    def take(self, keep: Tensor) -> Rows:
        return Rows(self.index[keep], self.right[keep], self.rows)

    def folded(self, fold: int) -> Rows:
        if fold == 1:
            return self
        return Rows(_join(self.index, fold), _join(self.right, fold), self.rows)


class _Tied(Piece):
    """Rows and outer products on one parameter: an embedding that is also the output layer."""

    def __init__(self, rows: Rows, outer: Outer) -> None:
        self.parts = (rows, outer)
        self.rounding = outer.rounding
        self.shape = outer.shape

    def instantiate(self) -> Tensor:
        rows, outer = self.parts
        return rows.instantiate() + torch.bmm(outer.left.transpose(1, 2), outer.right)

    def square_norms(self, geometry: Geometry) -> Tensor:
        if geometry.flat is not None or geometry.left is not None:
            return _squares(_whitened(self.instantiate(), geometry))
        rows, outer = self.parts
        # ⟨e_a vᵀ, l rᵀ⟩ = l[a] ⟨v, r⟩
        positions = outer.left.shape[1]
        picked = outer.left.gather(2, rows.index.unsqueeze(1).expand(-1, positions, -1))
        right = _apply(geometry.right, outer.right)
        cross = (picked * torch.bmm(right, _apply(geometry.right, rows.right).transpose(1, 2))).sum((1, 2))
        (rows_squares, rows_room), (outer_squares, outer_room) = (p.gram_squares(geometry) for p in (rows, outer))
        # |cross| is at most half the sum of what the two parts could be without cancellation
        squares = rows_squares + outer_squares + 2 * cross
        return squares.clamp_(min=0).add_(rows_room + outer_room, alpha=2)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.parts[0].weighted_sum(weights) + self.parts[1].weighted_sum(weights)

    def take(self, keep: Tensor) -> _Tied:
        return _Tied(self.parts[0].take(keep), self.parts[1].take(keep))


def gram_rounding(x: Tensor, terms: int) -> float:
    """Return the relative rounding error to allow for in a Gram norm over this many terms.

    Positions that nearly cancel leave a norm far below its terms, which rounding can hide; a norm that is too small
    would let an example through unclipped. Four times √terms units of the last place is more than blocked sums lose.
    """
    return 4 * torch.finfo(x.dtype).eps * math.sqrt(terms)


def rounding(x: Tensor, *, convolution: bool = False) -> float:
    """Return a bound on the relative error of products in the precision that torch uses for this tensor.

    Norm and sum are computed by different products. In float32 they agree to the last digits; in the shorter formats of
    a GPU the clip bound must leave room for the difference.
    """
    if x.dtype in (torch.bfloat16, torch.float16):
        return 2.0**-7
    if x.device.type == "cuda" and x.dtype == torch.float32:
        allow = torch.backends.cudnn.allow_tf32 if convolution else torch.backends.cuda.matmul.allow_tf32
        return 2.0**-9 if allow else 0.0
    return 0.0


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
            Outer(torch.cat([p.left for p in outers], 1), torch.cat([p.right for p in outers], 1), outers[0].shape)
            if outers
            else None
        )
        table = (
            Rows(torch.cat([p.index for p in rows], 1), torch.cat([p.right for p in rows], 1), rows[0].rows)
            if rows
            else None
        )
        if outer and table:
            return _Tied(table, outer)
        return outer or table  # type: ignore[return-value]
    total = pieces[0].instantiate().clone()
    for piece in pieces[1:]:
        total += piece.instantiate().reshape(total.shape)
    return Explicit(total)


def _join(x: Tensor, fold: int) -> Tensor:
    """Make the positions of ``fold`` consecutive rows positions of one row."""
    return x if fold == 1 else x.unflatten(0, (-1, fold)).flatten(1, 2)


def _diagonal(grams: Tensor) -> Tensor:
    return grams.diagonal(dim1=1, dim2=2)


def by_example(x: Tensor) -> Tensor:
    """Return one row per example, also where there is none."""
    return x.reshape(len(x), x.shape[1:].numel())


def _whitened(gradients: Tensor, geometry: Geometry) -> Tensor:
    return gradients if geometry.is_identity else geometry.whiten(gradients)


def _squares(gradients: Tensor) -> Tensor:
    return torch.linalg.vector_norm(by_example(gradients), dim=1).square()


def _apply(factor: Factor | None, x: Tensor) -> Tensor:
    return x if factor is None else factor.whiten(x)


def _lengths(factor: Factor | None, x: Tensor) -> PartialNorm:
    return PartialNorm(torch.linalg.vector_norm(x, dim=-1)) if factor is None else factor.lengths(x)
