"""Checkpoints: complete, loadable without running code, and written so that a crash loses nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

__all__ = ["load", "save"]

_VERSION = 1


def save(
    path: str | PathLike[str],
    state: Mapping[str, Any],
    *,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint beside ``path``, flush it to disk, then put it in its place in one move."""
    path = Path(path)
    contents = {
        "version": _VERSION,
        "engine": dict(state),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "extra": dict(extra or {}),
        "random": {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        },
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def load(path: str | PathLike[str], *, scheduler: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a checkpoint; restore the scheduler and torch's own generators (dropout).

    Returns:
        The engine's state, and the extra values that were saved.

    Raises:
        ValueError: If the file is no checkpoint of this kind, or a scheduler is missing.
    """
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path} is not a readable checkpoint: {error}") from error
    if not isinstance(contents, dict) or contents.get("version") != _VERSION:
        version = contents.get("version") if isinstance(contents, dict) else None
        raise ValueError(f"{path}: checkpoint version {version!r} is not supported (expected {_VERSION})")
    if (contents["scheduler"] is None) != (scheduler is None):
        saved = "with" if contents["scheduler"] is not None else "without"
        raise ValueError(f"{path} was saved {saved} a scheduler; load it the same way")
    if scheduler is not None:
        scheduler.load_state_dict(contents["scheduler"])
    torch.set_rng_state(contents["random"]["cpu"])
    if contents["random"]["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(contents["random"]["cuda"])
    return contents["engine"], contents["extra"]
