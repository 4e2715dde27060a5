"""Data of your own: four arrays, an ``.npz`` file that holds them, or a function that returns them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dphero._imports import call_named
from dphero.data.dataset import Data, Split
from dphero.data.files import npz


def from_arrays(
    name: str,
    train_images: Any,
    train_labels: Any,
    test_images: Any,
    test_labels: Any,
    *,
    classes: Sequence[Hashable] | None = None,
    public_size: bool = False,
) -> Data:
    """Return a data set made of arrays or tensors.

    Images are N×H×W, N×C×H×W, N×H×W×C (when only the last axis has 1, 3 or 4 entries) or vectors N×D. Values of type
    uint8 are scaled from 0..255 to [-1, 1]; floating-point values are taken as they are.

    Labels are names or whole numbers. Their names are public: give ``classes`` where you can. Without it the classes
    are the labels that occur in training, sorted, and their being there is disclosed.

    Args:
        name: What reports call it.
        train_images: Images to train on.
        train_labels: Their labels.
        test_images: Images held out.
        test_labels: Their labels.
        classes: All labels there can be, in the order in which they are to be numbered.
        public_size: Whether the number of training examples is public.

    Raises:
        ValueError: If something does not fit; the message says what and where.
    """
    labels = {half: _labels(name, half, given) for half, given in (("train", train_labels), ("test", test_labels))}
    known = _occurring(name, labels["train"]) if classes is None else _given(name, classes)
    splits = {}
    for half, images in (("train", train_images), ("test", test_images)):
        try:
            splits[half] = Split(_images(images), torch.tensor(_numbers(labels[half], known), dtype=torch.int64))
        except ValueError as error:
            raise ValueError(f"{name}, {half}: {error}") from error
    return Data(name, splits["train"], splits["test"], tuple(map(_text, known)), public_size)


def from_npz(path: Path) -> Data:
    """Return the data set in an ``.npz`` file with ``x_train``, ``y_train``, ``x_test``, ``y_test`` (and ``classes``).

    Raises:
        ValueError: If the file is damaged, lacks an array, or its arrays do not fit.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    arrays, classes = npz.read(path)
    return from_arrays(path.stem, *arrays, classes=None if classes is None else classes.tolist())


def from_function(spec: str) -> Data:
    """Call ``module:function`` without arguments; it returns :class:`Data`, or the four arrays of :func:`from_arrays`.

    The module is looked for in the working directory, and as Python does.

    Raises:
        ValueError: If there is no such function, or it returns something else.
    """
    result = call_named(spec, "data")
    if isinstance(result, Data):
        return result
    if isinstance(result, tuple | list) and len(result) == 4:
        return from_arrays(spec, *result)
    raise ValueError(
        f"data {spec!r}: the function must return dphero.data.Data or (train_images, train_labels, test_images, "
        f"test_labels), got {type(result).__name__}"
    )


def _images(given: Any) -> Tensor:
    """N×C×H×W or N×D in float32, scaled by the type of the values alone."""
    tensor = given.detach().to("cpu", copy=True) if isinstance(given, Tensor) else _tensor(given)
    if tensor.dtype == torch.uint8:
        tensor = tensor.float().div_(127.5).sub_(1)
    elif not tensor.dtype.is_floating_point:
        raise ValueError(
            f"images of type {tensor.dtype} have no range of their own: give uint8 (0 to 255), or divide by a public "
            "number and give float32"
        )
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(1)
    elif tensor.dim() == 4 and tensor.shape[3] in (1, 3, 4) and tensor.shape[1] not in (1, 3, 4):
        tensor = tensor.permute(0, 3, 1, 2)
    return tensor.to(torch.float32).contiguous()


def _tensor(given: Any) -> Tensor:
    try:
        array = np.asarray(given)
        return torch.from_numpy(np.array(array))  # a copy: theirs may change, or be read-only
    except (TypeError, ValueError) as error:
        raise ValueError(f"images must be one array of numbers, all of one size ({error})") from error


def _labels(name: str, half: str, given: Any) -> list[Hashable]:
    """Labels as a list of plain values."""
    try:
        values = [_plain(value) for value in _untensored(given)]
    except TypeError as error:
        raise ValueError(f"{name}, {half}: labels must be a list, one for each example, got {given!r}") from error
    if values and all(isinstance(value, list) and len(value) == 1 for value in values):
        values = [value[0] for value in values]  # a column
    for place, value in enumerate(values):
        if isinstance(value, float):
            raise ValueError(f"{name}, {half}: label {place} is {value}; labels are names or whole numbers")
        elif not isinstance(value, Hashable):
            raise ValueError(
                f"{name}, {half}: label {place} is a {type(value).__name__}; each example has one label, a name or a "
                "whole number (for one-hot rows, give their argmax)"
            )
    return values


def _untensored(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value


def _plain(value: Any) -> Any:
    """A label as a value of Python's own, a whole number as an int: only these are alike whatever they came in."""
    value = _untensored(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _given(name: str, classes: Sequence[Hashable]) -> list[Hashable]:
    """The classes in the order of their numbers, as given."""
    try:
        known = [_plain(label) for label in _untensored(classes)]
        set(known)
    except TypeError as error:
        raise ValueError(f"{name}: classes must be a list of names, one for each class, got {classes!r}") from error
    return known


def _occurring(name: str, labels: list[Hashable]) -> list[Hashable]:
    """The classes in the order of their numbers: those that occur, sorted."""
    different = set(labels)
    try:
        known = sorted(different)  # type: ignore[type-var]
    except TypeError:  # values of several kinds
        known = sorted(different, key=_text)
    if len({_text(label) for label in known}) < len(known):
        raise ValueError(f"{name}: different labels are written alike, such as 1 and '1': make them differ")
    return known


def _numbers(labels: list[Hashable], known: list[Hashable]) -> list[int]:
    """The number of each label: its place in ``known``, or itself where named classes were already numbered."""
    numbers = {label: number for number, label in enumerate(known)}
    if not any(isinstance(label, Number) for label in known):
        numbers = {number: number for number in range(len(known))} | numbers
    try:
        return [numbers[label] for label in labels]
    except KeyError as error:
        raise ValueError(
            f"label {error.args[0]!r} is out of range: it is none of the {len(known)} classes "
            f"({', '.join(map(_text, known[:10]))}{', ...' if len(known) > 10 else ''})"
        ) from error


def _text(label: Hashable) -> str:
    return label.decode(errors="replace") if isinstance(label, bytes) else str(label)
