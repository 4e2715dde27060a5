"""A noise source of the user's own: trusted, except for what can be seen from its numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dphero.noise.fast import FastNoise
from dphero.noise.secure import SecureNoise
from dphero.noise.source import NoiseSource, Tensors

_T = 40.0  # e⁻⁴⁰: how seldom honest noise is refused for its size
_HEAD = 64  # numbers by which the noise of a release is known again
_FEWEST = 8  # with fewer, two honest releases might agree


class OwnNoise:
    """Hands out a user's noise, and refuses what cannot be independent N(0, std²).

    Checked at each release: that every number was written and is finite; that the mean square of all noise so far is
    std², as far as chance allows (Laurent and Massart's bounds); that the noise is not that of an earlier release, of
    this run or of the checkpoint it went on from. None of that is a proof.

    Args:
        source: The user's; it must not have served any release.

    Raises:
        ValueError: If it is no noise source, or one that served already.
    """

    def __init__(self, source: NoiseSource) -> None:
        if isinstance(source, type) or not isinstance(source, NoiseSource):
            raise ValueError(f"noise= takes an object that keeps the dphero.noise.NoiseSource contract, not {source!r}")
        if type(source) in (FastNoise, SecureNoise, OwnNoise):
            raise ValueError(f"{type(source).__name__} is built in: leave noise= out; secure= and seed= choose it")
        self.source, self.name = source, f"{type(source).__module__}.{type(source).__qualname__}"
        last = source.read_last_release(source.state_dict())
        if last != -1:
            raise ValueError(f"your noise source {self.name} has served {last + 1} releases already: make a new one")
        self._count, self._squares = 0, 0.0  # of all noise so far, at std 1
        self._seen: set[int] = set()

    @property
    def note(self) -> str:
        """What the statement has to say of this source."""
        return (
            f"The noise came from your own source {self.name}; its promise is not proven by dphero. The bound holds if "
            "its numbers were independent, Gaussian of the asked size, unpredictable, and never used twice."
        )

    @property
    def seeded(self) -> bool:
        """Whether a user chose the seed."""
        return self.source.seeded

    def fill(self, tensors: Tensors, std: float, release: int, *, bound_to: Sequence[Tensor] = ()) -> None:
        """Overwrite every tensor in place with the user's noise; see `NoiseSource.fill`.

        Raises:
            RuntimeError: If the noise is not what the source promises.
        """
        listed = list(tensors.values() if isinstance(tensors, Mapping) else tensors)
        for tensor in listed:
            tensor.fill_(math.nan)
        self.source.fill(tensors, std, release, bound_to=bound_to)
        self._require(
            all(bool(tensor.isfinite().all()) for tensor in listed), "some number was not written, or is not finite"
        )
        if std > 0:
            self._require_size(listed, std)
            self._require_new(listed)

    def _require_size(self, tensors: Sequence[Tensor], std: float) -> None:
        self._count += sum(tensor.numel() for tensor in tensors)
        self._squares += sum(float((tensor.double() / std).square().sum()) for tensor in tensors)
        room = 2 * math.sqrt(self._count * _T)
        self._require(
            self._count - room <= self._squares <= self._count + room + 2 * _T,
            f"the standard deviation of {self._count} numbers is {math.sqrt(self._squares / self._count):.4g} times "
            "what was asked for",
        )

    def _require_new(self, tensors: Sequence[Tensor]) -> None:
        head = torch.cat([tensor.flatten()[:_HEAD].double().cpu() for tensor in tensors])[:_HEAD]
        if len(head) < _FEWEST:
            return
        mark = int.from_bytes(hashlib.blake2b(head.numpy().tobytes(), digest_size=7).digest())
        self._require(mark not in self._seen, "it is the noise of an earlier release")
        self._seen.add(mark)

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise RuntimeError(
                f"your noise source {self.name} breaks its promise, and nothing is released: {otherwise}. It must fill "
                "every tensor with independent N(0, std²), and never hand out the same noise twice."
            )

    def state_dict(self) -> dict[str, Any]:
        """The state of the user's source, under the name of its class, and how to know its noise again."""
        return {"source": self.name, "own": self.source.state_dict(), "seen": sorted(self._seen)}

    def read_last_release(self, state: Mapping[str, Any]) -> int:
        """Return the index of the last release of a saved source, which must be of the same class."""
        if state.get("source") != self.name:
            raise ValueError(
                f"the checkpoint's noise came from {state.get('source')!r}, this engine's comes from {self.name!r}: "
                "resume with the kind of noise source that the run was started with"
            )
        return self.source.read_last_release(state["own"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last release of the saved run."""
        self.read_last_release(state)
        self.source.load_state_dict(state["own"])
        self._seen |= set(state["seen"])
