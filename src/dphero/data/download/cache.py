"""Where downloaded data lives, and how it gets there whole or not at all.

A data set is one folder of the cache. Its files are written into a temporary folder beside it, which takes its name
when all of them are there: whoever reads sees all of it or none. Readers check the checksums again, so that later
damage is seen too. A process that dies leaves at most a temporary folder, which the next one removes.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from dphero._files import open_for_lock, read_bytes
from dphero.data.catalog import BuiltIn

if sys.platform != "win32":
    import fcntl


def directory() -> Path:
    """The cache: ``$DPHERO_DATA``, else ``dphero/data`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``."""
    if chosen := os.environ.get("DPHERO_DATA"):
        return Path(chosen).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "dphero" / "data"


def state(built_in: BuiltIn, root: Path) -> Literal["cached", "damaged", "missing"]:
    """What the cache holds of a data set, judged quickly by the sizes of its files."""
    folder = root / built_in.name
    if not folder.is_dir():
        return "missing"
    whole = all(_size(folder / file.name) == file.size for file in built_in.files)
    return "cached" if whole else "damaged"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def read(built_in: BuiltIn, root: Path) -> dict[str, bytes]:
    """Return the files of a data set, each with its checksum confirmed.

    Raises:
        ValueError: If the set is not in the cache, or damaged.
    """
    folder = root / built_in.name
    if not folder.is_dir():
        raise ValueError(
            f"{built_in.name} is not in the cache at {root}: run `dphero data get {built_in.name}` (another place for "
            "the cache is set by DPHERO_DATA)"
        )
    contents = {}
    for file in built_in.files:
        try:
            content = read_bytes(folder / file.name)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(
                f"{folder / file.name} cannot be read ({why}): `dphero data get {built_in.name}` repairs it"
            ) from error
        if not file.is_content(content):
            raise ValueError(
                f"{folder / file.name} is damaged, its checksum differs from the published one: "
                f"`dphero data get {built_in.name}` repairs it"
            )
        contents[file.name] = content
    return contents


def leftovers(built_in: BuiltIn, root: Path) -> list[Path]:
    """Temporary folders of the data set: under the lock, those of processes that died."""
    return sorted(root.glob(f".{built_in.name}.partial-*"))


@contextmanager
def staging(built_in: BuiltIn, root: Path) -> Iterator[Path]:
    """Hold the data set's lock, and give a temporary folder in the cache that is removed at the end.

    Raises:
        OSError: If the cache cannot be written; the message says what to do.
    """
    with _explained(built_in, root):
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{built_in.name}.lock"):
            folder = Path(tempfile.mkdtemp(prefix=f".{built_in.name}.partial-", dir=root))
            try:
                yield folder
            finally:
                for leftover in leftovers(built_in, root):
                    shutil.rmtree(leftover, ignore_errors=True)


def install(built_in: BuiltIn, root: Path, folder: Path, contents: Mapping[str, bytes]) -> Path:
    """Write ``contents`` into ``folder``, a staging folder, and move all of it to its place in the cache."""
    assert all(file.is_content(contents[file.name]) for file in built_in.files), "only verified files are installed"
    whole, place = folder / "whole", root / built_in.name
    whole.mkdir()
    for file in built_in.files:
        _write(whole / file.name, contents[file.name])
    if place.exists():
        place.rename(folder / "damaged")  # a folder can only be renamed to a name that is free
    whole.rename(place)
    return place


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # a name must not outlive its content when the power fails


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process at a time in; the system frees the lock of a process that dies."""
    with open(open_for_lock(path), "rb") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _explained(built_in: BuiltIn, root: Path) -> Iterator[None]:
    """Say of a failed write where it was, and what helps."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            megabytes = 2 * sum(file.size for file in built_in.files) // 1_000_000 + 1
            reason = f"no space left; {built_in.name} needs about {megabytes} MB while it is fetched"
        else:
            reason = error.strerror or str(error)
        raise OSError(
            f"cannot write to the cache at {root}: {reason}. Free it, or set DPHERO_DATA to another folder"
        ) from error
