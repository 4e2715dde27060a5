"""From random words to normals, pair by pair (Box and Muller), and to where they belong.

A pair has two words, signed integers k and l of b bits. The uniform u = |2k + 1| / 2ᵇ is never 0, and it is finest near
0, where the tails come from. The angle πl / 2ᵇ⁻¹ lies in [-π, π]. The pair is √(ln 1/u²) · (sin, cos).

With b = 32 the smallest u would be 2⁻³², and noise would end at 6.66 standard deviations: an output beyond that would
be impossible without the record that moved it there. So the eight smallest uniforms, which stand for intervals
(|2k + 1| ± 1) / 2³², get a second word of 64 bits that says where in the interval u lies. Tails then reach 11.5
standard deviations. One pair in 270 million is concerned, and every other is what it is without.

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
from math import log

import torch
from torch import Tensor

__all__ = ["chunk_maker", "draw_chunk", "make_chunk"]

logger = logging.getLogger(__name__)

_REFINED = 16
"""Uniforms below so many units of 2⁻³² are refined."""


def draw_chunk(
    make: Callable[..., bool],
    words: Tensor,
    numbers: Tensor,
    tiny: Tensor,
    place: tuple[int, int],
    lists: tuple[list[Tensor], list[int], list[bool], list[float]],
    second: Callable[[Tensor], Tensor],
) -> None:
    """Make the normals of a chunk, refining the smallest uniforms, and hand them out.

    Args:
        make: :func:`make_chunk`, or what :func:`chunk_maker` made of it.
        words: Random words, as there.
        numbers: The same memory, as there.
        tiny: 2⁻ᵇ.
        place: ``start`` and ``stop``.
        lists: ``targets``, ``ends``, ``keeps`` and ``stds``.
        second: Told which pairs, by their numbers in the chunk; returns where in (0, 1) the second word of each puts
            its uniform, in float64.
    """
    if make(words, numbers, tiny, *place, *lists):
        return
    pairs = (place[1] - place[0] + 1) // 2
    radius = numbers[0, : pairs + -pairs % 64]
    units = 2 * ((32 * log(2) - radius.double().square() / 2).exp() / 2 - 0.5).round() + 1  # |2k + 1| again
    which = (units < _REFINED).nonzero().flatten()
    fine = (units[which] - 1 + 2 * second(which)).log().sub(32 * log(2)).mul(-2).sqrt()
    radius[which] = fine.to(radius.dtype)
    handed_out = make(words, numbers, tiny, *place, *lists, made=True)
    assert handed_out


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
    made: bool = False,
) -> bool:
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
        made: Whether radii, sines and cosines are made already, and only to be handed out.

    Returns:
        Whether they were handed out. If not, some radii of 32 bits are so large that their uniforms want refining.
    """
    unit, pairs = float(tiny), (stop - start + 1) // 2
    pairs += -pairs % 64
    used = numbers.narrow(1, 0, pairs)
    radius, sine, cosine = used[0], used[1], used[2]
    if not made:
        used.narrow(0, 0, 2).copy_(words.narrow(1, 0, pairs))  # each in its own place
        torch.add(tiny, radius, alpha=2.0 * unit, out=radius)  # u, or -u
        radius.pow_(-2).log_().sqrt_()
        sine.mul_(6.283185307179586 * unit)  # the angle, so far
        torch.cos(sine, out=cosine)
        sine.sin_()
        if unit > 1e-12 and float(radius.max()) > 6.2:  # √(2 ln(2³² / 16)) is 6.23
            return False
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
    return True


@cache
def chunk_maker() -> Callable[..., bool]:
    """Return :func:`make_chunk`, compiled if torch can do that."""
    try:
        with _unwatched():
            # from its source, as this way torch warns of nothing
            compiled: Callable[..., bool] = torch.jit.CompilationUnit(inspect.getsource(make_chunk)).make_chunk
            words = torch.ones(2, 64, dtype=torch.int32, device="cpu") << 20
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
