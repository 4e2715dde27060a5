"""Secret random numbers while a batch is in the user's hands: augmentation, dropout, whatever the loop draws.

Dropout masks belong to rows, not to examples: one record more, and everybody behind it gets another mask. That is
harmless as long as nobody knows the masks: whatever they are, one record less with the same masks for others is just
as likely. Under ``torch.manual_seed(0)`` everybody knows them, and one record moves the sum by far more than the clip
norm.

So the global generators (torch on all devices, numpy, Python) start from a secret for each physical batch, when the
loader fetches it, and are put back when its gradients have been taken. The secret is a function of the sampler's key,
of the lot and of the batch: a resumed run draws what the unbroken one would have drawn.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch.utils.data import get_worker_info

from dphero.numerics.generators import RandomState, torch_generators

_WORDS = 624
"""32-bit words in the state of a Mersenne twister, which torch uses on the CPU."""
_FIRST_WORD = 3
"""Where they begin in the state of a torch generator, read as 64-bit words: one word in each."""


def secret(key: int | None, *numbers: int) -> bytes:
    """Return a secret that belongs to these numbers: a function of the key, or fresh if there is none."""
    if key is None:
        return secrets.token_bytes(32)
    return hashlib.blake2b(f"random numbers of {numbers}, {key}".encode(), digest_size=32).digest()


class SecretGenerators:
    """Swaps what the process's random generators draw, and puts back what they would have drawn.

    Not reached: generators that a data set or a loop makes for itself from a known seed, and code that seeds a global
    generator right before it draws from it.

    Attributes:
        own: Generators that belong to the model.
    """

    def __init__(self) -> None:
        self.own: list[torch.Generator] = []
        self._before: RandomState | None = None
        self._source = b""
        self._seed = 0
        self._calls = 0

    def begin(self, source: bytes) -> None:
        """Let all generators draw from a secret, until :meth:`end`."""
        self.end()
        self._source, self._calls = source, 0
        self._swap(source)

    def end(self) -> None:
        """Put the generators back to where they were; if somebody has seeded torch meanwhile, that stands."""
        before, self._before = self._before, None
        if before is not None and not self._reseeded():
            before.restore()

    def hold(self) -> None:
        """Called before the model runs: if somebody has seeded torch since the batch came, draw from a secret again."""
        if self._before is not None and self._reseeded():
            self._calls += 1
            self._swap(hashlib.blake2b(self._source + bytes([self._calls % 256]), digest_size=32).digest())

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let the generators stand, inside a ``with`` block, where they will stand after :meth:`end`."""
        if self._before is None or self._reseeded():
            yield
            return
        ours = RandomState(self.own)
        self._before.restore()
        try:
            yield
        finally:
            ours.restore()

    def _reseeded(self) -> bool:
        return any(generator.initial_seed() != self._seed for generator in torch_generators(self.own))

    def _swap(self, source: bytes) -> None:
        self._before = RandomState(self.own)
        self._seed = _start(source, torch_generators(self.own))


class SeededWorker:
    """What a worker of a loader does first: the user's own ``worker_init_fn``, then a secret for its generators."""

    def __init__(self, source: bytes, initialise: Callable[[int], None] | None) -> None:
        self._source, self._initialise = source, initialise

    def __call__(self, number: int) -> None:
        """Run in the worker of this number."""
        assert get_worker_info() is not None
        sources = [hashlib.blake2b(self._source + bytes([when]) + number.to_bytes(4)).digest() for when in (0, 1)]
        _start(
            sources[0], [torch.default_generator]
        )  # what the user's function makes of torch.initial_seed() is secret
        if self._initialise is not None:
            self._initialise(number)
        _start(sources[1], [torch.default_generator])


def _start(source: bytes, generators: list[torch.Generator]) -> int:
    """Let generators start from a secret, torch's all with one number for a seed; return that number.

    On the CPU torch uses 32 bits of a seed, which can be tried out one after another. So the whole state is set there.
    """
    stream = hashlib.shake_128(source).digest(4 * _WORDS + 40)
    words, rest = np.frombuffer(stream, dtype=np.uint32, count=_WORDS), stream[4 * _WORDS :]
    seed = int.from_bytes(rest[:8]) >> 1
    for generator in generators:
        if generator.device.type == "cpu":
            state = _seeded_state().clone()
            values = state.numpy().view(np.int64)
            values[0], values[_FIRST_WORD : _FIRST_WORD + _WORDS] = seed, words
            generator.set_state(state)
        else:
            generator.manual_seed(seed)
    np.random.seed(np.frombuffer(rest, dtype=np.uint32, count=4, offset=8))
    random.seed(rest[24:])
    return seed


@cache
def _seeded_state() -> torch.Tensor:
    """Return the state of a torch generator of the CPU that was seeded and has drawn nothing; its seed comes first."""
    return torch.Generator().manual_seed(0).get_state()
