"""Where the process's random generators stand: Python's, numpy's and torch's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def torch_generators(own: Sequence[torch.Generator] = ()) -> list[torch.Generator]:
    """Return torch's generators: of the CPU, of GPUs in use, and those that are given."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *devices, *own]


class RandomState:
    """Where all generators stand when this is made.

    Args:
        own: Generators besides the global ones.
        besides: A kind of devices whose generators are left out.
    """

    def __init__(self, own: Sequence[torch.Generator] = (), besides: str | None = None) -> None:
        generators = [each for each in torch_generators(own) if each.device.type != besides]
        self._torch = [(generator, generator.get_state()) for generator in generators]
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Put all generators back."""
        for generator, state in self._torch:
            generator.set_state(state)
        np.random.set_state(self._numpy)
        random.setstate(self._python)

    @property
    def is_current(self) -> bool:
        """Whether nothing was drawn since."""
        name, words, *rest = self._numpy
        now: Any = np.random.get_state()
        return (
            all(torch.equal(state, generator.get_state()) for generator, state in self._torch)
            and (name, rest) == (now[0], [*now[2:]])
            and np.array_equal(words, now[1])
            and self._python == random.getstate()
        )


@contextmanager
def generators_restored(own: Sequence[torch.Generator] = ()) -> Iterator[RandomState]:
    """Put all generators back at the end of a ``with`` block; what is handed over can do so before."""
    state = RandomState(own)
    try:
        yield state
    finally:
        state.restore()


def seed_generators(seed: int, own: Sequence[torch.Generator] = ()) -> None:
    """Let all generators start from a number."""
    random.seed(seed)
    np.random.seed(seed)
    for generator in torch_generators(own):
        generator.manual_seed(seed)
