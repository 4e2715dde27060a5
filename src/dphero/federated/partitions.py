"""Who holds which examples, in a simulation: identical shares, Dirichlet shares of each class, shards of one label.

Pure functions of labels and seed. Nothing here is released: in a deployment each client simply has its own data.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dphero.federated.settings import Federation

Indices = NDArray[np.int64]
_TRIES = 1000


def split(labels: NDArray[np.integer], federation: Federation) -> list[Indices]:
    """Deal examples out to the clients of a federation.

    Args:
        labels: The label of every example.
        federation: How many clients, which partition, its parameters and seed.

    Returns:
        For each client the sorted numbers of its examples. Together they are all examples, each one once.

    Raises:
        ValueError: If there are too few examples for so many clients.
    """
    generator = np.random.default_rng([federation.seed, 1])
    if len(labels) < federation.clients:
        raise ValueError(f"{len(labels)} examples cannot be dealt out to {federation.clients} clients")
    if federation.partition == "iid":
        return iid(len(labels), federation.clients, generator)
    if federation.partition == "dirichlet":
        return dirichlet(labels, federation.clients, federation.alpha, generator)
    return shards(labels, federation.clients, federation.shards, generator)


def iid(records: int, clients: int, generator: np.random.Generator) -> list[Indices]:
    """Deal shuffled examples out in equal shares (sizes differ by one at most)."""
    order = generator.permutation(records).astype(np.int64)
    return [np.sort(part) for part in np.array_split(order, clients)]


def dirichlet(labels: NDArray[np.integer], clients: int, alpha: float, generator: np.random.Generator) -> list[Indices]:
    """Deal each class out in shares drawn from Dirichlet(α), as FedFed (Yang et al. 2023) does.

    For each class, p ~ Dir(α, …, α) over the clients; clients that hold N/K examples already get none of it. All is
    drawn again until every client has as many examples as there are classes.
    """
    classes = np.unique(labels)
    least = len(classes)
    if least * clients > len(labels):
        raise ValueError(
            f"{len(labels)} examples are too few for {clients} clients with at least {least} each: take fewer clients"
        )
    for _ in range(_TRIES):
        held: list[list[Indices]] = [[] for _ in range(clients)]
        sizes = np.zeros(clients)
        for label in classes:
            members = generator.permutation(np.flatnonzero(labels == label)).astype(np.int64)
            shares = generator.dirichlet(np.full(clients, alpha)) * (sizes < len(labels) / clients)
            total = shares.sum()
            if total <= 0:  # all of the drawn mass was on clients that have enough
                break
            cuts = (np.cumsum(shares / total) * len(members)).astype(int)[:-1]
            for client, part in enumerate(np.split(members, cuts)):
                held[client].append(part)
                sizes[client] += len(part)
        if sizes.sum() == len(labels) and sizes.min() >= least:
            return [np.sort(np.concatenate(parts)) for parts in held]
    raise ValueError(
        f"no Dirichlet({alpha:g}) partition with at least {least} examples for each of {clients} clients was found in "
        f"{_TRIES} draws: take a larger --alpha or fewer clients"
    )


def shards(labels: NDArray[np.integer], clients: int, each: int, generator: np.random.Generator) -> list[Indices]:
    """Sort examples by label, cut them into ``clients × each`` pieces, and deal ``each`` pieces to every client."""
    if clients * each > len(labels):
        raise ValueError(f"{len(labels)} examples cannot be cut into {clients * each} shards: take fewer --shards")
    shuffled = generator.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")].astype(np.int64)
    pieces = np.array_split(order, clients * each)
    dealt = generator.permutation(len(pieces)).reshape(clients, each)
    return [np.sort(np.concatenate([pieces[piece] for piece in mine])) for mine in dealt]


def counts(labels: NDArray[np.integer], parts: list[Indices], classes: int) -> NDArray[np.int64]:
    """Return how many examples of each class (columns) each client (rows) holds."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts]).astype(np.int64)
