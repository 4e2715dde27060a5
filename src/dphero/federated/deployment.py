"""The same clients and server on many machines: Flower apps that read their settings from Flower.

*Run config* (``flwr run --run-config``, or the app's ``pyproject.toml``): what everybody may know, under the names of
the command line. *Node config* (``flower-supernode --node-config``): what a client alone decides.

================  ====================================================================================================
node config
================  ====================================================================================================
``data``          the client's own data, as ``dphero train --data`` takes it; or ``partition-id`` of the run's data
``channels``      of the images in it, if it is a folder: 3, unless given, or 1
``home``          the directory of its ledger, which must outlive every process; no two clients may share one
``name``          by which the server knows it; ``partition-id`` unless given
``epsilon``       its budget for all rounds of all time, and
``delta``         its δ; or
``not-private``   true: consent to train without privacy
``dataset-size``  its public number of records, or ``"public"``
================  ====================================================================================================

Whatever a server asks for, noise is calibrated to the client's own budget, and the client answers nothing beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from dphero import data as datasets
from dphero import experiments
from dphero.data import Data, Split
from dphero.experiments import RunDirectory
from dphero.federated.client.app import make_client_app
from dphero.federated.client.training_round import Client, require_federable
from dphero.federated.defaults import DEFAULTS
from dphero.federated.directory import create, federation_of
from dphero.federated.partitions import split
from dphero.federated.server.app import Server
from dphero.federated.settings import Federation
from dphero.methods.recipe import Recipe

_THEIRS = (
    "data",
    "channels",
    "home",
    "name",
    "epsilon",
    "delta",
    "not-private",
    "dataset-size",
    "partition-id",
    "num-partitions",
)
_PUBLIC = (
    "data",
    "model",
    "method",
    "lot",
    "lr",
    "momentum",
    "optimizer",
    "clip",
    "clipping",
    "guidance",
    "accountant",
    "channels",
)


def client_app() -> ClientApp:
    """Return the Flower app of a client."""
    return make_client_app(_client, _name)


def server_app() -> ServerApp:
    """Return the Flower app of the server.

    Its run config has, besides, ``out``: the run's directory. If a run was begun there, it goes on.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        recipe, federation = _settings(context.run_config)
        out = Path(str(context.run_config["out"]))
        if (out / "federation.json").exists():
            directory = RunDirectory.open(out)
            federation = federation_of(directory)
        else:
            directory = create(out, recipe, federation)  # without ε or σ: each client has its own
        with directory.locked():
            server = Server(directory, federation, datasets.load(recipe.data, recipe.channels))
            server.run(grid)
            server.finish()

    return app


def _settings(config: Mapping[str, Any]) -> tuple[Recipe, Federation]:
    """Return what everybody may know.

    Raises:
        ValueError: If a name is unknown; a client's own settings are none of the server's business.
    """
    federated = {each.name.replace("_", "-"): each.name for each in fields(Federation)}
    known = {*federated, *_PUBLIC, "out"}
    if unknown := sorted(set(config) - known):
        raise ValueError(f"the run config sets {', '.join(unknown)}; it may set {', '.join(sorted(known))}")
    if ":" in str(config.get("model", "")):
        raise ValueError(f"model {config['model']!r} names code: in a deployment take a built-in one (dphero methods)")
    given = {name: config[name] for name in _PUBLIC if name in config}
    recipe = experiments.resolve(DEFAULTS.get(str(given.get("data")), {}), given)
    return recipe, Federation(**{name: config[key] for key, name in federated.items() if key in config})


def _name(context: Context) -> str:
    node = context.node_config
    return str(node.get("name", node.get("partition-id", f"node {context.node_id}")))


def _client(context: Context) -> Client:
    """Return the client of a node, by its own settings.

    Raises:
        ValueError: If it does not say what it may spend, or where it keeps its ledger.
    """
    node = context.node_config
    if unknown := sorted(set(node) - set(_THEIRS)):
        raise ValueError(f"--node-config sets {', '.join(unknown)}; it may set {', '.join(_THEIRS)}")
    recipe, federation = _settings(context.run_config)
    if "home" not in node:
        raise ValueError('--node-config must say home="…": where this client keeps its ledger')
    if ("epsilon" in node) == bool(node.get("not-private", False)):
        raise ValueError("--node-config must say epsilon=…: the budget of this client (or not-private=true)")
    given = {key: node[key] for key in ("epsilon", "delta") if key in node}
    own = experiments.resolve(recipe.as_dict(), given, {"dataset_size": node.get("dataset-size", recipe.dataset_size)})
    require_federable(own)
    return Client(_name(context), own, federation, _data(node, own, federation), Path(str(node["home"])))


def _data(node: Mapping[str, Any], recipe: Recipe, federation: Federation) -> Data:
    """Return a client's own data, or its part of the run's."""
    if "data" in node:
        return datasets.load(str(node["data"]), node.get("channels"))
    data = datasets.load(recipe.data, recipe.channels)
    part = split(data.train.labels.numpy(), federation)[int(node["partition-id"])]
    return replace(data, train=Split(data.train.images[part], data.train.labels[part]))
