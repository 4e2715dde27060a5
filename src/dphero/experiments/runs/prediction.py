"""The model of a finished run at work: images in, class and probability out. The training data is not needed."""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dphero import models
from dphero.data import BUILT_INS
from dphero.data.files.pictures import ENDINGS, grey_or_rgb
from dphero.experiments.runs.rundir import RunDirectory
from dphero.methods import make

_CHUNK = 1000  # inputs that pass through the model at a time


@dataclass(frozen=True)
class Prediction:
    """What a model says about one input.

    Attributes:
        name: The input: its file, and its number where the file holds several.
        label: The most likely class.
        probability: How likely the model takes it to be. Private models are often over- or underconfident.
        converted: What was done to the input beyond the scaling of its format, or empty.
    """

    name: str
    label: str
    probability: float
    converted: str = ""


@dataclass(frozen=True)
class Input:
    """One input of a file.

    Attributes:
        name: Its file, and its number where the file holds several.
        values: Scaled as the model takes it.
        converted: What was done to it beyond the scaling of its format, or empty.
    """

    name: str
    values: Tensor
    converted: str = ""


class Predictor:
    """The model of a finished run.

    Args:
        path: The run's directory.
        trust: Whether code that its recipe names may be imported and run.

    Raises:
        ValueError: If there is no run, it is not finished, its files are damaged, its model cannot be built again, or
            its model is code that is not trusted.
    """

    def __init__(self, path: str | PathLike[str], *, trust: bool = False) -> None:
        directory = RunDirectory.open(path, trust=trust)
        values = directory.signature()
        self.shape: tuple[int, ...] = tuple(values["shape"])
        self.classes: tuple[str, ...] = tuple(values["classes"])
        # Built-in data is scaled to [-1, 1] by its format; what range data of the user's own has is not known here.
        self._range = (-1.0, 1.0) if directory.recipe.data in BUILT_INS else None
        method = make(directory.recipe.method, directory.recipe.options)
        self.model = method.network(models.build(values["model"], self.shape, len(self.classes)))
        try:
            directory.load_model(self.model)
        except RuntimeError as error:
            raise ValueError(
                f"the weights in {directory.path} are not those of the network {values['model']!r}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self.model.eval()

    def predict(self, path: str | PathLike[str]) -> list[Prediction]:
        """Return what the model says of every input in a file or folder.

        Takes an image file (8 bits for each colour), a folder of those, an ``.npy`` or ``.npz`` array, or an idx file.
        Bytes are scaled to [-1, 1], floating-point values taken as they are. Nothing is resized. An image in colour
        becomes grey, or a grey one RGB, where the model needs that, and the prediction says so.

        Raises:
            ValueError: If an input cannot be read, or does not have the shape or range that the model takes.
        """
        inputs = self.read(path)
        found: list[Prediction] = []
        for first in range(0, len(inputs), _CHUNK):
            part = inputs[first : first + _CHUNK]
            with torch.no_grad():
                probabilities = self.model(torch.stack([each.values for each in part])).softmax(1)
            best, where = probabilities.max(1)
            for each, probability, number in zip(part, best.tolist(), where.tolist(), strict=True):
                found.append(Prediction(each.name, self.classes[number], probability, each.converted))
        return found

    def read(self, path: str | PathLike[str]) -> list[Input]:
        """Return every input in a file or folder, as the model takes it; what is read and refused as in `predict`."""
        path = Path(path)
        name, ending = path.name, path.suffix.lower()
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file())
            if not files:
                raise ValueError(f"there is no image in {path} (endings: {', '.join(ENDINGS)})")
            return [self._picture(file, str(file.relative_to(path))) for file in files]
        if not path.exists():
            raise ValueError(f"there is no file {path}")
        if ending in ENDINGS:
            return [self._picture(path, name)]
        if ending in (".npy", ".npz"):
            return self._array(_numpy(path), name)
        if "idx" in name or "ubyte" in name:
            return self._array(_idx(path), name)
        raise ValueError(f"{path} is none of: image ({', '.join(ENDINGS)}), .npy, .npz, idx file, folder of images")

    def _picture(self, path: Path, name: str) -> Input:
        """Read an image file as grey or RGB, whichever the model takes."""
        if len(self.shape) != 3 or self.shape[0] not in (1, 3):
            raise ValueError(f"the model takes inputs of shape {self._shape}, not images: give an .npy array")
        wanted = "L" if self.shape[0] == 1 else "RGB"
        image = grey_or_rgb(path)
        pixels = np.asarray(image.convert(wanted))
        height, width = self.shape[1:]
        if pixels.shape[:2] != (height, width):
            raise ValueError(
                f"{path} is {pixels.shape[1]}×{pixels.shape[0]} pixels and the model takes {width}×{height}: cut or "
                "resize it as the training images were"
            )
        (values,) = self._array(pixels, name)
        changed = image.mode != wanted
        return Input(name, values.values, ("colour to grey" if wanted == "L" else "grey to RGB") if changed else "")

    def _array(self, array: NDArray[Any], name: str) -> list[Input]:
        """Take one input or many from an array, its last axis colours if it does not fit otherwise."""
        shape = self.shape
        forms = [shape]
        if len(shape) == 3:
            forms += [shape[1:]] if shape[0] == 1 else []
            forms += [(*shape[1:], shape[0])]
        for form in forms:
            if array.shape == form or array.shape[1:] == form:
                batch = array.reshape(-1, *form)
                if len(form) == 3 and form != shape:
                    batch = batch.transpose(0, 3, 1, 2)
                values = self._scaled(batch.reshape(-1, *shape), name)
                if array.shape == form:
                    return [Input(name, values[0])]
                return [Input(f"{name}[{number}]", value) for number, value in enumerate(values)]
        raise ValueError(f"{name} has shape {array.shape} and the model takes {self._shape}, or several of them")

    def _scaled(self, batch: NDArray[Any], name: str) -> Tensor:
        if not len(batch):
            raise ValueError(f"{name} holds no input")
        if batch.dtype == np.uint8:
            return torch.from_numpy(batch.astype(np.float32)).div_(127.5).sub_(1)
        if not np.issubdtype(batch.dtype, np.floating):
            raise ValueError(
                f"{name} holds {batch.dtype}, whose range is not known: give uint8 (0 to 255), or float32 scaled "
                "as the training data"
            )
        values = torch.from_numpy(batch.astype(np.float32))
        low, high = values.min().item(), values.max().item()
        if not np.isfinite([low, high]).all():
            raise ValueError(f"{name} holds NaN or infinity")
        if self._range is not None and (low < self._range[0] - 1e-3 or high > self._range[1] + 1e-3):
            raise ValueError(
                f"{name} has values from {low:g} to {high:g}, and the model was trained on -1 to 1: scale them"
            )
        return values

    @property
    def _shape(self) -> str:
        return "×".join(map(str, self.shape))


def _numpy(path: Path) -> NDArray[Any]:
    """Read an array; pickled objects are never loaded."""
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found:
            names = [name for name in ("images", "x") if name in found.files] or found.files
            if len(names) != 1:
                raise ValueError(f"it has {', '.join(found.files) or 'no arrays'}: call one of them 'images' or 'x'")
            return found[names[0]]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as an array: {error}") from error


def _idx(path: Path) -> NDArray[Any]:
    """Read an idx file of bytes: two zeros, the type (8), the number of axes, their lengths, the values."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of bytes")
    start = 4 + 4 * raw[3]
    shape = tuple(np.frombuffer(raw[4:start].ljust(4 * raw[3], b"\0"), ">u4").tolist())
    if len(raw) - start != math.prod(shape):
        raise ValueError(f"{path} is cut short, or is not an idx file: its header does not fit its length")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
