"""Files that are whole or not there, and that show when they were damaged.

*Writing*: beside the file, flushed to disk, then put in place in one move. A crash leaves the old file or the new one.

*Reading*: regular files only. A pipe would be waited for without end, a device read without end.

*Seals*: a SHA-256 digest of the content, kept in the file itself, so that file and digest cannot part. It finds
accidents (a flipped bit, a file cut short), not forgers: there is no secret in it. Each ``seal_…`` has an ``open_…``
that raises :class:`DamagedFile` before anything of the content is believed:

====================  ===========================================================================
``seal_json``         an object: one more entry, ``"sha256"``
``seal_zip``          what ``torch.save`` writes: the comment at the end of a zip archive
``seal_safetensors``  what ``safetensors`` writes: an entry among the metadata of its header
====================  ===========================================================================

Files from before there were seals have none; ``required=False`` lets them pass as they are.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import stat
from collections.abc import Callable, Mapping
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

_Content = TypeVar("_Content")
_NAME = "sha256"
_BLANK = "0" * 64
_ZIP_END, _ZIP_END_SIZE = b"PK\x05\x06", 22
_ZIP_MARK = b"dphero sha256 "


class DamagedFile(ValueError):
    """A file does not hold what was written there."""

    def __init__(self, path: str | PathLike[str], what: object) -> None:
        super().__init__(f"{path} is damaged: {what}. Restore it from a copy")


# -- writing and reading ----------------------------------------------------------------------------------------------


def write_atomically(
    path: str | PathLike[str], contents: bytes | memoryview | Callable[[Path], None], *, private: bool = False
) -> None:
    """Write a file beside ``path``, flush it to disk, then put it in its place in one move.

    ``contents`` is what it is to hold, or a function that writes that to the (empty) file it is given. Nobody but the
    owner may read a ``private`` file; of others the user's umask decides. Where ``path`` is a symbolic link, the link
    is replaced: what it points to stays as it is.

    Raises:
        OSError: If it cannot be written, as on a full disk; what was there before is whole.
    """
    path = Path(path)
    _remove_stale(path)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # O_EXCL below: never through what somebody else put there
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(partial, flags, 0o600 if private else 0o666), "wb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if not callable(contents):
                file.write(contents)
                file.flush()
                os.fsync(file.fileno())
        if callable(contents):
            contents(partial)
            partial.chmod(mode)  # it may have made a file of its own
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # that of a write does not say where
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_bytes(path: str | PathLike[str], *, follow: bool = True) -> bytes:
    """Return what a regular file holds; ``follow`` says whether it may be a symbolic link.

    Raises:
        ValueError: If it is something else: a pipe, a device, a directory, or a link that is not to be followed.
        OSError: If it cannot be read, or is not there.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    with open(_open_regular(path, flags, 0), "rb") as file:
        return file.read()


def open_for_lock(path: str | PathLike[str]) -> int:
    """Return a descriptor of a file to lock, as :func:`open_for_append` does; it is never emptied."""
    return _open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def open_for_append(path: str | PathLike[str]) -> int:
    """Return a descriptor of a file to append to; it is made, for its owner alone, if need be, and never followed.

    Raises:
        ValueError: If there is something else than a regular file.
        OSError: If it cannot be opened.
    """
    return _open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _open_regular(path: str | PathLike[str], flags: int, mode: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link, which is not followed here: put the file itself") from error
        if error.errno in (errno.EISDIR, errno.ENXIO):
            raise ValueError(f"{path} is no regular file") from error
        raise
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        names = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise ValueError(f"{path} is {names.get(stat.S_IFMT(kind), 'a device')}, not a regular file")
    return descriptor


def _remove_stale(path: Path) -> None:
    """Remove what a process of this machine left when it was killed while writing the same file."""
    prefix = f".{path.name}.{socket.gethostname()}."
    for left in path.parent.glob(".*.partial"):
        number = left.name.removeprefix(prefix).removesuffix(".partial")
        if left.name.startswith(prefix) and number.isdecimal() and not _is_running(int(number)):
            left.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


# -- seals ------------------------------------------------------------------------------------------------------------


def seal_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of plain values with the digest of all others as its last entry, ``"sha256"``."""
    plain = {name: value for name, value in values.items() if name != _NAME}
    return {**plain, _NAME: _digest(_canonical(plain))}


def open_json(values: Mapping[str, Any], path: str | PathLike[str], *, required: bool = True) -> dict[str, Any]:
    """Return what :func:`seal_json` was given.

    Raises:
        DamagedFile: If the values are not those that were sealed, or a seal is ``required`` and there is none.
    """
    plain = {name: value for name, value in values.items() if name != _NAME}
    if _NAME not in values:
        return _unsealed(plain, path, required)
    _require(values[_NAME], _digest(_canonical(plain)), path)
    return plain


def seal_zip(archive: BytesIO) -> None:
    """Make the digest of a zip archive (what ``torch.save`` writes) its comment, in place: it may be large."""
    size = len(_ZIP_MARK) + 64
    with archive.getbuffer() as contents:
        start = len(contents) - _ZIP_END_SIZE
        if start < 0 or bytes(contents[start : start + 4]) != _ZIP_END:
            raise ValueError("this is no zip archive without a comment")
        contents[-2:] = size.to_bytes(2, "little")  # the last field: how long the comment is
        seal = _digest(contents).encode()
    archive.seek(0, os.SEEK_END)
    archive.write(_ZIP_MARK + seal)


def open_zip(contents: bytes, path: str | PathLike[str], *, required: bool = True) -> bytes:
    """Return the archive itself, which readers take with its comment; otherwise as :func:`open_json`."""
    if not has_zip_seal(contents):
        return _unsealed(contents, path, required)
    body = memoryview(contents)[: -len(_ZIP_MARK) - 64]
    _require(contents[-64:].decode("latin-1"), _digest(body), path)
    return contents


def has_zip_seal(contents: bytes) -> bool:
    """Tell whether there is a digest at the end of a zip archive, right or wrong."""
    return contents[-len(_ZIP_MARK) - 64 : -64] == _ZIP_MARK


def seal_safetensors(write: Callable[[dict[str, str]], bytes]) -> bytes:
    """Return what ``write`` makes of metadata for the header, with the digest of the whole file among them."""
    contents = write({_NAME: _BLANK})
    return contents.replace(_BLANK.encode(), _digest(contents).encode(), 1)


def open_safetensors(contents: bytes, path: str | PathLike[str]) -> bytes:
    """Return what :func:`seal_safetensors` returned; a file without a seal is damaged."""
    end = 8 + int.from_bytes(contents[:8], "little")
    try:
        found = json.loads(contents[8:end])["__metadata__"][_NAME]
    except (ValueError, RecursionError, KeyError, TypeError):
        found = None
    if not isinstance(found, str) or len(found) != len(_BLANK):
        return _unsealed(contents, path, required=True)
    _require(found, _digest(contents.replace(found.encode(), _BLANK.encode(), 1)), path)
    return contents


def _digest(contents: bytes | memoryview) -> str:
    return hashlib.sha256(contents).hexdigest()


def _canonical(values: Mapping[str, Any]) -> bytes:
    """The same bytes for the same values, however they were laid out and ordered in the file."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _require(found: Any, expected: str, path: str | PathLike[str]) -> None:
    if found != expected:
        raise DamagedFile(path, "its content and the SHA-256 digest that was written with it do not agree")


def _unsealed(contents: _Content, path: str | PathLike[str], required: bool) -> _Content:
    if required:
        raise DamagedFile(path, "the SHA-256 digest that was written with it is gone")
    return contents
