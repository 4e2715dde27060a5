"""Which images are explained: public ones, unless their owner says in so many words that he shows private ones.

A heat map shows what a network sees in an image, and the image itself. Of an image that was trained on, that is a
release which no ε covers: the guarantee is about the weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dphero import data as datasets
from dphero.data import BUILT_INS, Split
from dphero.experiments.runs.prediction import Predictor

PRIVATE_STAMP = "PRIVATE training images: shown without any protection, no ε covers this"
"""Stands on every picture of private images, and in the numbers made from them."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images to explain.

    Attributes:
        pixels: N×C×H×W, scaled as the networks take them.
        labels: The class of each, or ``None`` where that is not known.
        names: What reports call each.
        source: Where they come from, in words.
        private: Whether they are training images.
    """

    pixels: Tensor
    labels: Tensor | None
    names: tuple[str, ...]
    source: str
    private: bool = False

    def __len__(self) -> int:
        return len(self.pixels)


def choose(
    source: str | None,
    predictor: Predictor,
    data: str,
    channels: int | None = None,
    *,
    per_class: int,
    private_images_unprotected: bool = False,
) -> Images:
    """Return the images of a source: the first ``per_class`` of each class, which nobody has picked by hand.

    Args:
        source: A built-in data set, of which test images are taken; ``"test"``, the test images of the run's own data,
            if they are public; ``"train"``, its training images; or a file or folder of public images. ``None`` takes
            the test images of the run's data if that is a built-in set.
        predictor: The first run's model, which says what shape images must have.
        data: The data of that run, as in its recipe.
        channels: As in its recipe.
        per_class: Images of each class.
        private_images_unprotected: Consent to show training images.

    Raises:
        ValueError: If it is not known that the images are public, or they do not fit the model.
    """
    if source is None:
        if data not in BUILT_INS:
            raise ValueError(
                f"the run was trained on {data}, and whether its test images are public is not known here: give "
                "--images test if they are, or --images FILE (an image, a folder, an .npy array) with public ones"
            )
        source = data
    if source == "train":
        if not private_images_unprotected:
            raise ValueError(
                "--images train would show training images, and what the network sees in them: a release that no ε "
                "covers. Take public images (leave --images out, or name some), or, if these may be shown to whoever "
                "sees the pictures, say --private-images-unprotected"
            )
        split, classes, name = _loaded(data, channels, train=True)
    elif source == "test" or source in BUILT_INS:
        name = data if source == "test" else source
        split, classes, name = _loaded(name, channels if source == "test" else None, train=False)
    else:
        _require_other(source, data)
        inputs = predictor.read(source)
        pixels = torch.stack([each.values for each in inputs])
        return Images(pixels, None, tuple(each.name for each in inputs), f"{source}, said to be public")
    if tuple(split.images.shape[1:]) != predictor.shape or classes != predictor.classes:
        raise ValueError(
            f"the images of {name} (shape {tuple(split.images.shape[1:])}, {len(classes)} classes) are not of the kind "
            f"that the run was trained on (shape {predictor.shape}, {len(predictor.classes)} classes)"
        )
    where = _first_of_each(split.labels, len(classes), per_class)
    half = "training" if source == "train" else "test"
    names = tuple(f"{classes[int(split.labels[i])]} ({half} image {i})" for i in where)
    about = f"{name}, {half} images: the first {per_class} of each class"
    return Images(split.images[where], split.labels[where], names, about, private=source == "train")


def _require_other(source: str, data: str) -> None:
    """Refuse the data that the run was trained on, or a part of it, under the name of public images."""
    path, trained_on = Path(source).resolve(), Path(data).resolve()
    if trained_on.exists() and (path == trained_on or trained_on in path.parents):
        raise ValueError(
            f"{source} is the data that the run was trained on, or part of it: give --images test if its test images "
            "are public, or --images train with --private-images-unprotected"
        )


def _loaded(data: str, channels: int | None, *, train: bool) -> tuple[Split, tuple[str, ...], str]:
    found = datasets.load(data, channels)
    return (found.train if train else found.test), found.classes, found.name


def _first_of_each(labels: Tensor, classes: int, per_class: int) -> Sequence[int]:
    found = [(labels == each).nonzero().flatten()[:per_class] for each in range(classes)]
    return torch.cat(found).tolist()
