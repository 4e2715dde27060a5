"""A run directory: everything that is kept of one training.

=====================  =================================================================================
``recipe.toml``        what was to be done, complete, the seed included: ``dphero train --recipe`` repeats it
``environment.json``   versions and machine
``metrics.jsonl``      one line per evaluation
``ledger.json``        what was released
``checkpoint.pt``      everything that resuming needs, the key of the noise included: **as secret as the data**
``model.safetensors``  the trained weights
``snapshots/``         weights and released gradients at chosen epochs, if it was to keep them
``model.json``         which network they belong to, the shape of its inputs, the names of its classes
``statement.txt``      what was promised (and ``statement.json``)
``result.json``        the outcome; there once the run is finished
``tensorboard/``       curves for TensorBoard
=====================  =================================================================================

Nothing in it is believed before it is verified. While a run is not finished, its checkpoint decides: that carries a
digest of itself, the recipe that the run was begun with, and a digest of the metrics so far. Once it is finished,
``result.json`` decides, the last file to be written: that carries a digest of itself, the recipe, and the digests of
all other files.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from dphero._files import DamagedFile, open_for_lock, read_bytes, seal_json, write_atomically
from dphero.accounting import Ledger, Statement
from dphero.experiments.defaults import anchored
from dphero.experiments.environment import environment
from dphero.experiments.runs import files
from dphero.experiments.runs.snapshots import kept_files, step_of
from dphero.experiments.runs.weights import read_weights, write_weights
from dphero.methods import recipe as recipes
from dphero.methods.recipe import Recipe

logger = logging.getLogger(__name__)

_MAY_CHANGE = ("data", "device", "cuda_graphs")  # where it is: what the data holds is compared by its digest
_OUTCOMES = ("model.safetensors", "model.json", "statement.txt", "statement.json")  # what a training ends with
_VERIFIED = (*_OUTCOMES, "environment.json", "ledger.json", "metrics.jsonl")  # by result.json
_VERSION = 2  # of result.json: from here on it is sealed


class Busy(ValueError):
    """Another process is training the run."""


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
            files.write_text(directory.path / "environment.json", files.to_json(environment(), indent=2) + "\n")
            files.write_text(
                directory.path / "recipe.toml", directory.recipe.to_toml(), private=True
            )  # it holds the seed
        return directory

    @classmethod
    def open(cls, path: str | PathLike[str], *, trust: bool = False) -> RunDirectory:
        """Open the directory of a run that was begun before.

        Args:
            path: The directory.
            trust: Whether code that its recipe names (a network or data of the user's own) may be imported and run.

        Raises:
            ValueError: If there is no run in it, a file is damaged, or its recipe names code that is not trusted.
        """
        path = Path(path)
        if not os.path.lexists(path / "recipe.toml"):
            raise ValueError(f"{path} is not the directory of a run: there is no recipe.toml in it")
        text = cls._verified(path, "recipe.toml", files.digests(path))
        settings = recipes.parse(text, path / "recipe.toml")
        try:
            directory = cls(path, recipes.merge(settings))
        except ValueError as error:
            raise ValueError(f"{path / 'recipe.toml'}: {error}") from error
        directory.require_same_recipe((files.outcome(path) or {}).get("recipe"))
        recipes.require_trust(directory.recipe.as_dict(), path / "recipe.toml", trust)
        return directory

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training the same run.

        Raises:
            Busy: If one does already.
            ValueError: If the lock is no regular file.
        """
        with open(open_for_lock(self.path / ".lock"), "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(f"another process is training {self.path} at this moment") from None
            yield

    def read(self, name: str) -> bytes:
        """Return what a file of the run holds, verified if the run is finished.

        Raises:
            ValueError: If it is damaged, or is no regular file.
            OSError: If it cannot be read.
        """
        return self._verified(self.path, name, files.digests(self.path))

    @staticmethod
    def _verified(path: Path, name: str, digests: Mapping[str, str]) -> bytes:
        contents = read_bytes(path / name, follow=False)
        if digests.get(name, files.sha256(contents)) != files.sha256(contents):
            raise DamagedFile(path / name, "it is not what the run wrote when it finished, its SHA-256 digest differs")
        return contents

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
        kept = any(step_of(name) for name in kept_files(self.path))
        if releases or self.metrics or kept or any((self.path / name).exists() for name in _OUTCOMES):
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
        begun, now = (json.loads(json.dumps(each)) for each in (begun, self.recipe.as_dict()))
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
        return self.ledger.steps if os.path.lexists(self.path / "ledger.json") else 0

    @property
    def result(self) -> dict[str, Any] | None:
        """The outcome, or ``None`` while the run is not finished. Its ``run`` is where the directory is now."""
        found = files.outcome(self.path)
        if found is None:
            return None
        return {**{name: value for name, value in found.items() if name not in files.OF_FILES}, "run": str(self.path)}

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the outcome, with the digests of all other files: the last thing that a run does."""
        names = [*(name for name in _VERIFIED if (self.path / name).exists()), *kept_files(self.path)]
        digests = {name: files.sha256(self.read(name)) for name in names}
        plain = files.parse_json(files.to_json(dict(result)).encode(), self.path)
        sealed = seal_json({**plain, "version": _VERSION, "recipe": self.recipe.as_dict(), "files": digests})
        files.write_text(self.path / "result.json", files.to_json(sealed, indent=2) + "\n", private=True)

    # -- metrics ------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The evaluations so far."""
        path = self.path / "metrics.jsonl"
        return files.evaluations(path, self.read(path.name)) if os.path.lexists(path) else []

    def add_metrics(self, values: Mapping[str, Any]) -> None:
        """Append one evaluation."""
        files.append_line(self.path / "metrics.jsonl", files.to_json(dict(values)))

    @property
    def metrics_seal(self) -> dict[str, Any]:
        """Length and digest of the evaluations so far, for the checkpoint."""
        path = self.path / "metrics.jsonl"
        contents = read_bytes(path, follow=False) if os.path.lexists(path) else b""
        return {"bytes": len(contents), "sha256": files.sha256(contents)}

    def forget_metrics_after(self, step: int, seal: Mapping[str, Any] | None = None) -> None:
        """Drop the evaluations of steps that a checkpoint does not hold: they are about to be taken again.

        Args:
            step: The checkpoint's.
            seal: The :attr:`metrics_seal` that it holds; older ones have none.

        Raises:
            ValueError: If the evaluations that the checkpoint knows of are damaged.
        """
        path = self.path / "metrics.jsonl"
        if not os.path.lexists(path):
            if seal is not None and seal["bytes"]:
                logger.warning("%s is gone: the evaluations up to step %d are lost, the training is not", path, step)
            return
        kept = files.evaluations_until(path, read_bytes(path, follow=False), step, seal)
        write_atomically(path, kept, private=True)

    # -- what was released --------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """What was released, as the file has it.

        Raises:
            ValueError: If it is damaged.
            OSError: If it cannot be read.
        """
        path = self.path / "ledger.json"
        try:
            return Ledger.from_json(self.read(path.name))
        except DamagedFile:
            raise
        except ValueError as error:
            raise DamagedFile(path, error) from error

    def compare_ledger(self, ledger: Ledger) -> None:
        """Say so if the file does not begin with the checkpoint's ledger; it may go on from there: it is saved first.

        A damaged file costs nothing: it is about to be written anew, from the checkpoint.
        """
        try:
            whole = self.ledger.begins_with(ledger)
        except FileNotFoundError:
            return
        except ValueError as error:
            logger.warning("%s; it is written anew from the checkpoint", error)
        else:
            if not whole:
                logger.warning(
                    "%s is damaged: its releases are not those of the checkpoint; it is written anew from that",
                    self.path / "ledger.json",
                )

    def save_ledger(self, ledger: Ledger) -> None:
        """Write the ledger."""
        files.write_text(self.path / "ledger.json", ledger.to_json() + "\n")

    def save_statement(self, statement: Statement) -> None:
        """Write the privacy statement, for people and for machines."""
        files.write_text(self.path / "statement.txt", statement.text + "\n")
        files.write_text(self.path / "statement.json", files.to_json(statement.as_dict(), indent=2) + "\n")

    def save_model(self, model: torch.nn.Module) -> None:
        """Write the model's weights: what may be published, so whoever may read the user's files may read it."""
        write_weights(self.path / "model.safetensors", model)

    def save_signature(self, shape: tuple[int, ...], classes: tuple[str, ...]) -> None:
        """Write what the model takes and what its outputs mean: enough to use it without the training data."""
        values = {"model": self.recipe.model, "shape": list(shape), "classes": list(classes)}
        files.write_text(self.path / "model.json", files.to_json(values, indent=2) + "\n")

    def load_model(self, model: torch.nn.Module) -> None:
        """Read the weights of a finished run into a model."""
        self._require_model("model.safetensors")
        self.read("model.safetensors")
        read_weights(self.path / "model.safetensors", model)

    def _require_model(self, name: str) -> None:
        if not os.path.lexists(self.path / name):
            raise ValueError(
                f"{self.path} holds no trained model yet: finish it with dphero train --resume {self.path}"
            )

    def signature(self) -> dict[str, Any]:
        """Return what ``model.json`` says of the trained model: ``model``, ``shape``, ``classes``.

        Raises:
            ValueError: If the run has no model yet, or the file is damaged.
        """
        self._require_model("model.json")
        path = self.path / "model.json"
        found = files.parse_json(self.read(path.name), path, "model", "shape", "classes")
        if found["model"] != self.recipe.model:
            raise DamagedFile(path, f"it names model {found['model']!r}, and the run's recipe {self.recipe.model!r}")
        return found


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
