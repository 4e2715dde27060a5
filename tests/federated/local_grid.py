"""A grid without processes."""

from collections.abc import Iterable
from uuid import uuid4

from flwr.supercore.task_identity import TaskIdentity

SETTINGS = {"data": "digits", "lot": 32, "lr": 0.5, "momentum": 0.0, "accountant": "rdp"}
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # that of the process that sends messages


class LocalGrid:
    """Delivers messages to an app by calling it: what Flower's grid does, without processes.

    ``spoil(node, message, reply)`` may return another reply, or ``None`` for none at all.
    """

    def __init__(self, app, clients, spoil=lambda node, message, reply: reply):
        self.app, self.spoil = app, spoil
        self.nodes = {1000 + 7 * number: number for number in range(clients)}
        self.asked = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def send_and_receive(self, messages, *, timeout=None):
        from flwr.app import Context, RecordDict

        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self.asked.append((message.metadata.message_type, self.nodes[node]))
            config = {"partition-id": self.nodes[node], "num-partitions": len(self.nodes)}
            context = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
            reply = self.spoil(self.nodes[node], message, self.app(message, context))
            if reply is not None:
                replies.append(reply)
        return replies
