"""Text and JSON files of runs and comparisons: written whole or not at all, and named where they are damaged."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dphero._files import DamagedFile, open_for_append, open_json, read_bytes, write_atomically


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file, whole or not at all; a private one is for its owner's eyes only."""
    write_atomically(path, text.encode(), private=private)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file for its owner's eyes only, and flush it to disk."""
    with open(open_for_append(path), "ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def sha256(contents: bytes) -> str:
    """Return the SHA-256 digest."""
    return hashlib.sha256(contents).hexdigest()


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON in which numbers that JSON does not know (infinity, NaN) are ``null``.

    Control characters are escaped, those above ASCII too: a terminal shows a name, and does not obey it.
    """
    text = json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def read_json(path: Path, *names: str) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: The file.
        names: What the object must have.

    Raises:
        ValueError: If it does not hold such an object; the message names the file.
        OSError: If it cannot be read.
    """
    return parse_json(read_bytes(path, follow=False), path, *names)


def parse_json(contents: bytes, path: Path, *names: str) -> dict[str, Any]:
    """Return the object that a file of JSON holds; arguments and errors as :func:`read_json`."""
    try:
        found = json.loads(contents)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, error) from error
    if not isinstance(found, dict):
        raise DamagedFile(path, f"it holds no object, but {type(found).__name__}")
    if missing := [name for name in names if name not in found]:
        raise DamagedFile(path, f"it lacks {', '.join(missing)}")
    return found


def parse_lines(contents: bytes) -> list[dict[str, Any]]:
    """Return the objects of a file of one JSON object a line; a last line that a crash cut short is left out."""
    found = []
    for line in contents.splitlines():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(values, dict):
            break
        found.append(values)
    return found


# -- files of a run ---------------------------------------------------------------------------------------

OF_FILES = ("version", "recipe", "files")  # what result.json holds beside the result


def outcome(path: Path) -> dict[str, Any] | None:
    """Return all that ``result.json`` holds, verified; ``None`` if there is none."""
    file = path / "result.json"
    if not os.path.lexists(file):
        return None
    found = read_json(file)
    return open_json(found, file, required="version" in found)


def digests(path: Path) -> dict[str, str]:
    """Return the digests of the files of a finished run, or of a published one; those of other runs are not known."""
    if (result := outcome(path)) is not None:
        found, where = result.get("files", {}), path / "result.json"
    elif os.path.lexists(path / "manifest.json"):
        where = path / "manifest.json"
        found = open_json(read_json(where, "files"), where)["files"]
        if isinstance(found, dict):
            found = {name: entry.get("sha256") for name, entry in found.items() if isinstance(entry, dict)}
    else:
        return {}
    if not isinstance(found, dict):
        raise DamagedFile(where, "its files are no table")
    return found


def evaluations(path: Path, contents: bytes) -> list[dict[str, Any]]:
    """Return the lines of a file of metrics; one that does not tell its step was not written by a run."""
    lines = parse_lines(contents)
    for number, line in enumerate(lines, 1):
        if type(line.get("step")) is not int:
            raise DamagedFile(path, f"line {number} does not tell the step of its evaluation")
    return lines


def evaluations_until(path: Path, contents: bytes, step: int, seal: Mapping[str, Any] | None) -> bytes:
    """Return the part of a file of metrics that a checkpoint knows of.

    Args:
        path: The file.
        contents: What it holds.
        step: The checkpoint's step.
        seal: Length and digest of the part, as the checkpoint has them; older ones have none.

    Raises:
        ValueError: If that part is damaged.
    """
    if seal is None:
        return "".join(to_json(line) + "\n" for line in evaluations(path, contents) if line["step"] <= step).encode()
    kept = contents[: seal["bytes"]]
    if sha256(kept) != seal["sha256"]:
        raise DamagedFile(
            path,
            "it is not what the run had written up to its checkpoint (without the file, the "
            "run goes on, and has lost these evaluations)",
        )
    return kept
