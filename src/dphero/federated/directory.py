"""The directory of a federated run: that of any run, and the federation's settings."""

from __future__ import annotations

from pathlib import Path

from dphero.experiments.runs.files import read_json, to_json, write_text
from dphero.experiments.runs.rundir import RunDirectory
from dphero.federated.settings import Federation
from dphero.methods.recipe import Recipe


def create(path: Path, recipe: Recipe, federation: Federation) -> RunDirectory:
    """Make the directory of a new federated run.

    Raises:
        ValueError: If a run is in it already.
    """
    directory = RunDirectory.create(path, recipe)
    write_text(directory.path / "federation.json", to_json(federation.as_dict(), indent=2) + "\n")
    return directory


def federation_of(directory: RunDirectory) -> Federation:
    """Return the settings of a federated run.

    Raises:
        ValueError: If it is none.
    """
    path = directory.path / "federation.json"
    if not path.exists():
        raise ValueError(f"{directory.path} is no federated run: there is no federation.json in it")
    return Federation.from_dict(read_json(path))
