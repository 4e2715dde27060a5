"""The Gram trick: norms of sums of outer products from the products of their positions with each other.

    ‖Σ_t l_t r_tᵀ‖² = Σ_{t,s} ⟨l_t, l_s⟩⟨r_t, r_s⟩

Positions may cancel: then little is left of large terms, and rounding can hide it. A norm that is too small would let
an example through with more than its share, so there is room for all that rounding may have taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dphero.geometry.factor import Factor, InnerProducts
from dphero.numerics.partial_norms import LEAST_SQUARE
from dphero.numerics.precision import at_least_single, matmul_tf32
from dphero.numerics.products import (
    ALIGNED,
    PARTING_ERROR,
    multiplied_short,
    on_tensor_cores,
    product,
    square_product,
)

_MOST, _FEWEST = 2, 64
"""How often positions are halved at most, and how many are left in a block at least: blocks cost operations."""


class GramNorms(NamedTuple):
    """Square norms, and how much of them rounding may have taken."""

    squares: Tensor
    room: Tensor

    @property
    def at_most(self) -> Tensor:
        """Square norms that are not too small."""
        return self.squares.clamp(min=0).add_(self.room)


def gram_rounding(x: Tensor, terms: int) -> float:
    """Return the relative rounding error to allow for in a Gram norm over this many terms.

    Four times √terms units of the last place of float32 is more than blocked sums lose; products of shorter numbers are
    exact in float32, and those of numbers that are parted in two nearly so (:mod:`dphero.numerics.products`): each side
    adds an error of that, and once more what their other symmetries make together.
    """
    parted = 4 * PARTING_ERROR if x.dtype == torch.float32 and on_tensor_cores(x) else 0.0
    return 4 * torch.finfo(at_least_single(x.dtype)).eps * math.sqrt(terms) + parted


def inner_products(factor: Factor | None, x: Tensor) -> InnerProducts:
    """Return what inner products of A⁻¹ x along the last axis are made of; of x itself where there is no factor."""
    return InnerProducts(x) if factor is None else factor.inner_products(x)


def gram_norms(
    left: InnerProducts, right: InnerProducts, *, of_left: bool = False
) -> tuple[GramNorms, GramNorms | None]:
    """Return ‖Σ_t l_t r_tᵀ‖² of vectors of shape (n, T, k) and (n, T, m).

    Integers of shape (n, T, 1) stand for unit vectors. If ``of_left``, also return ‖Σ_t l_t‖², mostly known by then.
    """
    if left.x.shape[1] % ALIGNED and any(multiplied_short(side.x) for side in (left, right)):
        left, right = _filled_up(left), _filled_up(right)
    (n, positions, rows), columns = left.x.shape, right.x.shape[2]
    halvings = _halvings(positions, left, right)
    parts, lengths = [], []
    for number, blocks in enumerate(zip(_blocks(left, halvings), _blocks(right, halvings), strict=True)):
        grams = []
        for a, b in blocks:
            gram, squares_of_x = gram_of(a, b)
            grams.append(gram)
            if number == 0:
                lengths.append(squares_of_x.reshape(n, positions).sqrt_())
        sums = [grams[0].sum((1, 2))] if of_left else []
        sums.append((grams[0] * grams[1]).sum((1, 2)))
        count = len(sums[0]) // max(n, 1)  # blocks of each example; those above the diagonal count twice
        parts.append(torch.stack(sums).view(len(sums), n, count).sum(2).mul_(2 if number else 1))
    squares = torch.stack(parts).sum(0) if halvings else parts[0]
    # Σ_{t,s} |⟨l_t, l_s⟩⟨r_t, r_s⟩| ≤ (Σ_t ‖l_t‖‖r_t‖)². The product of the traces bounds that too, but pairs the left
    # of one position with the right of another. Where a parameter is on both sides of a product
    # (softmax(h @ q.T) @ q) these are two activations, thousands of times larger than any gradient.
    room = (lengths[0] * lengths[1]).sum(1).mul_(left.stretch * right.stretch)
    both = _scaled(squares[-1], room, positions + rows + columns, left.scale * right.scale)
    if not of_left:
        return both, None
    return both, _scaled(squares[0], lengths[0].sum(1).mul_(left.stretch), positions + rows, left.scale)


def gram_of(a: InnerProducts, b: InnerProducts) -> tuple[Tensor, Tensor]:
    """Return all inner products of a with b, of scale 1, and those of each ``a.x`` with its ``b.x``."""
    if not a.x.is_floating_point():
        gram = (a.x == b.x.mT).to(torch.float32)
    else:
        gram = square_product(a.x) if a.x is b.x else product(a.x, b.x.mT)
    diagonal = gram.diagonal(dim1=1, dim2=2).clamp(min=LEAST_SQUARE)
    if a.near is not None and b.far is not None:
        with matmul_tf32(gram, allow=False):
            gram.baddbmm_(a.near, b.far.mT)
    return gram, diagonal


def _scaled(squares: Tensor, terms_length: Tensor, terms: int, scale: float | Tensor) -> GramNorms:
    """Return norms of what is ``scale`` times as long, and room for rounding in terms that are together so long."""
    room = terms_length.square() * gram_rounding(squares, terms)
    return GramNorms(squares * scale**2, room * scale**2)


def _filled_up(side: InnerProducts) -> InnerProducts:
    """Return the vectors with some of length zero behind them, so that their products have sizes that are fast."""
    more = -side.x.shape[1] % ALIGNED
    x, near, far = (each if each is None else F.pad(each, (0, 0, 0, more)) for each in (side.x, side.near, side.far))
    assert x is not None
    return side._replace(x=x, near=near, far=far)


def _halvings(positions: int, *sides: InnerProducts) -> int:
    """Return how often to halve the positions, to save the half of the blocks beside the diagonal."""
    if not all(side.x.is_contiguous() and side.x.is_cpu for side in sides):  # a GPU has too little to do with a block
        return 0
    count = 0
    while count < _MOST and positions % (2 << count) == 0 and positions >> (count + 1) >= _FEWEST:
        count += 1
    return count


def _blocks(side: InnerProducts, halvings: int) -> Iterator[tuple[InnerProducts, InnerProducts]]:
    """Yield the factors of the blocks on the diagonal, then those of all that are above it, larger and larger."""
    n, positions = side.x.shape[:2]

    def cut(count: int, some: slice = slice(None)) -> InnerProducts:
        def part(x: Tensor) -> Tensor:
            return x.reshape(n << count, positions >> count, x.shape[2])[some]

        near, far = (each if each is None else part(each) for each in (side.near, side.far))
        return side._replace(x=part(side.x), near=near, far=far)

    whole = cut(halvings) if halvings else side
    yield whole, whole
    for count in range(halvings, 0, -1):
        yield cut(count, slice(0, None, 2)), cut(count, slice(1, None, 2))
