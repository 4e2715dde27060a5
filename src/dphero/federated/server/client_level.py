"""A guarantee to whole clients: clipped updates of equal weight, Poisson-sampled clients, noise at the server.

    w ← w + ( Σ_{i sampled} clip_S(w_i − w) + σ S z ) / (q K),     z ~ N(0, I)

Each of K clients is asked independently with probability q = sampled / K. One client, with all its data, moves the sum
by at most S; the divisor is public. So a round is the Poisson-sampled Gaussian mechanism on clients, DP-SGD(q, σ), and
is priced as that. A round that nobody takes part in is a release, too. The server draws lots and noise, and must be
trusted for this guarantee; the clients need not add any noise for it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord

from dphero.accounting import Ledger, PoissonGaussian
from dphero.federated.server.rounds import Rounds
from dphero.noise import FastNoise, NoiseSource, SecureNoise


class ClientLevelRounds(Rounds):
    """FedAvg with a ledger of its own, for whole clients."""

    releases_always = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ledger = Ledger()

    @property
    def _rate(self) -> float:
        return self.federation.sampled / self.federation.clients

    def sample(self, number: int, names: list[str]) -> list[str]:
        """Return the clients of a round, each of them with probability q, by a secret seed."""
        seed = secrets.randbits(128) if self.recipe.seed is None else _key(self.recipe.seed, "clients", number)
        generator = np.random.Generator(np.random.Philox(key=seed))
        known = sorted(names, key=lambda name: (len(name), name))[: self.federation.clients]
        return [name for name, drawn in zip(known, generator.random(len(known)), strict=True) if drawn < self._rate]

    def combine(self, server_round: int, accepted: list[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up clipped updates, charge the ledger, add noise."""
        sigma, clip = self.federation.client_noise_multiplier, self.federation.client_clip
        assert sigma is not None
        total = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in self.model.items()}
        for reply in accepted:
            moved = {
                name: torch.from_numpy(reply.content["arrays"][name].numpy().astype(np.float64) - value)
                for name, value in self.model.items()
            }
            length = float(torch.stack([value.square().sum() for value in moved.values()]).sum().sqrt())
            for name, value in moved.items():
                total[name] += value * min(1.0, clip / max(length, 1e-300))
        self.ledger.record(PoissonGaussian(self._rate, sigma))
        noise = [torch.empty_like(value) for value in total.values()]
        self._noise(self.round.number).fill(noise, sigma * clip, 0, bound_to=list(total.values()))
        expected = self._rate * self.federation.clients
        found = {
            name: Array((self.model[name] + ((value + drawn) / expected).numpy()).astype(self.model[name].dtype))
            for (name, value), drawn in zip(total.items(), noise, strict=True)
        }
        return ArrayRecord(found), MetricRecord({"averaged": len(accepted)})

    def _noise(self, number: int) -> NoiseSource:
        return SecureNoise() if self.recipe.seed is None else FastNoise(_key(self.recipe.seed, "noise", number))

    def state(self) -> dict[str, Any]:
        return {"ledger": self.ledger.to_json()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.ledger = Ledger.from_json(state["ledger"])


def _key(seed: int, purpose: str, number: int) -> int:
    text = f"client level {purpose} {number} {seed}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest())
