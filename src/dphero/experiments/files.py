"""Files that a crash cannot leave half-written, and what is said of those that were damaged otherwise."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["damaged", "for_owner", "read_json", "read_lines", "to_json", "write_atomically", "write_text"]


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` make a file beside ``path``, flush it to disk, then put it in its place in one move."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # that of a write does not say where
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file, whole or not at all; a private one is for its owner's eyes only."""
    write_atomically(path, lambda partial: _write(partial, text, for_owner if private else None))


def _write(path: Path, text: str, opener: Callable[[str, int], int] | None) -> None:
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)


def for_owner(path: str, flags: int) -> int:
    """Open a file so that, where it is new, nobody but its owner may read it: an ``opener`` of :func:`open`."""
    return os.open(path, flags, 0o600)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON in which numbers that JSON does not know (infinity, NaN) are ``null``."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def damaged(path: Path, error: object) -> ValueError:
    """The error of a file that does not hold what was written there."""
    return ValueError(f"{path} is damaged: {error}. Restore it from a copy")


def read_json(path: Path, *names: str) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: The file.
        names: What the object must have.

    Raises:
        ValueError: If it does not hold such an object; the message names the file.
        OSError: If it cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise damaged(path, error) from error
    if not isinstance(found, dict):
        raise damaged(path, f"it holds no object, but {type(found).__name__}")
    if missing := [name for name in names if name not in found]:
        raise damaged(path, f"it lacks {', '.join(missing)}")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object a line; a last line that a crash cut short is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
