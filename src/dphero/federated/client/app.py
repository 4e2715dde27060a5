"""The client as a Flower app: messages in, messages out, and nothing else leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from dphero.data import Split
from dphero.federated.client.training_round import Client, spent
from dphero.federated.requests import Declined, Request

logger = logging.getLogger(__name__)


def make_client_app(client_of: Callable[[Context], Client], name_of: Callable[[Context], str]) -> ClientApp:
    """Return a Flower app of clients.

    Args:
        client_of: Returns the client of a node.
        name_of: Returns its name; cheap, as every node is asked for it.
    """
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _reply(message, {"name": name_of(context)})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return guarded(_answer, message, context)

    @app.train("share")
    def share(message: Message, context: Context) -> Message:
        return guarded(_share, message, context)

    @app.train("shared")
    def shared(message: Message, context: Context) -> Message:
        return guarded(_keep_shared, message, context)

    def guarded(act: Callable[[Message, Client], Message], message: Message, context: Context) -> Message:
        name, client = name_of(context), None
        try:
            client = client_of(context)
            return act(message, client)
        except Exception as error:  # Flower would send the message of the error, which may tell of the data
            logger.exception("client %s failed", name)
            if client is not None:
                client.files.note_failure(error)
            return _reply(message, {"name": name, "failed": "the client failed; its own errors.log says why"})

    return app


def _answer(message: Message, client: Client) -> Message:
    config = message.content["config"]
    control = _tensors(message.content["control"]) if "control" in message.content else None
    request = Request(
        round=int(config["server-round"]),
        weights=_tensors(message.content["arrays"]),
        proximal_mu=float(config.get("proximal-mu", 0.0)),
        control=control,
    )
    answer = client.answer(request)
    if isinstance(answer, Declined):
        return _declined(message, client, answer)
    about = {"name": client.name, "epsilon": answer.epsilon, "ledger": answer.ledger.to_json()}
    records: dict[str, Any] = {
        "arrays": ArrayRecord(answer.weights),
        "metrics": MetricRecord({"weight": answer.weight, "steps": answer.steps}),
    }
    if answer.control is not None:
        records["control"] = ArrayRecord(answer.control)
    return _reply(message, about, records)


def _declined(message: Message, client: Client, answer: Declined) -> Message:
    ledger = client.files.load().ledger
    about = {
        "epsilon": spent(ledger, client.recipe, coarse=True),
        "ledger": ledger.to_json(),
        "declined": answer.reason,
    }
    return _reply(message, {"name": client.name, **about})


def _share(message: Message, client: Client) -> Message:
    found = client.share()
    if isinstance(found, Declined):
        return _declined(message, client, found)
    given, answer = found
    arrays = ArrayRecord({"images": given.images, "labels": given.labels})
    about = {"name": client.name, "epsilon": answer.epsilon, "ledger": answer.ledger.to_json()}
    return _reply(message, about, {"arrays": arrays})


def _keep_shared(message: Message, client: Client) -> Message:
    found = _tensors(message.content["arrays"])
    client.files.save_shared(Split(found["images"], found["labels"]))
    return _reply(message, {"name": client.name})


def _tensors(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value.numpy().copy()) for name, value in arrays.items()}


def _reply(message: Message, about: dict[str, Any], records: dict[str, Any] | None = None) -> Message:
    return Message(content=RecordDict({**(records or {}), "client": ConfigRecord(about)}), reply_to=message)
