"""The server's side of the shared data set: asks every client once, checks, joins, and sends it to all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from dphero._files import open_zip, read_bytes, seal_zip, write_atomically
from dphero.data import Split
from dphero.federated.server.rounds import Roster
from dphero.federated.settings import Federation

logger = logging.getLogger(__name__)

_FARTHEST = 1e3  # a pixel beyond it is no pixel, however noisy


def gather(
    grid: Grid,
    roster: Roster,
    federation: Federation,
    path: Path,
    shape: tuple[int, ...],
    classes: int,
    where: Callable[[Sequence[str]], str],
) -> Split:
    """Return the shared data set: from the file, or what the clients give, which is then kept there.

    ``where`` says where clients by these names wrote down why they failed.

    Raises:
        ValueError: If no client gives anything.
    """
    if path.exists():
        found = torch.load(BytesIO(open_zip(read_bytes(path), path)), map_location="cpu", weights_only=True)
        return Split(found["images"], found["labels"])
    online = roster.wait(grid, federation.clients, federation.patience)
    asked = [Message(content=RecordDict(), message_type="train.share", dst_node_id=node) for node in online.values()]
    given, failed = [], list[str]()
    for reply in sorted(
        grid.send_and_receive(asked, timeout=federation.answer_seconds),
        key=lambda each: roster.name(each.metadata.src_node_id),
    ):
        name = roster.name(reply.metadata.src_node_id)
        try:
            about = reply.content["client"]
            if "failed" in about:
                failed.append(name)
                continue
            roster.ledgers[name], roster.epsilons[name] = str(about["ledger"]), float(about["epsilon"])
            arrays = reply.content["arrays"]
            images, labels = (torch.from_numpy(arrays[each].numpy().copy()) for each in ("images", "labels"))
            split = Split(images, labels)  # refuses what is not finite, or of the wrong type
            if tuple(images.shape[1:]) != shape or int(labels.max()) >= classes or images.abs().max() > _FARTHEST:
                raise ValueError("images or labels are not those of the data")
        except Exception as error:  # whatever a client may have sent
            logger.warning("what client %s gives to the shared set is rejected: %s", name, type(error).__name__)
            continue
        given.append(split)
    if not given:
        raise ValueError(f"no client gave anything to the shared data set{where(failed)}")
    if failed:
        logger.warning("nothing to share came from clients that failed: %s%s", ", ".join(failed), where(failed))
    joined = Split(torch.cat([each.images for each in given]), torch.cat([each.labels for each in given]))
    packed = BytesIO()
    torch.save({"images": joined.images, "labels": joined.labels}, packed)
    seal_zip(packed)
    write_atomically(path, packed.getvalue())
    return joined


def distribute(grid: Grid, roster: Roster, federation: Federation, shared: Split) -> None:
    """Send the shared data set to every client that is there."""
    content = RecordDict({"arrays": ArrayRecord({"images": shared.images, "labels": shared.labels})})
    nodes = roster.online(grid).values()
    messages = [Message(content=content, message_type="train.shared", dst_node_id=node) for node in nodes]
    list(grid.send_and_receive(messages, timeout=federation.answer_seconds))
