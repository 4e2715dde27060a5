"""A round of the server: clients sampled by name, bad updates left out, the others put together by Flower's FedAvg."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from dphero.federated.settings import Federation
from dphero.federated.updates import problem_with
from dphero.methods.recipe import Recipe

logger = logging.getLogger(__name__)

WEIGHT = "weight"  # of an update, in its metrics
_ASKING = 60.0  # seconds that new nodes have to say who they are


@dataclass
class Round:
    """What happened in a round, by the names of clients.

    Attributes:
        number: From 1.
        sampled: Who was asked.
        averaged: Whose updates were averaged.
        declined: Who declined, and why: their budgets are used up.
        rejected: Whose updates were rejected, and why.
        failed: Who did not answer, or could not.
    """

    number: int
    sampled: list[str] = field(default_factory=list)
    averaged: list[str] = field(default_factory=list)
    declined: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class Roster:
    """Who is there, and what is known of them.

    Attributes:
        names: The name of every node that said who it is.
        epsilons: What each client's answers have cost so far, as it reports.
        ledgers: Each client's ledger, as it reports.
        exhausted: Who declined: their budgets are used up, and they are not asked again.
        abandoned: Whether nobody will come any more: what runs the clients has failed.
    """

    names: dict[int, str] = field(default_factory=dict)
    epsilons: dict[str, float] = field(default_factory=dict)
    ledgers: dict[str, str] = field(default_factory=dict)
    exhausted: set[str] = field(default_factory=set)
    abandoned: bool = False

    def wait(self, grid: Grid, wanted: int, patience: float) -> dict[str, int]:
        """Return the nodes that are there once so many of them can be asked, or patience is at an end.

        Raises:
            ConnectionError: If nobody will come any more.
        """
        until = time.monotonic() + patience
        while True:
            if self.abandoned:
                raise ConnectionError("what runs the clients has failed")
            online = self.online(grid)
            ready = {name: node for name, node in online.items() if name not in self.exhausted}
            if len(ready) >= wanted - len(self.exhausted) or time.monotonic() >= until:
                return ready
            time.sleep(min(1.0, patience))

    def online(self, grid: Grid) -> dict[str, int]:
        """Return the nodes that are there by their clients' names; new ones are asked for theirs."""
        nodes = sorted(grid.get_node_ids())
        unknown = [node for node in nodes if node not in self.names]
        if unknown:
            asked = [
                Message(content=RecordDict(), message_type=MessageType.QUERY, dst_node_id=node) for node in unknown
            ]
            for reply in grid.send_and_receive(asked, timeout=_ASKING):
                if not reply.has_error():
                    self.names[reply.metadata.src_node_id] = str(reply.content["client"]["name"])
        found: dict[str, int] = {}
        for node in nodes:
            name = self.names.get(node)
            if name is not None:
                found[name if name not in found else f"{name} (node {node})"] = node
        return found

    def name(self, node: int) -> str:
        """Return a node's name, or its number if it has not told it."""
        return self.names.get(node, f"node {node}")


class _Chosen:
    """A grid of the nodes that were sampled for a round; everything else is the real grid's."""

    def __init__(self, grid: Grid, nodes: list[int]) -> None:
        self._grid, self._nodes = grid, nodes

    def get_node_ids(self) -> list[int]:
        return self._nodes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)


