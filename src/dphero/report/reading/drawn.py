"""What other commands have drawn, as it lies in their folders: heat maps, and the paper's table and figures anew."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dphero._files import DamagedFile, open_json, read_bytes
from dphero.experiments.reproduction.report import brief
from dphero.experiments.runs.files import read_json
from dphero.report.reading import values

_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, eq=False)
class Explained:
    """What lies in a folder that ``dphero explain`` has written.

    Attributes:
        place: The folder.
        numbers: Of ``explain.json``, verified.
        pictures: Title and contents of each picture.
        problems: Pictures that could not be read, and why.
    """

    place: Path
    numbers: Mapping[str, Any]
    pictures: Sequence[tuple[str, bytes]]
    problems: Sequence[tuple[str, str]]

    @property
    def private(self) -> bool:
        """Whether its images are not known to be public; no ε covers what was made from private ones."""
        images = self.numbers.get("images")
        return bool(self.numbers.get("stamp")) or not isinstance(images, Mapping) or images.get("private") is not False


def read_explained(path: Path) -> Explained:
    """Read an ``explain.json`` and the pictures beside it.

    Raises:
        ValueError: If ``explain.json`` is damaged.
        OSError: If it cannot be read.
    """
    place, numbers = path.parent, open_json(read_json(path), path, required=False)
    values.check_explanation(numbers, path)
    listed = numbers.get("pictures")
    pictures, problems = [], []
    for each in listed if isinstance(listed, list) else []:
        name = str(each.get("file")) if isinstance(each, Mapping) else ""
        try:
            if Path(name).name != name or not name.endswith(".png"):
                raise DamagedFile(path, f"{name!r} is no picture beside it")
            contents = _picture(place / name)
            pictures.append((str(each.get("title") or name), contents))
        except (ValueError, OSError) as error:
            problems.append((str(place / name), str(error)))
    return Explained(place, numbers, pictures, problems)


def _picture(path: Path) -> bytes:
    contents = read_bytes(path, follow=False)
    if not contents.startswith(_PNG):
        raise DamagedFile(path, "it is no PNG picture")
    return contents


@dataclass(frozen=True, eq=False)
class Reproduced:
    """What ``dphero reproduce`` has written about one table or figure of the paper.

    Attributes:
        path: Its JSON file.
        about: Title, place in the paper, what is shown, and size.
        notes: What a reader must know.
        lines: The table: its few most telling columns.
        picture: Contents of the picture beside the file; ``None`` if there is none.
    """

    path: Path
    about: Mapping[str, str]
    notes: Sequence[str]
    lines: Sequence[Mapping[str, str]]
    picture: bytes | None


def read_reproduced(path: Path) -> Reproduced:
    """Read an item of a reproduction.

    Raises:
        ValueError: If it is damaged.
        OSError: If it cannot be read.
    """
    numbers = read_json(path)
    about = {name: numbers.get(name) for name in ("item", "title", "paper", "shows", "size")}
    rows, notes = numbers.get("rows"), numbers.get("notes")
    if not all(isinstance(each, str) for each in about.values()) or not isinstance(rows, list):
        raise DamagedFile(path, "it is no item of a reproduction: title, paper, size or rows are missing")
    try:
        lines = brief([_with_infinities(row) for row in rows])
    except (AttributeError, LookupError, TypeError, ArithmeticError, StopIteration) as error:
        raise DamagedFile(path, f"its rows cannot be read ({error!r})") from error
    picture = path.with_suffix(".png")
    return Reproduced(
        path,
        {name: str(each) for name, each in about.items()},
        [str(note) for note in notes] if isinstance(notes, list) else [],
        lines,
        _picture(picture) if picture.is_file() else None,
    )


def _with_infinities(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in which a true ε beside a claimed one is infinite again, as which JSON has ``null``."""
    claimed = {name.replace("claimed ε", "true ε") for name, value in row.items() if values.is_number(value)}
    return {name: math.inf if value is None and name in claimed else value for name, value in row.items()}
