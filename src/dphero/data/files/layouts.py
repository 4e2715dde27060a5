"""Finds the files of a built-in data set in a folder, in every layout that is around.

Each layout is turned into the published bytes, and their checksum is compared: what is returned is the data set,
bit for bit, or it is not returned. idx files may be compressed; CIFAR-10 may come as binary batches, pickled batches,
an archive of either, or sheets of PNG with one image a row; both may come as ``.npz``.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dphero.data.catalog import BuiltIn
from dphero.data.files import npz

_DEPTH = 5  # folders below the given one: enough for every tool's habit, and no walk through a whole disk
_BATCH = 10_000  # images in one file of CIFAR-10
_Reader = Callable[[Path], dict[str, bytes]]


def find(built_in: BuiltIn, folder: Path, wanted: Iterable[str] | None = None) -> tuple[dict[str, bytes], list[str]]:
    """Return the files that are in ``folder`` or up to five levels below it, and why others there were not taken.

    Args:
        built_in: The data set.
        folder: Where to look.
        wanted: Names of the files to look for; all of them if ``None``.
    """
    files = {file.name: file for file in built_in.files}
    missing = set(files if wanted is None else wanted)
    found: dict[str, bytes] = {}
    refused: list[str] = []
    for path, names, reader in _candidates(built_in, folder):
        if missing.isdisjoint(names):
            continue
        try:
            contents = reader(path)
        except Exception as error:  # a file that is not what its name says may fail in any way
            refused.append(f"{path} cannot be read ({error})")
            continue
        for name, content in contents.items():
            if name in missing and files[name].is_content(content):
                found[name] = content
                missing.remove(name)
            elif name in missing:
                refused.append(f"{path} does not hold the published {name}: its checksum differs")
    return found, refused


def accepted(built_in: BuiltIn) -> str:
    """The file names that :func:`find` looks for, in words."""
    if built_in.layout == "idx":
        return f"{', '.join(file.name for file in built_in.files)} (each plain or .gz), or an .npz file"
    return (
        "data_batch_1.bin to data_batch_5.bin and test_batch.bin, the same without .bin (pickled batches), "
        "cifar-10-binary.tar.gz, cifar-10-python.tar.gz, or an .npz file"
    )


def _candidates(built_in: BuiltIn, folder: Path) -> Iterator[tuple[Path, set[str], _Reader]]:
    """Yield each file that may hold something, the names it may hold, and what reads it."""
    every = {file.name for file in built_in.files}
    for path in _walk(folder):
        if path.suffix == ".npz":
            yield path, every, lambda path: _from_npz(built_in, path)
        elif built_in.layout == "cifar" and path.name in ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"):
            yield path, every, lambda path: _from_archive(every, path)
        elif built_in.layout == "cifar" and path.suffix == ".png" and f"{path.stem}.bin" in every:
            yield path, {f"{path.stem}.bin"}, _from_sheet
        elif (name := _published_name(path.name)) in every:
            yield path, {name}, lambda path, name=name: {name: _published(path.name, path.read_bytes())}  # type: ignore[misc]


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files in ``folder`` and below it, those nearest to the top first."""
    level = [folder]
    for _ in range(_DEPTH + 1):
        below: list[Path] = []
        for place in level:
            try:
                entries = sorted(os.scandir(place), key=lambda entry: entry.name)
            except OSError:
                continue  # a folder that may not be read holds nothing for us
            yield from (Path(entry.path) for entry in entries if entry.is_file())
            below += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        level = below


def _published_name(name: str) -> str:
    """The published name of a file that may be compressed, pickled, or spelled with a dot before ``idx``."""
    return f"{name}.bin" if _is_pickle(name) else name.removesuffix(".gz").replace(".idx", "-idx")


def _is_pickle(name: str) -> bool:
    return name.startswith(("data_batch_", "test_batch")) and "." not in name


def _published(name: str, content: bytes) -> bytes:
    """``content`` of the file ``name``, uncompressed and in the published layout."""
    if name.endswith(".gz"):
        content = gzip.decompress(content)
    return _from_pickle(content) if _is_pickle(name) else content


