"""What square norms are made of, and how they are put together: for many layers at once.

On few numbers it is operations that take time, most of all between large ones, which leave nothing of them in a
processor's caches. So each layer measures what it has while that is at hand, and the rest is done at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_SQUARE = 2.0**-70
"""What the square norm of a factor counts as at least.

Squares of numbers below 1e-19 lose digits in float32, or vanish, while the other factor may be as large as these are
small: the product of the two squares would hide an example that is not small at all.
"""


class PartialNorm(NamedTuple):
    """What the square norms of some vectors are made of: scale * whole^2 - taken^2 (scale 1 and taken 0 where None)."""

    whole: Tensor
    scale: Tensor | None = None
    taken: Tensor | None = None


def square_norms(lengths: Sequence[PartialNorm]) -> Tensor:
    """Return the square norms, stacked."""
    total = torch.stack([each.whole for each in lengths]).square_()
    first = 0
    for short, run in groupby(lengths, key=lambda each: each.taken is not None):
        some = list(run)
        if short:
            scale = torch.cat([each.scale for each in some if each.scale is not None])
            taken = torch.stack([each.taken for each in some if each.taken is not None])
            scale = scale.view(-1, *[1] * (taken.dim() - 1))
            total[first : first + len(some)].mul_(scale).addcmul_(taken, taken, value=-1.0)
        first += len(some)
    return total


def rank_one_norms(lengths: Mapping[str, tuple[PartialNorm, ...]]) -> dict[str, Tensor]:
    """Return square norms that are products of those of one or two factors, by name.

    Args:
        lengths: Name to what the norms of its one or two factors are made of. Those of one layer share a factor.
    """
    pairs = {name: each for name, each in lengths.items() if len(each) == 2}
    factors = [*(left for left, _ in pairs.values()), *(right for _, right in pairs.values())]
    known = set(map(id, factors))
    factors += [each[0] for each in lengths.values() if id(each[0]) not in known]
    squares = square_norms(factors).clamp_(min=LEAST_SQUARE)
    products = squares[: len(pairs)] * squares[len(pairs) : 2 * len(pairs)]
    alone = dict(zip(map(id, factors), squares.unbind(), strict=True))
    together = dict(zip(pairs, products.unbind(), strict=True))
    return {name: together[name] if name in pairs else alone[id(each[0])] for name, each in lengths.items()}
