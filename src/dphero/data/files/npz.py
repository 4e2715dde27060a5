"""The four arrays of an ``.npz`` file, under the names that are in use."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_IMAGES, _LABELS = ("x", "images", "image", "data"), ("y", "labels", "label", "targets")


def read(path: Path) -> tuple[list[NDArray[Any]], NDArray[Any] | None]:
    """Return training images and labels, test images and labels, and the class names if the file has ``classes``.

    The names are ``x_train``, ``y_train``, ``x_test``, ``y_test``; ``train_images``, ``train_labels`` and the like are
    understood as well. Pickled objects are never loaded.

    Raises:
        ValueError: If the file is damaged, holds pickled objects, or lacks an array.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError(f"{path} holds one array; needed are x_train, y_train, x_test, y_test")
            names = {name.lower(): name for name in file.files}
            keys = [
                _key(path, names, half, words, plain)
                for half in ("train", "test")
                for words, plain in ((_IMAGES, "x"), (_LABELS, "y"))
            ]
            for key in (*keys, *(names[name] for name in ("classes",) if name in names)):
                _require_whole(path, file, key)
            classes = file[names["classes"]] if "classes" in names else None
            return [file[key] for key in keys], classes
    except MemoryError as error:
        raise ValueError(f"{path} holds more than there is memory for: {error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, SyntaxError, RecursionError) as error:
        raise ValueError(f"{path} is not a whole .npz file: {error}") from error
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        if not _is_archive(path):
            raise ValueError(f"{path} is not an .npz file: np.savez makes one") from error
        raise ValueError(
            f"{path} holds pickled objects, which could run code and are not loaded; save plain arrays, names as "
            "np.array(names, dtype=str)"
        ) from error


def _is_archive(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _require_whole(path: Path, file: np.lib.npyio.NpzFile, key: str) -> None:
    """Raise if an array's header claims more than the file holds: numpy would ask for that memory first."""
    archive = file.zip
    assert archive is not None  # it is open
    name = f"{key}.npy" if f"{key}.npy" in archive.namelist() else key
    with archive.open(name) as member:
        version = np.lib.format.read_magic(member)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(member)
        claimed, held = math.prod(shape) * dtype.itemsize, archive.getinfo(name).file_size
    if claimed > held and not dtype.hasobject:
        raise ValueError(f"{path} is damaged: the header of {key} claims {claimed:,} bytes, and {held:,} are there")


def _key(path: Path, names: dict[str, str], half: str, words: tuple[str, ...], plain: str) -> str:
    known = [name for word in words for name in (f"{word}_{half}", f"{half}_{word}") if name in names]
    if len(known) > 1:
        raise ValueError(f"{path} has both {names[known[0]]} and {names[known[1]]}: which is meant? Leave one out")
    if known:
        return names[known[0]]
    raise ValueError(f"{path} has no {plain}_{half}; it has {', '.join(names.values()) or 'nothing'}")
