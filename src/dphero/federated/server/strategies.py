"""How the server puts accepted updates together: FedAvg and FedProx by Flower, SCAFFOLD and FedNova here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedProx
from numpy.typing import NDArray

from dphero.federated.server.client_level import ClientLevelRounds
from dphero.federated.server.rounds import WEIGHT, Roster, Rounds
from dphero.federated.settings import Federation
from dphero.federated.updates import problem_with
from dphero.methods.recipe import Recipe

_CONTROL = "control"  # SCAFFOLD's arrays in a message


class ProximalRounds(Rounds, FedProx):
    """FedProx (Li et al. 2020): clients are pulled back to the global model; the server averages as FedAvg does."""

    def __init__(self, federation: Federation, roster: Roster, recipe: Recipe, **options: Any) -> None:
        super().__init__(federation, roster, recipe, proximal_mu=federation.proximal_mu, **options)


class ClientLevelProximalRounds(ClientLevelRounds, FedProx):
    """FedProx with noise at the server."""

    def __init__(self, federation: Federation, roster: Roster, recipe: Recipe, **options: Any) -> None:
        super().__init__(federation, roster, recipe, proximal_mu=federation.proximal_mu, **options)


class ScaffoldRounds(Rounds):
    """SCAFFOLD (Karimireddy et al. 2020): clients correct their steps by c − c_i, the drift of their own data.

        w ← mean of w_i,     c ← c + (1/N) Σ Δc_i,     N all clients

    Updates are averaged with equal weights, as in its paper.
    """

    def __init__(self, federation: Federation, roster: Roster, recipe: Recipe, **options: Any) -> None:
        super().__init__(federation, roster, recipe, **options)
        self.control: dict[str, NDArray[Any]] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the control variate along with the model."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.control = self.control or {name: np.zeros_like(value) for name, value in self.model.items()}
        along = ArrayRecord({name: Array(value) for name, value in self.control.items()})
        for message in messages:
            message.content = RecordDict({**message.content, _CONTROL: along})
        return messages

    def further_problem(self, reply: Message) -> str | None:
        """Check the change of the client's control variate as an update is checked."""
        change = {key: value.numpy() for key, value in reply.content[_CONTROL].items()}
        zero = {name: np.zeros_like(value) for name, value in self.control.items()}
        problem = problem_with(change, zero, 1.0, 1, max_norm=1e6)
        return problem and f"its control variate: {problem}"

    def combine(self, server_round: int, accepted: list[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average models with equal weights, and add up the changes of control variates."""
        for reply in accepted:
            for name, value in reply.content[_CONTROL].items():
                self.control[name] = self.control[name] + value.numpy() / self.federation.clients
            content = {name: record for name, record in reply.content.items() if name != _CONTROL}
            reply.content = RecordDict({**content, "metrics": MetricRecord({**content["metrics"], WEIGHT: 1.0})})
        return super().combine(server_round, accepted)

    def state(self) -> dict[str, Any]:
        return {"control": {name: torch.from_numpy(value.copy()) for name, value in self.control.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.control = {name: value.numpy() for name, value in state["control"].items()}


class NovaRounds(Rounds):
    """FedNova (Wang et al. 2020): updates are divided by their numbers of steps, so that longer ones weigh no more.

        w ← w + τ Σ p_i (w_i − w) / a_i,     τ = Σ p_i a_i

    p_i are the weights; a_i is the length of τ_i steps of SGD with momentum ρ, which is τ_i for ρ = 0.
    """

    def combine(self, server_round: int, accepted: list[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average normalised updates."""
        weights = np.array([float(reply.content["metrics"][WEIGHT]) for reply in accepted])
        shares = weights / weights.sum()
        lengths = np.array([steps_length(int(r.content["metrics"]["steps"]), self.recipe.momentum) for r in accepted])
        effective = float(shares @ lengths)
        found = {}
        for name, start in self.model.items():
            moved = sum(
                share / length * (reply.content["arrays"][name].numpy().astype(np.float64) - start)
                for share, length, reply in zip(shares, lengths, accepted, strict=True)
            )
            found[name] = Array((start + effective * moved).astype(start.dtype))
        return ArrayRecord(found), MetricRecord({"steps": effective})


def steps_length(steps: int, momentum: float) -> float:
    """Return a: by how many learning rates that many steps of SGD with momentum move under a constant gradient."""
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def make_strategy(federation: Federation, roster: Roster, recipe: Recipe, **options: Any) -> Rounds:
    """Return the strategy of a federation.

    Raises:
        ValueError: If the recipe's optimizer is not the one that the strategy is made for.
    """
    plain = recipe.optimizer == "sgd" and recipe.momentum == 0
    if federation.strategy == "scaffold" and not plain:
        raise ValueError(
            "SCAFFOLD corrects plain SGD: its control variates are steps over the learning rate. Give --momentum 0"
        )
    if federation.strategy == "fednova" and recipe.optimizer != "sgd":
        raise ValueError(f"FedNova's lengths are those of SGD, not of {recipe.optimizer!r}: take optimizer sgd")
    kinds: dict[str, type[Rounds]] = {
        "fedavg": Rounds,
        "fedprox": ProximalRounds,
        "scaffold": ScaffoldRounds,
        "fednova": NovaRounds,
    }
    kind = kinds[federation.strategy]
    if federation.client_noise_multiplier is not None:
        kind = ClientLevelProximalRounds if federation.strategy == "fedprox" else ClientLevelRounds
    return kind(federation, roster, recipe, **options)
