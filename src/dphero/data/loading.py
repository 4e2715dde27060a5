"""``load``: from a name on the command line to tensors."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dphero.data import digits
from dphero.data.catalog import BUILT_INS, BuiltIn
from dphero.data.dataset import Data, Split
from dphero.data.download import cache
from dphero.data.files.folders import from_folder
from dphero.data.files.own import from_function, from_npz

_DIGITS_TEST = 360


def load(spec: str, channels: int | None = None) -> Data:
    """Return a data set.

    Args:
        spec: The name of a built-in set (``dphero data list``), a folder of images
            (:func:`dphero.data.files.folders.from_folder`), an ``.npz`` file
            (:func:`dphero.data.files.own.from_npz`), or
            ``module:function`` (:func:`dphero.data.files.own.from_function`).
        channels: Of the images in a folder: 3 (RGB), unless given, or 1 (grey). Other data has its own.

    Raises:
        ImportError: If the data needs a library that is not installed.
        ValueError: If there is no such data, or something is wrong with it.
    """
    path = Path(os.path.expanduser(spec))
    if channels is not None and (spec in BUILT_INS or path.suffix == ".npz" or not path.is_dir()):
        raise ValueError(f"channels={channels} is for folders of images, and {spec!r} is none: leave it out")
    if spec in BUILT_INS:
        return _built_in(BUILT_INS[spec])
    if path.suffix == ".npz":
        return from_npz(path)
    if path.is_dir():
        return from_folder(path, 3 if channels is None else channels)
    if re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", spec):
        return from_function(spec)
    raise ValueError(
        f"no data {spec!r}: give {', '.join(BUILT_INS)}, a folder of image folders, an .npz file, or module:function"
    )


def located(spec: str) -> str:
    """Return what :func:`load` takes for the same data wherever it is called: a file or folder by its whole path."""
    path = Path(os.path.expanduser(spec))
    is_path = spec not in BUILT_INS and (path.suffix == ".npz" or path.is_dir())
    return str(path.absolute()) if is_path else spec


def _built_in(built_in: BuiltIn) -> Data:
    if built_in.layout == "scikit-learn":
        train, test = _digits()
    else:
        contents = list(cache.read(built_in, cache.directory()).values())
        if built_in.layout == "idx":
            train, test = (_idx_split(pair, built_in.shape) for pair in (contents[:2], contents[2:]))
        else:
            train, test = (_cifar_split(batches, built_in.shape) for batches in (contents[:-1], contents[-1:]))
    assert (len(train), len(test)) == (built_in.train, built_in.test) and train.images.shape[1:] == built_in.shape
    return Data(built_in.name, train, test, built_in.classes, public_size=True)


def _digits() -> tuple[Split, Split]:
    """The digits with a fixed random split."""
    images, labels = map(torch.from_numpy, digits.arrays())
    images = images.unsqueeze(1).float().div_(digits.SCALE).sub_(1)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:_DIGITS_TEST], order[_DIGITS_TEST:]
    return Split(images[train], labels[train]), Split(images[test], labels[test])


def _idx_split(pair: list[bytes], shape: tuple[int, int, int]) -> Split:
    """A split from the published idx files: headers of 16 and 8 bytes, then one byte for each pixel and label."""
    images, labels = pair
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, *shape)
    return _split(pixels, np.frombuffer(labels, np.uint8, offset=8))


def _cifar_split(batches: list[bytes], shape: tuple[int, int, int]) -> Split:
    """A split from CIFAR's binary batches: rows of a label and the pixels."""
    rows = np.concatenate([np.frombuffer(batch, np.uint8).reshape(-1, 1 + math.prod(shape)) for batch in batches])
    return _split(rows[:, 1:].reshape(-1, *shape), rows[:, 0])


def _split(pixels: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Split:
    images = torch.from_numpy(pixels.astype(np.float32)).div_(127.5).sub_(1)
    return Split(images, torch.from_numpy(labels.astype(np.int64)))
