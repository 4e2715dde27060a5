"""Checkpoints: complete, loadable without running code, and written so that a crash loses nothing.

The file is what ``torch.save`` writes, with a SHA-256 digest of all of it at its end. The digest is checked before
anything else is read, so that what was damaged on a disk or on a way is named, and never used.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from os import PathLike
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from torch import Tensor

from dphero._files import DamagedFile, has_zip_seal, open_zip, read_bytes, seal_zip, write_atomically

_VERSION, _UNSEALED_VERSION = 2, 1
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds."""

    engine: dict[str, Any]  # state of the run
    scheduler: dict[str, Any] | None  # state of the learning-rate scheduler, or None
    extra: dict[str, Any]  # the user's own values
    random: dict[str, Any]  # states of the generators of torch, numpy and Python (dropout, augmentation)

    def restore_random(self) -> None:
        """Put the global generators where they were."""
        torch.set_rng_state(self.random["cpu"])
        if self.random["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(self.random["cuda"])
        kind, words, position, has_gauss, gauss = self.random["numpy"]
        np.random.set_state((kind, words.numpy(), position, has_gauss, gauss))
        version, state, following = self.random["python"]
        random.setstate((version, tuple(state), following))


@contextmanager
def unchanged_on_failure(*parts: Any) -> Iterator[None]:
    """Put everything back if a ``with`` block fails: what is loaded is loaded whole, or not at all.

    That is all parts with ``state_dict`` and ``load_state_dict`` (modules, optimizers), and the global generators.
    """
    before = [(part, copy.deepcopy(part.state_dict())) for part in parts]
    generators = _random_state()
    try:
        yield
    except BaseException:
        for part, state in before:
            part.load_state_dict(state)
        Checkpoint({}, None, {}, generators).restore_random()
        raise


def save(path: str | PathLike[str], engine: Mapping[str, Any], scheduler: Any, extra: Mapping[str, Any] | None) -> None:
    """Write a checkpoint beside ``path``, flush it to disk, then put it in its place in one move.

    Only the owner may read the file: it holds the key of the noise.

    Raises:
        ValueError: If a value could not be loaded again without running code; nothing is written then.
        OSError: If the file cannot be written, as on a full disk; what was there before is whole.
    """
    contents = {
        "version": _VERSION,
        "engine": dict(engine),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "extra": dict(extra or {}),
        "random": _random_state(),
    }
    for part in ("engine", "scheduler", "extra"):
        _require_plain(contents[part], part)
    packed = BytesIO()  # by torch, in memory: writing a file itself, it would hide what the file system says
    torch.save(contents, packed)
    seal_zip(packed)
    write_atomically(path, packed.getbuffer(), private=True)


def load(path: str | PathLike[str]) -> Checkpoint:
    """Read a checkpoint; nothing is restored yet.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If the file is damaged, or no checkpoint of this kind.
    """
    try:
        read = read_bytes(path)
        sealed = _is_sealed(read, path)
        contents = torch.load(BytesIO(read), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path} is not a readable checkpoint: {error}") from error
    version = contents.get("version") if isinstance(contents, dict) else None
    if version not in (_VERSION, _UNSEALED_VERSION):
        raise ValueError(f"{path}: checkpoint version {version!r} is not supported (expected {_VERSION})")
    if version == _VERSION and not sealed:
        raise ValueError(
            f"{path} is not a readable checkpoint: {DamagedFile(path, 'the digest that was written with it is gone')}"
        )
    return Checkpoint(**{name: contents[name] for name in ("engine", "scheduler", "extra", "random")})


def _is_sealed(contents: bytes, path: str | PathLike[str]) -> bool:
    """Tell whether a file has a digest, which then is right. An older one has only the checksums of its parts.

    Raises:
        DamagedFile: If a digest or a checksum is wrong.
    """
    if has_zip_seal(contents):
        open_zip(contents, path)
        return True
    with ZipFile(BytesIO(contents)) as archive:  # torch itself does not look at them
        if (bad := archive.testzip()) is not None:
            raise DamagedFile(path, f"the checksum of its part {bad!r} is wrong")
    return False


def _random_state() -> dict[str, Any]:
    kind, words, *rest = np.random.get_state(legacy=True)
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (kind, torch.from_numpy(np.array(words)), *rest),
        "python": random.getstate(),
    }


def _require_plain(value: Any, where: str) -> None:
    """Raise unless ``torch.load(weights_only=True)`` will take the value."""
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        return
    if type(value) in (dict, OrderedDict, Counter):
        for name, item in value.items():
            _require_plain(name, where)
            _require_plain(item, f"{where}[{name!r}]")
    elif type(value) in (list, tuple, set):
        for item in value:
            _require_plain(item, where)
    else:
        raise ValueError(
            f"{where} holds a {type(value).__name__}, which could not be loaded without running code; save tensors and "
            "plain values (numbers, strings, lists, dictionaries)"
        )
