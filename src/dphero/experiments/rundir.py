"""A run directory: everything that is kept of one training.

=====================  =================================================================================
``recipe.toml``        what was to be done, complete: ``dphero train --recipe`` repeats it
``environment.json``   versions and machine
``metrics.jsonl``      one line per evaluation
``ledger.json``        what was released
``checkpoint.pt``      everything that resuming needs, the key of the noise included: **as secret as the data**
``model.safetensors``  the trained weights
``model.json``         which network they belong to, the shape of its inputs, the names of its classes
``statement.txt``      what was promised (and ``statement.json``)
``result.json``        the outcome; there once the run is finished
``tensorboard/``       curves for TensorBoard
=====================  =================================================================================
"""

from __future__ import annotations

import fcntl
import os
import platform
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from dphero import recipe as recipes
from dphero.accounting import Ledger, Statement
from dphero.experiments.defaults import anchored
from dphero.experiments.files import damaged, for_owner, read_json, read_lines, to_json, write_atomically, write_text
from dphero.recipe import Recipe

__all__ = ["RunDirectory"]

_MAY_CHANGE = ("data", "device", "cuda_graphs")  # where it is: what the data holds is compared by its digest
_OUTCOMES = ("model.safetensors", "model.json", "statement.txt", "statement.json")  # what a training ends with


