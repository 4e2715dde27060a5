"""From random words to normals, pair by pair (Box and Muller), and to where they belong.

A pair has two words, signed integers k and l of b bits. The uniform u = |2k + 1| / 2ᵇ is never 0, and it is finest near
0, where the tails come from. The angle πl / 2ᵇ⁻¹ lies in [-π, π]. The pair is √(ln 1/u²) · (sin, cos).

Threads make pairs at the same time, but Python lets only one of them through at a time. So all that is done with a
chunk is one function that torch compiles: it asks for Python's lock once, not at each step. Where torch cannot compile
it, Python runs the same function, more slowly.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

__all__ = ["chunk_maker", "make_chunk"]

logger = logging.getLogger(__name__)


def make_chunk(
    words: Tensor,
    numbers: Tensor,
    tiny: Tensor,
    start: int,
    stop: int,
    targets: list[Tensor],
    ends: list[int],
    keeps: list[bool],
    stds: list[float],
) -> None:
    """Make standard normals, first sines, then cosines, and hand them out, times their deviations.

    There are half as many pairs as normals, rounded up to a multiple of 64: a processor may treat what is less than a
    vector differently.

    Args:
        words: A row of words for the radii of all pairs, and one for their angles; used up.
        numbers: The same memory, taken for numbers of the normals' type, which has b bits as well; and a third row.
        tiny: 2⁻ᵇ, in that type.
        start: Where in the concatenation of all targets the normals belong,
        stop: and where they end.
        targets: Contiguous tensors of that type, to be overwritten or added to.
        ends: Where each of them ends in the concatenation.
        keeps: Which of them are added to.
        stds: Their deviations.
    """
    unit, pairs = float(tiny), (stop - start + 1) // 2
    pairs += -pairs % 64
    used = numbers.narrow(1, 0, pairs)
    radius, sine, cosine = used[0], used[1], used[2]
    used.narrow(0, 0, 2).copy_(words.narrow(1, 0, pairs))  # each in its own place
    torch.add(tiny, radius, alpha=2.0 * unit, out=radius)  # u, or -u
    radius.pow_(-2).log_().sqrt_()
    sine.mul_(6.283185307179586 * unit)  # the angle, so far
    torch.cos(sine, out=cosine)
    sine.sin_()
    for row in range(2):
        turn, first = used[1 + row], start + row * pairs
        for i in range(len(targets)):
            target = targets[i].view(-1)
            begin = ends[i] - target.size(0)
            low, high = max(begin, first), min(ends[i], min(first + pairs, stop))
            if low < high:
                if high - low < target.size(0):
                    target = target.narrow(0, low - begin, high - low)
                ours, length = turn.narrow(0, low - first, high - low), radius.narrow(0, low - first, high - low)
                if not keeps[i]:
                    target.zero_()  # and added to as well: the same bits either way
                target.addcmul_(ours, length, value=stds[i])


@cache
def chunk_maker() -> Callable[..., None]:
    """Return :func:`make_chunk`, compiled if torch can do that."""
    try:
        with _unwatched():
            # from its source, as this way torch warns of nothing
            compiled: Callable[..., None] = torch.jit.CompilationUnit(inspect.getsource(make_chunk)).make_chunk
            words = torch.zeros(2, 64, dtype=torch.int32, device="cpu")
            numbers, tiny = torch.empty(3, 64, device="cpu"), torch.tensor(2.0**-32, device="cpu")
            compiled(words, numbers, tiny, 0, 128, [torch.empty(128, device="cpu")], [128], [False], [1.0])
    except Exception as error:
        logger.info("Noise is drawn more slowly, as torch could not compile its transform: %s", error)
        return make_chunk
    return compiled


@contextmanager
def _unwatched() -> Iterator[None]:
    """Let functions that are called here for the first time run as they are, now and later.

    Else torch's compiler watches each thread's first call, to learn types that it can make no use of here. That takes
    tens of milliseconds, and megabytes.
    """
    switch = getattr(torch._C, "_jit_set_profiling_mode", lambda value: value)
    before = switch(False)
    try:
        yield
    finally:
        switch(before)
