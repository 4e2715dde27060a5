"""What a federation is: who takes part, how often, and how their updates are put together."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from dphero._checks import one_of, positive, whole

Partition = Literal["iid", "dirichlet", "shards"]
Strategy = Literal["fedavg", "fedprox", "scaffold", "fednova"]
Shared = Literal["none", "generated", "distilled", "distilled-published"]
Controls = Literal["update", "gradient"]
Weights = Literal["records", "equal"]


@dataclass(frozen=True)
class Federation:
    """The public settings of a federated training. What one client does in a round is in the recipe.

    Attributes:
        clients: How many clients there are.
        sampled: How many of them take part in a round.
        rounds: How many rounds there are.
        local_epochs: Passes over its own data that a client makes in a round.
        partition: How a simulation deals the examples out to the clients.
        alpha: Concentration of ``partition="dirichlet"``: small values give each client few classes.
        shards: Pieces of one label each that a client gets under ``partition="shards"``.
        strategy: How updates are put together.
        proximal_mu: Weight of FedProx's pull back to the global model.
        controls: Where SCAFFOLD's control variates come from: the ``update`` that is sent anyway (free), or a
            ``gradient`` of their own at the global model (a second release, charged).
        shared: What clients give to a data set that all of them train on; see
            :mod:`dphero.federated.sharing.distillation`.
        sharing_budget: The share of a client's ε that it may spend on that.
        unsound: Consent to ``shared="distilled-published"``.
        weights: By what an update is weighted: the client's declared, public number of ``records``, or ``equal``.
        participations: Rounds that a client's budget has to last for; ``None``: as many as it takes part in on average.
        max_update_norm: A longer update is rejected, in multiples of the global model's length (at least 1).
        client_noise_multiplier: σ of the noise that the server adds for a guarantee to whole clients; ``None``: none.
        client_clip: The longest update that then counts in full.
        patience: Seconds that the server waits for clients to be there: all of them at first, later as many as it
            samples.
        answer_seconds: Seconds that a client has for its answer.
        seed: Decides partition and sampling of clients. Public: it has nothing to do with noise.
    """

    clients: int = 10
    sampled: int = 5
    rounds: int = 20
    local_epochs: float = 1.0
    partition: Partition = "iid"
    alpha: float = 0.5
    shards: int = 2
    strategy: Strategy = "fedavg"
    proximal_mu: float = 0.1
    controls: Controls = "update"
    shared: Shared = "none"
    sharing_budget: float = 0.5
    unsound: bool = False
    weights: Weights = "records"
    participations: int | None = None
    max_update_norm: float = 10.0
    client_noise_multiplier: float | None = None
    client_clip: float = 1.0
    patience: float = 600.0
    answer_seconds: float = 3600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("clients", "sampled", "rounds", "shards"):
            whole(name, getattr(self, name))
        if self.participations is not None:
            whole("participations", self.participations)
        for name in ("local_epochs", "alpha", "max_update_norm", "patience", "answer_seconds"):
            positive(name, getattr(self, name))
        if self.proximal_mu < 0:
            raise ValueError(f"proximal_mu must not be negative, got {self.proximal_mu:g}")
        if self.sampled > self.clients:
            raise ValueError(f"{self.sampled} clients cannot be sampled: there are {self.clients}")
        one_of("partition", self.partition, get_args(Partition))
        one_of("strategy", self.strategy, get_args(Strategy))
        one_of("weights", self.weights, get_args(Weights))
        one_of("controls", self.controls, get_args(Controls))
        one_of("shared", self.shared, get_args(Shared))
        if not 0 < self.sharing_budget < 1:
            raise ValueError(f"sharing_budget must lie between 0 and 1, got {self.sharing_budget:g}")
        if self.shared == "distilled-published" and not self.unsound:
            raise ValueError(
                "shared='distilled-published' is FedFed as published: labels in the clear, one noise for many images, "
                "epsilon infinite. To study it, consent with --unsound; to share with privacy, take generated"
            )
        if self.shared != "none" and self.client_noise_multiplier is not None:
            raise ValueError(
                f"a guarantee to whole clients does not cover what they give to a shared data set: take --shared none, "
                f"not {self.shared}, or leave out --client-noise-multiplier"
            )
        positive("client_clip", self.client_clip)
        if self.client_noise_multiplier is not None:
            self._require_client_level()

    def _require_client_level(self) -> None:
        """Refuse what the noise of a guarantee to whole clients would not cover."""
        positive("client_noise_multiplier", self.client_noise_multiplier)
        if self.weights != "equal":
            raise ValueError(
                "a guarantee to whole clients needs updates of equal weight: weights that follow from clients' numbers "
                "of records let one client move the average by more than its clipped update. Give --weights equal"
            )
        if self.strategy not in ("fedavg", "fedprox"):
            raise ValueError(
                f"a guarantee to whole clients is not priced for strategy {self.strategy!r}, which uses more of a "
                "client than its clipped update: take fedavg or fedprox"
            )

    @property
    def planned_participations(self) -> int:
        """How many rounds a client's budget is divided among: on average it takes part in so many."""
        if self.participations is not None:
            return self.participations
        return max(1, round(self.rounds * self.sampled / self.clients))

    def as_dict(self) -> dict[str, Any]:
        """Return all settings as plain values; :meth:`from_dict` reads them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Federation:
        """Return the settings that :meth:`as_dict` wrote.

        Raises:
            ValueError: If a name is unknown or a value wrong.
        """
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"the federation sets {', '.join(unknown)}, which this dphero does not know")
        return cls(**values)


def public_seed(seed: int | None) -> int:
    """Return the seed of the public choices: a function of the run's secret seed that does not tell it, or fresh."""
    if seed is None:
        return secrets.randbits(63)
    return int.from_bytes(hashlib.blake2b(f"federation {seed}".encode(), digest_size=8).digest()) >> 1


def partition_name(federation: Federation) -> str:
    """Return what reports call a partition."""
    if federation.partition == "dirichlet":
        return f"dirichlet({federation.alpha:g})"
    return f"shards({federation.shards})" if federation.partition == "shards" else federation.partition