class Rounds(FedAvg):
    """FedAvg over clients sampled by name, from updates that could be checked.

    Weights are public by declaration: a client's number of records, or 1. Nobody's update is averaged that has other
    names, shapes or types than the model, is not finite, or is absurdly long; who sent it is named.

    Args:
        federation: The settings.
        roster: Who is there; kept up to date.
        recipe: How the clients train.
        first_round: Rounds that were finished before, in a run that is resumed.
        noted: Called with what happened in a round, after its updates were averaged.
        options: Of Flower's strategy.
    """

    releases_always = False
    """Whether a round without updates is a release, too."""

    def __init__(
        self,
        federation: Federation,
        roster: Roster,
        recipe: Recipe,
        *,
        first_round: int = 0,
        noted: Callable[[Round], None] = lambda happened: None,
        **options: Any,
    ) -> None:
        super().__init__(
            fraction_train=1.0,  # of those that were sampled by name
            fraction_evaluate=0.0,  # accuracies on clients' data would be released without noise
            min_train_nodes=1,
            min_available_nodes=1,
            weighted_by_key=WEIGHT,
            **options,
        )
        self.federation, self.roster, self.recipe = federation, roster, recipe
        self.first_round, self.noted = first_round, noted
        self.round = Round(first_round)
        self.model: dict[str, Any] = {}  # the global model of the round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients, and ask them."""
        number = self.first_round + server_round
        self.model = {name: value.numpy() for name, value in arrays.items()}
        wanted = self.federation.clients if server_round == 1 else self.federation.sampled
        online = self.roster.wait(grid, wanted, self.federation.patience)
        chosen = self.sample(number, list(online))
        self.round = Round(number, sampled=chosen)
        if not chosen:
            return []
        nodes = [online[name] for name in chosen]
        return super().configure_train(number, arrays, config, _Chosen(grid, nodes))

    def sample(self, number: int, names: list[str]) -> list[str]:
        """Return the clients of a round: so many, uniformly, without replacement, by the public seed."""
        generator = np.random.default_rng([self.federation.seed, 2, number])
        size = min(self.federation.sampled, len(names))
        return sorted(generator.choice(sorted(names, key=_order), size, replace=False).tolist(), key=_order)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the updates that can be."""
        # of a node that is gone, the SuperLink itself says so: that is "no answer"
        known = [each for each in replies if each.metadata.src_node_id in self.roster.names]
        named = sorted(((self.roster.name(each.metadata.src_node_id), each) for each in known), key=_by_name)
        accepted = [reply for name, reply in named if self._accepts(name, reply)]
        answered = {name for name, _ in named}
        for name in self.round.sampled:
            if name not in answered:
                self.round.failed[name] = "no answer"
        arrays, metrics = self.combine(server_round, accepted) if accepted or self.releases_always else (None, None)
        self.noted(self.round)
        return arrays, metrics

    def combine(self, server_round: int, accepted: list[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average accepted updates, by Flower's own weighted mean."""
        return super().aggregate_train(server_round, accepted)

    def further_problem(self, reply: Message) -> str | None:
        """Return what is wrong with the rest of an accepted update, for strategies that send more."""
        return None

    def state(self) -> dict[str, Any]:
        """Return what the coming rounds depend on, besides the model, as tensors and plain values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""

    def _accepts(self, name: str, reply: Message) -> bool:
        """Take note of a reply; return whether it brings an update that can be averaged."""
        if reply.has_error():
            self.round.failed[name] = f"error {reply.error.code}"
            return False
        try:
            about = reply.content["client"]
            if "failed" in about:
                self.round.failed[name] = str(about["failed"])
                return False
            self.roster.ledgers[name] = str(about["ledger"])
            self.roster.epsilons[name] = float(about["epsilon"])
            if "declined" in about:
                self.round.declined[name] = str(about["declined"])
                self.roster.exhausted.add(name)
                return False
            update = {key: value.numpy() for key, value in reply.content["arrays"].items()}
            metrics = reply.content["metrics"]
            limit = self.federation.max_update_norm
            problem = problem_with(update, self.model, metrics[WEIGHT], int(metrics["steps"]), max_norm=limit)
            problem = problem or self.further_problem(reply)
        except Exception as error:  # whatever a client may have sent instead of an update
            problem = f"it is no update ({type(error).__name__})"
        if problem is not None:
            logger.warning("round %d: the update of client %s is rejected: %s", self.round.number, name, problem)
            self.round.rejected[name] = problem
            return False
        self.round.averaged.append(name)
        return True


def _order(name: str) -> tuple[int, str]:
    """Numbers in their order, then other names."""
    return (int(name), "") if name.isdecimal() else (1 << 62, name)


def _by_name(pair: tuple[str, Message]) -> tuple[int, str]:
    return _order(pair[0])
