"""Heat maps that ``dphero explain`` has drawn: its pictures and its table, as they lie in a folder."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dphero._files import DamagedFile, open_json, read_bytes
from dphero.experiments.runs.files import read_json
from dphero.report.markup import Html, join, table, tag

__all__ = ["Explained", "heat_maps", "read_explained"]

_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_BYTES = 4_000_000  # of all pictures on a page, which has to stay below 10 MB


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


def read_explained(place: Path) -> Explained:
    """Read a folder of explanations.

    Raises:
        ValueError: If ``explain.json`` is damaged.
        OSError: If it cannot be read.
    """
    numbers = open_json(read_json(place / "explain.json"), place / "explain.json", required=False)
    listed = numbers.get("pictures")
    pictures, problems = [], []
    for each in listed if isinstance(listed, list) else []:
        name = str(each.get("file")) if isinstance(each, Mapping) else ""
        try:
            if Path(name).name != name or not name.endswith(".png"):
                raise DamagedFile(place / "explain.json", f"{name!r} is no picture beside it")
            contents = read_bytes(place / name, follow=False)
            if not contents.startswith(_PNG):
                raise DamagedFile(place / name, "it is no PNG picture")
            pictures.append((str(each.get("title") or name), contents))
        except (ValueError, OSError) as error:
            problems.append((str(place / name), str(error)))
    return Explained(place, numbers, pictures, problems)


def heat_maps(found: Sequence[Explained]) -> Html | None:
    """Return pictures and verdicts of all explanations."""
    if not found:
        return None
    parts: list[Html | None] = []
    left = _MOST_BYTES
    for explained in found:
        stamp = explained.numbers.get("stamp")
        if stamp:
            parts.append(tag("div", tag("strong", str(stamp)), class_="notice private", role="note"))
        for title, contents in explained.pictures:
            if len(contents) > left:
                parts.append(tag("p", f"{title}: left out, the page would be too large. It lies in {explained.place}."))
                continue
            left -= len(contents)
            source = f"data:image/png;base64,{base64.b64encode(contents).decode('ascii')}"
            picture = tag("img", src=source, alt=f"{title} ({explained.place})")
            parts.append(tag("figure", tag("figcaption", tag("h3", title)), picture, class_="picture"))
        parts.append(_verdicts(explained))
    return join(*parts)


def _verdicts(explained: Explained) -> Html | None:
    """Return the table of verdicts, whatever columns it has."""
    lines = [each for each in _list(explained.numbers.get("verdicts")) if isinstance(each, Mapping)]
    names = list(dict.fromkeys(str(name) for line in lines for name in line))
    if not names:
        return None
    cells = [[_shown(line.get(name)) for name in names] for line in lines]
    images = explained.numbers.get("images")
    about = f": {images.get('count')} images, {images.get('source')}" if isinstance(images, Mapping) else ""
    return table(names, cells, caption=f"Does privacy change the maps by more than another seed does{about}")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
