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
_SCORES = {"spearman": "Spearman", "iou": "IoU, top 20 %", "same_class": "same class"}
_YARDSTICK = "to compare with"
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
            framed = tag("div", picture, class_="frame", tabindex="0", role="region", aria_label=title)
            parts.append(tag("figure", tag("figcaption", tag("h3", title)), framed, class_="picture"))
        parts.append(_verdicts(explained))
    return join(*parts)


def _verdicts(explained: Explained) -> Html | None:
    """Return how far the maps of each training agree with those of training without privacy, and what that means."""
    numbers = explained.numbers
    verdicts = [each for each in _list(numbers.get("verdicts")) if isinstance(each, Mapping)]
    reference, words = numbers.get("reference"), dict[str, list[str]]()
    for each in verdicts:
        words.setdefault(str(each.get("group")), []).append(f"{_score(each.get('score'))}: {each.get('verdict')}")
    lines = [
        [
            _other(each, reference),
            *(_range(each.get(name)) for name in _SCORES),
            "; ".join(words.pop(group, [_YARDSTICK])),
        ]
        for each in _list(numbers.get("agreement"))
        if isinstance(each, Mapping)
        and each.get("epoch") == each.get("to") == "last"
        and reference in (each.get("a"), each.get("b"))
        and (group := str(each.get("b") if each.get("a") == reference else each.get("a")))
    ]
    lines += [[group, *("–" for _ in _SCORES), "; ".join(said)] for group, said in words.items()]
    if not lines:
        return None
    images = numbers.get("images")
    about = f" ({images.get('count')} images, {images.get('source')})" if isinstance(images, Mapping) else ""
    headings = ("training", *_SCORES.values(), "by more than another seed?")
    caption = (
        f"How far privacy changes the maps: agreement with those of {reference}, mean (lowest to highest pair){about}"
    )
    return table(headings, lines, caption=caption if reference else "Verdicts", numbers=range(1, 1 + len(_SCORES)))


def _other(agreement: Mapping[str, Any], reference: Any) -> str:
    """The training that is compared with the reference."""
    first, second = agreement.get("a"), agreement.get("b")
    if first == second:
        return f"{reference}, another seed"
    return str(second if first == reference else first)


def _score(name: Any) -> str:
    return _SCORES.get(str(name), str(name))


def _range(value: Any) -> str:
    names = ("mean", "low", "high")
    if not isinstance(value, Mapping) or not all(isinstance(value.get(name), int | float) for name in names):
        return "–"
    mean, low, high = (value[name] for name in names)
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
