"""The server: its settings come from the run config."""

from dphero.federated.deployment import server_app

app = server_app()
