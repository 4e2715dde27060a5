"""Attacks on what federated training claims: rounds that are forgotten, epochs that ride for free, FedFed's noise."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from _attack import Attack, Figures, refused

from dphero import data as datasets
from dphero import experiments
from dphero.accounting import Ledger, price
from dphero.data import Split
from dphero.experiments.runs.preparation import prepare
from dphero.federated.client import local_training
from dphero.federated.client import training_round as client
from dphero.federated.client.files import ClientFiles, ClientState
from dphero.federated.client.training_round import Client
from dphero.federated.requests import Declined, Request
from dphero.federated.settings import Federation
from dphero.federated.sharing import distillation as sharing

DELTA, ROUNDS, RECORDS = 1e-4, 10, 300
SETTINGS = {"data": "digits", "lot": 32, "lr": 0.5, "momentum": 0.0, "accountant": "rdp", "seed": 1}


def answers(guards: dict[Any, tuple[str, Any]], **settings: Any) -> list[Any]:
    """Ask one client ten times, with some guards taken away; return what it answers."""
    digits = datasets.load("digits")
    data = replace(digits, train=Split(digits.train.images[:RECORDS], digits.train.labels[:RECORDS]))
    recipe = experiments.resolve(SETTINGS, settings)
    task, _ = prepare(recipe, data)
    weights = {name: value.detach().clone() for name, value in task.module.state_dict().items()}
    federation, found = Federation(clients=1, sampled=1, rounds=ROUNDS, participations=1), []
    with TemporaryDirectory() as folder, ExitStack() as stack:
        for owner, (name, replacement) in guards.items():
            stack.enter_context(patch.object(owner, name, replacement))
        for number in range(1, ROUNDS + 1):
            found.append(Client("a", recipe, federation, data, Path(folder) / "a").answer(Request(number, weights)))
    return found


def per_round_accounting() -> Figures:
    """A client that begins every round with an empty ledger, as one does whose accountant lives in its process."""
    found = answers({ClientFiles: ("load", lambda self: ClientState())}, epsilon=4.0)
    truth = Ledger()
    for answer in found:
        for event, count in answer.ledger:
            truth.record(event, count)
    return {"claimed": found[-1].epsilon, "true": price(truth, DELTA, "rdp").epsilon, "answered": len(found)}


def persistent_ledger() -> Figures:
    found = answers({}, epsilon=4.0)
    given = [answer for answer in found if not isinstance(answer, Declined)]
    return {"claimed": given[-1].epsilon, "answered": len(given), "declined": len(found) - len(given)}


def epochs_for_free() -> Figures:
    """Every round numbers its shuffled epochs from 0: ten rounds cost what one does."""
    guards = {
        local_training: ("_require_engine", lambda trainer, task: None),
        client: ("_planned", lambda *plan: Ledger()),
    }
    with patch.object(local_training, "_ADD_UP", (object,)):
        found = answers(guards, method="dp-mp", noise_multiplier=4.0, accountant="zcdp")
    first, last = (price(each.ledger, DELTA, "zcdp").epsilon for each in (found[0], found[-1]))
    return {"claimed after 1 round": first, "claimed after 10 rounds": last}


def differences(kind: str) -> Figures:
    """Two images of one batch: how far their released difference is from the true one, over its size."""
    data = datasets.load("digits")
    with patch.object(sharing, "train_generator", _blind):
        if kind == "published":
            given, _ = sharing._published(data, 1437, 128)
        else:
            recipe = experiments.resolve(SETTINGS, {"epsilon": 4.0})
            federation = Federation(shared="distilled", sharing_budget=0.99)
            given, _ = sharing.share(data, 1437, recipe, federation, Ledger(), 1)
    released, true = (images[0].flatten() - images[1].flatten() for images in (given.images, data.train.images))
    return {"relative error of a difference": float((released - true).norm() / true.norm())}


class _Blind:
    """A q that remembers nothing: x_p = x, so that the true difference is known."""

    size = 64

    def remember(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(rows), self.size)


def _blind(*arguments: Any, **options: Any) -> tuple[_Blind, Ledger]:
    return _Blind(), Ledger()


ATTACKS = [
    Attack(
        "federated: rounds that are forgotten",
        "A server asks a client in ten rounds, each in a new process of the client.",
        per_round_accounting,
        persistent_ledger,
    ),
    Attack(
        "federated: epochs for free",
        "Clients train with a method whose shuffled epochs are numbered anew in every round.",
        epochs_for_free,
        lambda: refused(lambda: answers({}, method="dp-mp", noise_multiplier=4.0)),
    ),
    Attack(
        "federated: FedFed's noise",
        "An attacker subtracts two shared images of one batch (before: as published; after: --shared distilled).",
        lambda: differences("published"),
        lambda: differences("distilled"),
    ),
]
