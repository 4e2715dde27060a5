"""A folder of images, one folder for each class."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dphero._checks import one_of
from dphero.data.dataset import Data, is_text
from dphero.data.files.own import from_arrays
from dphero.data.files.pictures import ENDINGS, grey_or_rgb

HELD_OUT = 0.2
"""The share of images held out for testing where a folder does not say which."""


def from_folder(folder: Path, channels: int = 3) -> Data:
    """Return the images in ``folder/train/CLASS`` and ``folder/test/CLASS``, or in ``folder/CLASS`` alone.

    The names of the class folders are the classes, and public. In a folder of one level, the images for which
    :func:`is_held_out` are the test set.

    Args:
        folder: The folder.
        channels: 3: all images become RGB; 1: all become grey. A public number. Were it read off the images, then one
            coloured image among grey ones would change the shape of the network, which is published.

    Raises:
        ValueError: If there are no images, one cannot be read, or they differ in size.
    """
    one_of("channels", channels, (1, 3))
    top = {entry.name: entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    if ("train" in top) != ("test" in top):
        there, other = ("train", "test") if "train" in top else ("test", "train")
        raise ValueError(
            f"{folder} has a folder {there} but no {other}: add it, or put the classes into {folder} itself"
        )
    if "train" in top:
        train, classes = _listed(top["train"])
        test, others = _listed(top["test"])
        if unknown := sorted(set(others) - set(classes)):
            raise ValueError(f"{folder / 'test'} has classes that {folder / 'train'} has not: {', '.join(unknown)}")
    else:
        every, classes = _listed(folder)
        train = [path for path in every if not is_held_out(f"{path.parent.name}/{path.name}")]
        test = [path for path in every if is_held_out(f"{path.parent.name}/{path.name}")]
    if not train or not test:
        raise ValueError(
            f"{folder} gives {len(train)} training and {len(test)} test images, and both are needed: it should hold "
            "train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png with enough images to hold some out"
        )
    images = _pixels(train + test, "L" if channels == 1 else "RGB")
    labels = [path.parent.name for path in train + test]
    cut = len(train)
    return from_arrays(folder.resolve().name, images[:cut], labels[:cut], images[cut:], labels[cut:], classes=classes)


def is_held_out(name: str) -> bool:
    """Whether the image ``CLASS/FILE`` is held out, by a hash of that name: a share of :data:`HELD_OUT` is.

    Each image's side depends on its own name alone. Were the images shuffled and cut, then adding one image would move
    others across the cut, and training sets that should differ by one image would differ by many.
    """
    digest = hashlib.sha256(f"dphero held out 0: {name}".encode()).digest()
    return int.from_bytes(digest[:8]) < HELD_OUT * 2**64


def _listed(folder: Path) -> tuple[list[Path], list[str]]:
    """The images below ``folder`` and the names of its class folders, in order.

    Raises:
        ValueError: If a name is not valid UTF-8: the run could not write it down in the end.
    """
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    images = [
        path
        for name in classes
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in ENDINGS and path.is_file() and not path.name.startswith(".")
    ]
    for name in (*classes, *(path.name for path in images)):
        if not is_text(name):
            raise ValueError(f"{folder} holds the name {name!r}, which is not valid UTF-8: rename it")
    return images, classes


def _pixels(paths: list[Path], mode: str) -> NDArray[Any]:
    """All images as one uint8 array, N×H×W in mode L and N×3×H×W in mode RGB; each is converted by itself."""
    arrays = [np.asarray(grey_or_rgb(path).convert(mode)) for path in paths]  # H×W, or H×W×3
    for path, array in zip(paths, arrays, strict=True):
        if array.shape[:2] != arrays[0].shape[:2]:
            height, width = arrays[0].shape[:2]
            raise ValueError(
                f"{path} is {array.shape[1]}×{array.shape[0]} pixels but {paths[0]} is {width}×{height}: all images "
                "must have one size, so resize them first"
            )
    images = np.stack(arrays)
    return images if mode == "L" else images.transpose(0, 3, 1, 2)