class RunDirectory:
    """The files of one run. Use :meth:`create` or :meth:`open`.

    Attributes:
        path: The directory.
        recipe: What the run does.
    """

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path, self.recipe = path, recipe

    @classmethod
    def create(cls, path: str | PathLike[str], recipe: Recipe) -> RunDirectory:
        """Make the directory of a new run.

        A run that was refused, or killed, before it had a key of its noise has released nothing: its place is free.

        Raises:
            ValueError: If a run is in it already.
            OSError: If it cannot be written.
        """
        directory = cls(Path(path), anchored(recipe))  # it may be resumed from elsewhere
        directory.path.mkdir(parents=True, exist_ok=True)
        with directory.locked():
            directory._refuse_if_begun()
            write_text(directory.path / "environment.json", to_json(_environment(), indent=2) + "\n")
            write_text(directory.path / "recipe.toml", directory.recipe.to_toml())
        return directory

    @classmethod
    def open(cls, path: str | PathLike[str]) -> RunDirectory:
        """Open the directory of a run that was begun before.

        Raises:
            ValueError: If there is no run in it.
        """
        path = Path(path)
        if not (path / "recipe.toml").is_file():
            raise ValueError(f"{path} is not the directory of a run: there is no recipe.toml in it")
        return cls(path, recipes.merge(recipes.load(path / "recipe.toml")))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training the same run.

        Raises:
            ValueError: If one does already.
        """
        with open(self.path / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process is training {self.path} at this moment") from None
            yield

    @property
    def checkpoint(self) -> Path:
        """The file that resuming needs."""
        return self.path / "checkpoint.pt"

    def refuse_without_key(self) -> None:
        """Raise if a training left its marks here, but not the checkpoint with the key of its noise.

        To begin again would add other noise to the same data, a second release, and write a ledger that has forgotten
        the first.

        Raises:
            ValueError: If so.
        """
        if self.checkpoint.exists():
            return
        releases = self._releases
        if releases or self.metrics or any((self.path / name).exists() for name in _OUTCOMES):
            raise ValueError(
                f"{self.path} was trained already ({releases} releases are on record), but the checkpoint with their "
                "key is gone, so it cannot go on; trained anew, it would spend its price again and forget the first "
                "time: begin a new run in another --out, and count both"
            )

    def require_same_recipe(self, begun: Mapping[str, Any] | None) -> None:
        """Raise if ``recipe.toml`` was edited since the run was begun, in more than where the data and the device are.

        Args:
            begun: The settings that the run was begun with, as its checkpoint has them; ``None`` if it does not tell.

        Raises:
            ValueError: If a setting differs; the message names it.
        """
        if begun is None:
            return
        now = self.recipe.as_dict()
        for name in sorted({*begun, *now} - set(_MAY_CHANGE)):
            was, is_now = begun.get(name), now.get(name)
            if was == is_now:
                continue
            # a seed is secret, and messages are not
            values = "was changed" if name == "seed" else f"was {_shown(was)} and is now {_shown(is_now)}"
            raise ValueError(
                f"{name} in {self.path / 'recipe.toml'} {values}, and a run goes on as it was begun: put the old value "
                "back, or begin a new run with the new one in another --out"
            )

    def _refuse_if_begun(self) -> None:
        """Raise unless nothing here came from a training."""
        if self.result is not None:
            raise ValueError(
                f"{self.path} holds a finished run: --resume {self.path} shows it; give another --out for a new one"
            )
        if self.checkpoint.exists():
            raise ValueError(f"{self.path} holds a run already: go on with --resume {self.path}, or give another --out")
        if (self.path / "recipe.toml").exists() and not (self.path / "environment.json").exists():
            raise ValueError(f"{self.path / 'recipe.toml'} is no run's, and would be overwritten: give another --out")
        self.refuse_without_key()

    @property
    def _releases(self) -> int:
        """How many releases are on record."""
        path = self.path / "ledger.json"
        try:
            return Ledger.from_json(path.read_text(encoding="utf-8")).steps if path.exists() else 0
        except ValueError as error:
            raise damaged(path, error) from error

    @property
    def result(self) -> dict[str, Any] | None:
        """The outcome, or ``None`` while the run is not finished. Its ``run`` is where the directory is now."""
        path = self.path / "result.json"
        if not path.exists():
            return None
        return {**read_json(path), "run": str(self.path)}

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the outcome: the last thing that a run does."""
        write_text(self.path / "result.json", to_json(dict(result), indent=2) + "\n", private=True)

    # -- metrics ------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The evaluations so far."""
        return read_lines(self.path / "metrics.jsonl")

    def add_metrics(self, values: Mapping[str, Any]) -> None:
        """Append one evaluation."""
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8", opener=for_owner) as file:
            file.write(to_json(dict(values)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def forget_metrics_after(self, step: int) -> None:
        """Drop the evaluations of steps that a checkpoint does not hold: they are about to be taken again."""
        kept = [line for line in self.metrics if line["step"] <= step]
        write_text(self.path / "metrics.jsonl", "".join(to_json(line) + "\n" for line in kept), private=True)

    # -- what was released --------------------------------------------------------------------------------

    def save_ledger(self, ledger: Ledger) -> None:
        """Write the ledger."""
        write_text(self.path / "ledger.json", ledger.to_json() + "\n")

    def save_statement(self, statement: Statement) -> None:
        """Write the privacy statement, for people and for machines."""
        write_text(self.path / "statement.txt", statement.text + "\n")
        write_text(self.path / "statement.json", to_json(statement.as_dict(), indent=2) + "\n")

    def save_model(self, model: torch.nn.Module) -> None:
        """Write the model's weights: what may be published, so whoever may read the user's files may read it."""
        from safetensors import SafetensorError
        from safetensors.torch import save_model

        def write(partial: Path) -> None:
            partial.touch()
            mode = stat.S_IMODE(partial.stat().st_mode)
            try:
                save_model(model, str(partial))  # makes a file of its own, for its owner only
            except SafetensorError as error:  # a full disk, for example
                raise OSError(f"the weights cannot be written to {self.path}: {error}") from error
            partial.chmod(mode)

        write_atomically(self.path / "model.safetensors", write)

    def save_signature(self, shape: tuple[int, ...], classes: tuple[str, ...]) -> None:
        """Write what the model takes and what its outputs mean: enough to use it without the training data."""
        values = {"model": self.recipe.model, "shape": list(shape), "classes": list(classes)}
        write_text(self.path / "model.json", to_json(values, indent=2) + "\n")

    def load_model(self, model: torch.nn.Module) -> None:
        """Read the weights of a finished run into a model."""
        from safetensors import SafetensorError
        from safetensors.torch import load_model

        path = self.path / "model.safetensors"
        if not path.exists():
            raise ValueError(
                f"{self.path} holds no trained model yet: finish it with dphero train --resume {self.path}"
            )
        try:
            load_model(model, str(path))
        except SafetensorError as error:
            raise damaged(path, error) from error


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


def _environment() -> dict[str, Any]:
    names = ("dphero", "torch", "numpy", "scipy", "dp-accounting")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {name: _version(name) for name in names},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
