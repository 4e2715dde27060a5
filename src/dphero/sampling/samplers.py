"""Who is in a lot: Poisson draws, or the batches of a shuffled epoch.

Each lot is a function of a key and its number, so that a resumed run draws what the unbroken one would have drawn.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np


class PoissonSampler:
    """Every example enters each lot independently with probability ``sample_rate``.

    The number of members is binomial and, given that number, every set of members is equally likely.

    Args:
        size: Number of records.
        sample_rate: q.
        key: Secret 128-bit key; lots are a function of (key, index). ``None`` draws every lot from fresh
            randomness of the operating system.
    """

    def __init__(self, size: int, sample_rate: float, key: int | None) -> None:
        self.size, self.sample_rate = size, sample_rate
        self.key: int | None = key
        self.lots_per_epoch = max(1, round(1 / sample_rate))

    @property
    def usual_sizes(self) -> list[int]:
        """Sizes for buffers. Private: one lot in six, and one in 30,000, is larger (1 and 4 standard deviations)."""
        mean = self.size * self.sample_rate
        deviation = math.sqrt(mean * (1 - self.sample_rate))
        return [min(self.size, math.ceil(mean + many * deviation)) for many in (1, 4)]

    def draw(self, lot: int) -> np.ndarray:
        """Return the indices of the examples of a lot, in O(lot)."""
        random = generator_of(self.key, lot)
        return _distinct(random, self.size, int(random.binomial(self.size, self.sample_rate)))

    def state_dict(self) -> dict[str, Any]:
        """Return the rate and the key; the number of records is private and left out."""
        return {"sampling": "poisson", "sample_rate": self.sample_rate, "key": _to_text(self.key)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the key of a sampler with the same rate; raise ``ValueError`` for another, and change nothing."""
        _require_same(state, self.state_dict())
        self.key = None if state["key"] is None else int(state["key"])


class ShuffleSampler:
    """Each epoch, a random permutation is cut in lots of fixed size: no amplification by sampling.

    Args:
        size: Number of records.
        lot_size: Examples in a lot; the last one of an epoch may be smaller.
        key: Secret 128-bit key; ``None`` draws one from the operating system. It is always saved: an epoch that
            is resumed must go on with the same permutation, or an example could take part in it twice.
        first_epoch: The number of the first epoch, larger than those that were charged before.
    """

    def __init__(self, size: int, lot_size: int, key: int | None, first_epoch: int = 0) -> None:
        self.size, self.lot_size, self.first_epoch = size, lot_size, first_epoch
        self.key: int | None = secrets.randbits(128) if key is None else key
        self.lots_per_epoch = -(-size // lot_size)
        self._epoch: tuple[int, np.ndarray] | None = None

    @property
    def usual_sizes(self) -> list[int]:
        """The size of all lots but the last of an epoch."""
        return [min(self.size, self.lot_size)]

    def draw(self, lot: int) -> np.ndarray:
        """Return the indices of the examples of a lot."""
        epoch, place = divmod(lot, self.lots_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, generator_of(self.key, epoch).permutation(self.size))
        return self._epoch[1][place * self.lot_size : (place + 1) * self.lot_size]

    def epoch(self, lot: int) -> int:
        """Return the number of the epoch that a lot belongs to."""
        return self.first_epoch + lot // self.lots_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes (public under the relation that shuffling is priced for) and the key."""
        sizes = {"sampling": "shuffle", "size": self.size, "lot_size": self.lot_size}
        return {**sizes, "key": _to_text(self.key), "first_epoch": self.first_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the key of a sampler with the same sizes."""
        _require_same(state, self.state_dict())
        self.key, self.first_epoch, self._epoch = int(state["key"]), int(state["first_epoch"]), None


Sampler = PoissonSampler | ShuffleSampler


def generator_of(key: int | None, number: int) -> np.random.Generator:
    """Return the generator of one lot (or epoch): the counter's upper words name it, the lowest counts draws."""
    if key is None:
        return np.random.Generator(np.random.PCG64(secrets.randbits(256)))
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, number, 0]))


def _distinct(random: np.random.Generator, size: int, count: int) -> np.ndarray:
    """Return a uniformly random set of ``count`` of ``range(size)``: the first distinct values of a stream."""
    if count > size // 2:
        return random.permutation(size)[:count]
    stream = np.empty(0, dtype=np.int64)
    while True:
        stream = np.concatenate([stream, random.integers(size, size=count // 2 + 8 if len(stream) else count + 8)])
        _, first = np.unique(stream, return_index=True)
        if len(first) >= count:
            return stream[np.sort(first)[:count]]


def _to_text(key: int | None) -> str | None:
    return None if key is None else str(key)


def _require_same(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise unless a saved sampler has our settings, and a key where we have one."""
    for name in ours.keys() | saved.keys():
        theirs, here = saved.get(name), ours.get(name)
        if (theirs is None) != (here is None) or (name not in ("key", "first_epoch") and theirs != here):
            what = "secure=" if name == "key" else f"{name}: saved {theirs!r}, here {here!r}"
            raise ValueError(
                f"the checkpoint and this engine disagree on {what}; call make_private with the same arguments to "
                "resume"
            )