def _from_archive(every: set[str], path: Path) -> dict[str, bytes]:
    """The batches in an archive, read without unpacking it to disk."""
    contents: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = os.path.basename(member.name)
            file = archive.extractfile(member) if _published_name(name) in every else None
            if file is not None:
                contents[_published_name(name)] = _published(name, file.read())
    return contents


def _batch(images: np.ndarray[Any, Any], labels: Any) -> bytes:
    """CIFAR's binary batch: for each image its label, then 1024 red, 1024 green and 1024 blue bytes."""
    column = np.asarray(labels, dtype=np.uint8).reshape(-1, 1)
    return np.concatenate([column, images.reshape(len(column), 3072)], axis=1).tobytes()


def _from_sheet(path: Path) -> dict[str, bytes]:
    """A sheet with one image a row, and its labels from the JSON file beside it (spelled as it is published)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("PNG needs pillow: pip install 'dphero[experiments]'") from error
    half, number = ("test", 0) if path.stem == "test_batch" else ("train", int(path.stem[-1]) - 1)
    labels = json.loads((path.parent / f"{half}_lables.json").read_text())[number * _BATCH : (number + 1) * _BATCH]
    with Image.open(io.BytesIO(path.read_bytes())) as sheet:
        pixels = np.asarray(sheet.convert("RGB")).reshape(-1, 1024, 3)
    return {f"{path.stem}.bin": _batch(pixels.transpose(0, 2, 1), labels)}


def _from_npz(built_in: BuiltIn, path: Path) -> dict[str, bytes]:
    """The published files made of four arrays, if these have the right shapes."""
    (train, train_labels, test, test_labels), _ = npz.read(path)
    names = [file.name for file in built_in.files]
    arrays = {"train": (train, train_labels.ravel()), "test": (test, test_labels.ravel())}
    for half, (images, labels) in arrays.items():
        number = built_in.train if half == "train" else built_in.test
        if images.dtype != np.uint8 or len(images) != number or len(labels) != number:
            raise ValueError(f"{half} is not {number} images of type uint8 with as many labels")
    if built_in.layout == "cifar":
        flat = {half: _channels_first(images) for half, (images, _) in arrays.items()}
        starts = range(0, len(train), _BATCH)
        contents = [_batch(flat["train"][k : k + _BATCH], train_labels.ravel()[k : k + _BATCH]) for k in starts]
        contents.append(_batch(flat["test"], test_labels))
        return dict(zip(names, contents, strict=True))
    contents = []
    for images, labels in arrays.values():
        contents.append(struct.pack(">4i", 0x803, *images.shape) + images.tobytes())
        contents.append(struct.pack(">2i", 0x801, len(labels)) + labels.astype(np.uint8).tobytes())
    return dict(zip(names, contents, strict=True))


def _channels_first(images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return images.transpose(0, 3, 1, 2) if images.ndim == 4 and images.shape[3] == 3 else images


class _Stored:
    """Stands for a numpy array in a pickle: keeps the raw bytes, runs nothing."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = content

    def __setstate__(self, state: Any) -> None:
        self.content = state[-1]  # version, shape, dtype, order, bytes


class _Ignored:
    """Stands for a type: its arguments and its state do not matter, since the bytes are checked afterwards."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "_reconstruct"): lambda *arguments: _Stored(),
    ("numpy", "_frombuffer"): lambda content, *arguments: _Stored(bytes(content)),  # protocol 5
    ("numpy", "ndarray"): _Ignored,
    ("numpy", "dtype"): _Ignored,
    ("_codecs", "encode"): lambda text, *codec: text.encode("latin1"),  # how Python 3 writes bytes at protocol 2
}


class _BatchUnpickler(pickle.Unpickler):
    """Reads CIFAR's pickled batches with stand-ins for the few names they use, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module.split(".")[0], name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"the pickle asks for {module}.{name}, which no CIFAR-10 batch does: not loaded"
            ) from None


def _from_pickle(content: bytes) -> bytes:
    """A pickled batch as a binary one."""
    batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
    fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
    return _batch(np.frombuffer(fields["data"].content, dtype=np.uint8), fields["labels"])
