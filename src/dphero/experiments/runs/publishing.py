"""What of a finished run may be published: exactly that, and nothing secret.

The weights, what is promised of them, and what anyone needs to use and check them. Not: losses and accuracies, which
were computed without noise; the checkpoint, which holds the key of the noise; the seed, from which that key comes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from dphero import __version__
from dphero._files import seal_json, write_atomically
from dphero.experiments.runs.files import parse_json, sha256, to_json
from dphero.experiments.runs.rundir import RunDirectory
from dphero.methods.recipe import Recipe

_WHY = {
    "model.safetensors": "the trained weights: what the guarantee is about",
    "model.json": "the network, the shape of its inputs and the names of its classes, all of them declared public",
    "statement.txt": "what is promised of the weights, and what is not",
    "statement.json": "the same, for programs",
    "ledger.json": "every release, from public numbers: anyone can compute the price anew",
    "environment.json": "versions and kind of machine",
    "recipe.toml": "the settings of the training, without its seed and without the places of files",
    "README.md": "what is here, made of the files above",
}
_GUESSABLE = 2**32  # seeds below can all be tried


def publish(run: str | PathLike[str], out: str | PathLike[str]) -> dict[str, str]:
    """Copy what may be published of a finished run into a new directory, with a manifest; code is not run.

    Args:
        run: The run's directory.
        out: The new directory; it may be there if it is empty.

    Returns:
        The files, each with the reason why it may be published.

    Raises:
        ValueError: If the run is not finished, a file of it is damaged, it guarantees nothing, its ε is no proven
            bound, its seed can be guessed, or ``out`` is not empty.
        OSError: If something cannot be read or written; nothing is left then.
    """
    directory, out = RunDirectory.open(run, trust=True), Path(out)
    _require_guarantee(directory)
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(f"{out} is there already: give -o a new directory")
    contents = _contents(directory)
    files = {
        name: {"sha256": sha256(content), "bytes": len(content), "why": _WHY[name]}
        for name, content in contents.items()
    }
    manifest = seal_json({"version": 1, "dphero": __version__, "files": files})
    contents["manifest.json"] = (to_json(manifest, indent=2) + "\n").encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        for name, content in contents.items():
            write_atomically(partial / name, content)
        with suppress(FileNotFoundError):
            out.rmdir()
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {**{name: _WHY[name] for name in files}, "manifest.json": "the SHA-256 digests of all of these"}


def _require_guarantee(directory: RunDirectory) -> None:
    """Refuse a run of which nothing is guaranteed: publishing it is not for a tool of privacy to prepare."""
    result, path = directory.result, directory.path
    if result is None:
        raise ValueError(f"{path} is not finished: dphero train --resume {path}")
    if result.get("epsilon") is None:
        raise ValueError(f"{path} guarantees nothing (ε is infinite, method {result.get('method')!r}): not published")
    if not result.get("is_bound"):
        raise ValueError(
            f"the ε of {path} is no proven bound (accountant {result.get('accountant')!r}, method "
            f"{result.get('method')!r}): not published; train by a sound method, with accountant pld"
        )
    seed = directory.recipe.seed
    if seed is not None and seed < _GUESSABLE:
        raise ValueError(
            f"the seed of {path} can be guessed, it is below 2**32, and who knows it can take the noise away again: "
            "train without --seed, or with a random one of 64 bits that stays secret"
        )


def _contents(directory: RunDirectory) -> dict[str, bytes]:
    """Return the files, each verified."""
    found = {name: directory.read(name) for name in _WHY if name not in ("recipe.toml", "README.md")}
    environment = parse_json(found["environment.json"], directory.path / "environment.json")
    environment.pop("command", None)  # older runs kept the command line, and the seed in it
    found["environment.json"] = (to_json(environment, indent=2) + "\n").encode()
    found["recipe.toml"] = _without_secrets(directory.recipe).to_toml().encode()
    found["README.md"] = _readme(found["statement.txt"].decode(), directory.signature()).encode()
    return {name: found[name] for name in _WHY}


def _without_secrets(recipe: Recipe) -> Recipe:
    """Return the recipe without its seed; of paths, which tell of people and machines, the last part is left."""
    options = {name: _last_part(value) for name, value in recipe.options.items()}
    return recipe.with_(seed=None, data=_last_part(recipe.data), options=options)


def _last_part(value: Any) -> Any:
    return os.path.basename(os.path.normpath(value)) if isinstance(value, str) and os.sep in value else value


def _readme(statement: str, signature: Mapping[str, Any]) -> str:
    rows = "\n".join(f"| `{name}` | {why} |" for name, why in _WHY.items() if name != "README.md")
    shape = "×".join(map(str, signature["shape"]))
    return f"""# A model trained with differential privacy

{statement.strip()}

| file | what it is, and why it may be published |
|---|---|
{rows}
| `manifest.json` | the SHA-256 digests of all files |

The network is `{signature["model"]}`; it takes inputs of shape {shape} and tells {len(signature["classes"])} classes
apart. `dphero predict DIRECTORY FILE` uses it and checks the digests first; `dphero.accounting.Ledger.from_json` reads
the ledger, from which the price can be computed anew. A digest finds accidents, not forgers: ask whoever published this
for that of `manifest.json`.

Accuracies on the private data are not here: they were computed without noise.
"""
