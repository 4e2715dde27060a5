"""Where numpy's global generator stands: read and put back without going through Python, which takes numpy 0.1 ms.

A private step does that twice. So the 624 words of the Mersenne twister, and its place among them, are copied from
where numpy keeps them for code in C. Not there is the one normal that numpy's older functions may have in store. As
long as the words are those at which there was known to be none, there is none: to put one in store takes words.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import numpy as np

_WORDS = 624


class NumpyGenerator:
    """Reads and sets numpy's global generator."""

    def __init__(self) -> None:
        self._generator: Any = None  # whose memory this is
        self._memory: memoryview | None = None
        self._empty = b""  # the words at which no normal was in store

    def state(self) -> Any:
        """Return where it stands; equal to another such value if that is the same place."""
        words = self._words()
        if words and words == self._empty:
            return words, 0, 0.0
        found: Any = np.random.get_state(legacy=False)
        if not words:
            return pickle.dumps(found)
        has_normal, normal = int(found["has_gauss"]), float(found["gauss"])
        self._empty = b"" if has_normal else words
        return words, has_normal, normal if has_normal else 0.0

    def set_state(self, state: Any) -> None:
        """Put it back to where it stood when :meth:`state` returned that."""
        now = self._words()
        if isinstance(state, bytes):
            np.random.set_state(pickle.loads(state))
            return
        words, has_normal, normal = state
        if now and now == self._empty and not has_normal:
            assert self._memory is not None
            self._memory[:] = words
        else:
            numbers = np.frombuffer(words, dtype=np.uint32)
            np.random.set_state(("MT19937", numbers[:_WORDS], int(numbers[_WORDS]), has_normal, normal))
        self._empty = b"" if has_normal else words

    def seed(self, seed: Any) -> None:
        """Start it from a seed."""
        np.random.seed(seed)
        self._empty = self._words()

    def _words(self) -> bytes:
        """Return the words and the place among them; none where they cannot be read."""
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._generator:  # the user may have put another in its place
            self._generator, self._memory, self._empty = generator, _memory_of(generator), b""
        return b"" if self._memory is None else self._memory.tobytes()


def _memory_of(generator: Any) -> memoryview | None:
    """Return where a Mersenne twister keeps its words and its place; ``None`` if it is not as it is known to be."""
    if type(generator) is not np.random.MT19937:
        return None
    address = generator.ctypes.state_address
    memory = memoryview((ctypes.c_uint32 * (_WORDS + 1)).from_address(address)).cast("B")
    known = generator.state["state"]
    return memory if memory.tobytes() == known["key"].tobytes() + np.uint32(known["pos"]).tobytes() else None


numpy_generator = NumpyGenerator()
