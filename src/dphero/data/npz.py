"""The four arrays of an ``.npz`` file, under the names that are in use."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["read"]

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
            classes = file[names["classes"]] if "classes" in names else None
            return [file[key] for key in keys], classes
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
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


def _key(path: Path, names: dict[str, str], half: str, words: tuple[str, ...], plain: str) -> str:
    for word in words:
        for name in (f"{word}_{half}", f"{half}_{word}"):
            if name in names:
                return names[name]
    raise ValueError(f"{path} has no {plain}_{half}; it has {', '.join(names.values()) or 'nothing'}")
