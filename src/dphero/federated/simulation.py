"""A whole federation on one machine: Flower's simulation, each client a turn of one of Ray's workers."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from dphero import data as datasets
from dphero.data import Data, Split
from dphero.experiments.runs.rundir import RunDirectory
from dphero.experiments.stopping import Interrupted, stoppable
from dphero.federated.client.app import make_client_app
from dphero.federated.client.training_round import Client
from dphero.federated.directory import federation_of
from dphero.federated.partitions import counts, split
from dphero.federated.plots import plot_partition
from dphero.federated.server.app import RoundProgress, Server
from dphero.federated.settings import Federation, partition_name
from dphero.methods.recipe import Recipe


def simulate(
    directory: RunDirectory,
    *,
    report: Callable[[RoundProgress], None] = lambda progress: None,
    data: Data | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Run, or go on with, a federated run on this machine; return its result.

    A finished run is not touched. A run that was killed goes on with the round in which it was: clients that had
    answered send the same answer again, and pay nothing for it.

    Args:
        directory: The run.
        report: Called after every round.
        data: The server's data, if it is loaded already; the workers load theirs.
        workers: Processes that act as clients; one for each core unless given.

    Raises:
        Interrupted: If the process was asked to stop; the run was saved after its round.
        OSError: If Ray could not be started, or failed.
        ValueError: For settings that cannot be trained.
    """
    if directory.result is not None:
        return directory.result
    federation, home = federation_of(directory), directory.path / "clients"
    with directory.locked(), stoppable("round") as asked_to_stop:
        data = datasets.load(directory.recipe.data, directory.recipe.channels) if data is None else data
        _draw(directory, federation, data)  # what cannot be dealt out is said before anything starts
        with _quietly():
            server = Server(directory, federation, data, report=report, asked_to_stop=asked_to_stop, homes=home)
        server_app = ServerApp()

        @server_app.main()
        def main(grid: Grid, context: Context) -> None:
            server.run(grid)

        client_app = simulated_clients(directory.recipe, federation, home)
        with _quietly(), _readably(server):
            run_simulation(
                server_app=server_app,
                client_app=client_app,
                num_supernodes=federation.clients,
                backend_config=_backend(workers or os.cpu_count() or 1),
            )
        return server.finish()


@contextmanager
def _readably(server: Server) -> Iterator[None]:
    """Say in one line why Ray failed; the server, which waits for clients in a thread, ends too.

    Raises:
        OSError: If it did.
    """
    try:
        yield
    except Interrupted:
        raise
    except RuntimeError as error:
        server.roster.abandoned = True
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        path = server.directory.checkpoint
        again = f" Go on with: dphero federate --resume {path.parent}" if path.exists() else ""
        raise OSError(
            f"Ray, which runs the simulated clients, failed: {cause} A machine that is busy or short of memory may "
            f"need another try, with fewer --workers.{again}"
        ) from error


def _draw(directory: RunDirectory, federation: Federation, data: Data) -> None:
    """Draw who holds what, for the owner of a simulation."""
    labels = data.train.labels.numpy()
    held = counts(labels, split(labels, federation), len(data.classes))
    path = directory.path / "partition"
    if not path.with_suffix(".csv").exists():
        plot_partition(held, data.classes, path, title=f"{data.name}: {partition_name(federation)}")


def simulated_clients(recipe: Recipe, federation: Federation, homes: Path) -> ClientApp:
    """Return the Flower app whose node number k is client k of a partition."""
    settings = json.dumps(federation.as_dict())

    def name_of(context: Context) -> str:
        return str(context.node_config["partition-id"])

    def client_of(context: Context) -> Client:
        number = int(context.node_config["partition-id"])
        data, parts = _dealt(recipe.data, recipe.channels, settings)
        chosen = parts[number]
        train = Split(data.train.images[chosen], data.train.labels[chosen])
        return Client(str(number), recipe, federation, replace(data, train=train), homes / str(number))

    return make_client_app(client_of, name_of)


@lru_cache(maxsize=1)
def _dealt(name: str, channels: int | None, settings: str) -> tuple[Data, list[Any]]:
    """Load the data and deal it out, once in each process."""
    data = datasets.load(name, channels)
    return data, split(data.train.labels.numpy(), Federation.from_dict(json.loads(settings)))


def _backend(workers: int) -> dict[str, Any]:
    return {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {
            "num_cpus": workers,
            "include_dashboard": False,
            "object_store_memory": 256 * 2**20,  # Ray would take a third of the machine's memory
            "log_to_driver": False,
        },
    }


@contextmanager
def _quietly() -> Iterator[None]:
    """Let Flower and Ray keep to themselves what they do: the rounds have a display, and errors come as exceptions."""
    found = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    for name, value in found.items():
        os.environ.setdefault(name, value)
    flower = logging.getLogger("flwr")
    before = flower.level
    flower.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        flower.setLevel(before)
