"""A client: its settings come from the run config and from the --node-config of its SuperNode."""

from dphero.federated.deployment import client_app

app = client_app()
