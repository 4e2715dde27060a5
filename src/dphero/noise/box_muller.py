"""From random words to normals, pair by pair (Box and Muller), and to where they belong.

A pair has two words, signed integers k and l of b bits. The uniform u = |2k + 1| / 2ᵇ is never 0, and it is finest near
0, where the tails come from. The angle πl / 2ᵇ⁻¹ lies in [-π, π]. The pair is √(ln 1/u²) · (sin, cos).

A tensor, flattened, is cut in blocks of :data:`BLOCK` numbers: first the sines of half as many pairs, then their
cosines. So which pair a number comes from follows from its place in the tensor alone.

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

logger = logging.getLogger(__name__)

BLOCK = 256
"""Numbers in a block, of which half are sines and half are cosines. Noise depends on it."""
_REFINED = 16
"""Uniforms below so many units of 2⁻³² are refined."""


def draw_chunk(
    make: Callable[..., bool],
    words: Tensor,
    numbers: Tensor,
    tiny: Tensor,
    std: float,
    targets: list[Tensor],
    second: Callable[[Tensor], Tensor],
) -> None:
    """Make the normals of a chunk as :func:`make_chunk` does, refining the smallest uniforms, and hand them out.

    ``make`` is that function, or what :func:`chunk_maker` made of it. ``second`` is told which pairs, by their numbers
    in the chunk, and returns where in (0, 1) the second word of each puts its uniform, in float64.
    """
    if make(words, numbers, tiny, std, targets):
        return
    pairs = sum(-(-len(target) // BLOCK) for target in targets) * (BLOCK // 2)
    radius = numbers[0, :pairs]
    units = 2 * ((32 * log(2) - radius.double().square() / 2).exp() / 2 - 0.5).round() + 1  # |2k + 1| again
    which = (units < _REFINED).nonzero().flatten()
    fine = (units[which] - 1 + 2 * second(which)).log().sub(32 * log(2)).mul(-2).sqrt()
    radius[which] = fine.to(radius.dtype)
    handed_out = make(words, numbers, tiny, std, targets, made=True)
    assert handed_out


def make_chunk(
    words: Tensor, numbers: Tensor, tiny: Tensor, std: float, targets: list[Tensor], made: bool = False
) -> bool:
    """Make normals and hand them out: to each target its blocks, of which the last may be cut short.

    Args:
        words: A row of words for the radii of all pairs, and one for their angles; used up.
        numbers: The same memory, taken for numbers of the normals' type, which has b bits as well; and a third row.
        tiny: 2⁻ᵇ, in that type.
        std: The standard deviation.
        targets: Contiguous vectors of that type, to be overwritten. Each begins with a block of its own.
        made: Whether radii, sines and cosines are made already, and only to be handed out.

    Returns:
        Whether they were handed out. If not, some radii of 32 bits are so large that their uniforms want refining.
    """
    unit, half, pairs = float(tiny), 128, 0
    for target in targets:
        pairs += (target.size(0) + 2 * half - 1) // (2 * half) * half
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
    radius.mul_(std)
    first = 0
    for target in targets:
        whole, rest = target.size(0) // (2 * half), target.size(0) % (2 * half)
        if whole > 0:
            count = whole * half
            blocks = target.narrow(0, 0, 2 * count).view(whole, 2, half)
            length = radius.narrow(0, first, count).view(whole, half)
            torch.mul(sine.narrow(0, first, count).view(whole, half), length, out=blocks.select(1, 0))
            torch.mul(cosine.narrow(0, first, count).view(whole, half), length, out=blocks.select(1, 1))
            first += count
        if rest > 0:
            tail, count = target.narrow(0, whole * 2 * half, rest), min(rest, half)
            torch.mul(sine.narrow(0, first, count), radius.narrow(0, first, count), out=tail.narrow(0, 0, count))
            tail, count = tail.narrow(0, count, rest - count), rest - count
            torch.mul(cosine.narrow(0, first, count), radius.narrow(0, first, count), out=tail)
            first += half
    return True


@cache
def chunk_maker() -> Callable[..., bool]:
    """Return :func:`make_chunk`, compiled if torch can do that."""
    try:
        with _unwatched():
            # from its source, as this way torch warns of nothing
            compiled: Callable[..., bool] = torch.jit.CompilationUnit(inspect.getsource(make_chunk)).make_chunk
            words = torch.ones(2, BLOCK, dtype=torch.int32, device="cpu") << 20
            numbers, tiny = torch.empty(3, BLOCK, device="cpu"), torch.tensor(2.0**-32, device="cpu")
            compiled(words, numbers, tiny, 1.0, [torch.empty(2 * BLOCK - 1, device="cpu")])
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
