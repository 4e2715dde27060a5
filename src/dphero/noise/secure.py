"""Gaussian noise from a cryptographic key that is never saved."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import torch

from dphero.noise.key_stream import KeyStream
from dphero.noise.source import OneTimeSource, Target


class SecureNoise(OneTimeSource):
    """Gaussian noise from a cryptographic key stream: AES-256 in counter mode, key from the operating system.

    Each release has a key of its own, hashed from the key and its number. The 64-bit words of its stream become
    Gaussians in float64 (:mod:`dphero.noise.key_stream`), which are rounded once to the tensor's type. Tails reach 9.42
    standard deviations. Whoever predicts the noise from other noise breaks AES or BLAKE2.

    The key lives in memory only. After `load_state_dict`, and in a forked process, a new key is drawn:
    nothing is ever replayed, and a resumed run is not bitwise the unbroken one. Noise for other devices is
    made on the CPU and copied.

    What it does not promise: adding float32 noise to a float32 sum still shows the grid of floating-point
    numbers. A caller who must exclude that attack adds in float64 (pass float64 tensors) and rounds
    afterwards.
    """

    def __init__(self, *, _key: bytes | None = None) -> None:
        super().__init__()
        self._stream = KeyStream()
        self._start(_key)  # only tests of the distribution give a key

    def _start(self, key: bytes | None = None) -> None:
        self._seeded, self._key = key is not None, key or secrets.token_bytes(32)

    @property
    def seeded(self) -> bool:
        """False: the operating system chooses the key, and no user can."""
        return self._seeded

    def state_dict(self) -> dict[str, Any]:
        """The last release; the key is not saved."""
        return {"source": "SecureNoise", "last_release": self._last_release}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last release of the saved run, under a new key."""
        self._notice_fork()
        self._last_release = self.read_last_release(state)
        self._start()

    def _enter_new_process(self) -> None:
        self._start()

    def _draw(self, targets: list[Target], release: int) -> None:
        key = hashlib.blake2b(release.to_bytes(8, "big"), key=self._key, digest_size=32).digest()
        self._stream.draw(targets, torch.float64, key)
