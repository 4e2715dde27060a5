"""What a server asks of a client, and what it gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from dphero.accounting import Ledger


@dataclass(frozen=True)
class Request:
    """What a server asks of a client.

    Attributes:
        round: The number of the round, from 1.
        weights: The global model.
        proximal_mu: Weight of FedProx's pull back to the global model; 0 for none.
        control: SCAFFOLD's control variate of all clients, by parameter.
    """

    round: int
    weights: Mapping[str, Tensor]
    proximal_mu: float = 0.0
    control: Mapping[str, Tensor] | None = None

    @property
    def digest(self) -> str:
        """What the request is known by: the same request gets the same answer, any other one is a new release."""
        found = hashlib.sha256(json.dumps([self.round, self.proximal_mu]).encode())
        for kind, tensors in (("weights", self.weights), ("control", self.control or {})):
            for name in sorted(tensors):
                value = tensors[name].detach().cpu().contiguous()
                found.update(f"{kind} {name} {value.dtype} {tuple(value.shape)}".encode())
                found.update(value.numpy().tobytes())
        return found.hexdigest()


@dataclass(frozen=True)
class Answer:
    """What leaves a client.

    Attributes:
        weights: The model after the client's training, noise included.
        weight: Of this update in an average: the declared number of records, or 1.
        steps: How many noisy steps it is made of.
        epsilon: A bound on what all that ever left this client costs, at the client's own δ.
        ledger: All that ever left this client.
        control: By how much SCAFFOLD's control variate of this client changed.
    """

    weights: dict[str, Tensor]
    weight: float
    steps: int
    epsilon: float
    ledger: Ledger = field(repr=False)
    control: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Declined:
    """A client takes no part in a round: its budget would be exceeded."""

    reason: str
