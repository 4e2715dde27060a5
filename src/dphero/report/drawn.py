"""The parts of the page that other commands have drawn: heat maps, and the paper's table and figures anew."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dphero.experiments.comparison.table import shown_price
from dphero.experiments.reproduction.settings import UNSOUND
from dphero.report.markup import Html, join, table, tag
from dphero.report.reading.drawn import Explained, Reproduced

_SCORES = {"spearman": "Spearman", "iou": "IoU, top 20 %", "same_class": "same class"}
_YARDSTICK = "to compare with"
_SCALE = 1.5  # pixels of a picture for one of the page: they are drawn with 150 to the inch, a page has 96
_MOST_BYTES = 4_000_000  # of all pictures on a page, which has to stay below 10 MB


class Pictures:
    """Puts pictures into a page, as long as it does not grow too large."""

    def __init__(self, most: int = _MOST_BYTES) -> None:
        self._left = most

    def show(self, title: str, contents: bytes, place: Path) -> Html:
        """Return a picture in a frame that can be scrolled on a phone, or words where there is no room for it."""
        if len(contents) > self._left:
            return tag("p", f"{title}: left out, the page would be too large. It lies in {place}.")
        self._left -= len(contents)
        source = f"data:image/png;base64,{base64.b64encode(contents).decode('ascii')}"
        known = contents[12:16] == b"IHDR"
        wide = round(int.from_bytes(contents[16:20], "big") / _SCALE) if known else 0
        picture = tag("img", src=source, alt=f"{title} ({place})", style=f"--width: {wide}px" if wide else None)
        framed = tag("div", picture, class_="frame", tabindex="0", role="region", aria_label=title)
        return tag("figure", tag("figcaption", tag("h3", title)), framed, class_="picture")


def heat_maps(found: Sequence[Explained], pictures: Pictures, *, private: bool = False) -> Html | None:
    """Return pictures and verdicts of all explanations: the verdicts follow the first picture.

    Args:
        found: The explanations.
        pictures: Where pictures go.
        private: Whether what was made from private images is shown too.
    """
    parts: list[Html | None] = []
    for explained in found:
        if len(found) > 1:
            parts.append(tag("p", tag("strong", str(explained.place)), class_="before-figure"))
        if explained.private:
            parts.append(_stamp(explained, shown=private))
        if explained.private and not private:
            continue
        shown = [pictures.show(title, contents, explained.place) for title, contents in explained.pictures]
        parts += [*shown[:1], _verdicts(explained), *shown[1:]]
    return join(*parts) if found else None


def _stamp(explained: Explained, *, shown: bool) -> Html:
    """Return what stands above private images, or in their place."""
    stamp = str(explained.numbers.get("stamp") or "PRIVATE training images: no ε covers this")
    left_out = f" They are left out here; they lie in {explained.place}, and --with-private-diagnostics shows them."
    return tag("div", tag("strong", f"{stamp}."), None if shown else left_out, class_="notice private", role="note")


def _verdicts(explained: Explained) -> Html | None:
    """Return how far the maps of each training agree with those of training without privacy, and what that means."""
    numbers = explained.numbers
    verdicts = [each for each in _list(numbers.get("verdicts")) if isinstance(each, Mapping)]
    reference, words = numbers.get("reference"), dict[str, list[tuple[str, str]]]()
    for each in verdicts:
        words.setdefault(str(each.get("group")), []).append((_score(each.get("score")), str(each.get("verdict"))))
    lines = [
        [
            _training(numbers, group, _other(each, reference)),
            *(_range(each.get(name)) for name in _SCORES),
            _faithful(numbers, group),
            _said(words.pop(group, [])),
        ]
        for each in _list(numbers.get("agreement"))
        if isinstance(each, Mapping)
        and each.get("epoch") == each.get("to") == "last"
        and reference in (each.get("a"), each.get("b"))
        and (group := str(each.get("b") if each.get("a") == reference else each.get("a")))
    ]
    lines += [[group, *("–" for _ in _SCORES), _faithful(numbers, group), _said(said)] for group, said in words.items()]
    if not lines:
        return None
    images = numbers.get("images")
    about = f" ({images.get('count')} images, {images.get('source')})" if isinstance(images, Mapping) else ""
    headings = ("training", *_SCORES.values(), "faithful", "verdict")
    caption = (
        f"How far privacy changes the maps, and whether by more than another seed does: agreement with those of "
        f"{reference}, mean (lowest to highest pair){about}. Faithful: insertion minus deletion, mean (lowest to "
        "highest run); 0 says nothing. ε: the largest of the runs"
    )
    return table(headings, lines, caption=caption if reference else "Verdicts", numbers=range(1, 2 + len(_SCORES)))


def _said(verdicts: Sequence[tuple[str, str]]) -> Html:
    """Return the verdicts by all scores, said once where they are the same."""
    if len({verdict for _, verdict in verdicts}) <= 1:
        return tag("span", verdicts[0][1] if verdicts else _YARDSTICK, class_="words")
    return tag("span", *(tag("div", f"{score}: {verdict}") for score, verdict in verdicts), class_="words")


def _training(numbers: Mapping[str, Any], group: str, name: str) -> Html:
    """The name of a training, and below it what it cost and reached."""
    runs = [each for each in _list(numbers.get("runs")) if isinstance(each, Mapping) and each.get("group") == group]
    if not runs:
        return join(name)
    spent = [each.get("epsilon") for each in runs]
    known = [float(each) for each in spent if isinstance(each, int | float)]
    true = "" if all(each.get("sound", True) for each in runs) else "true "
    cost = f"{true}ε = {shown_price(max(known) if len(known) == len(spent) else math.inf)}"
    reached = [float(value) for each in runs if isinstance(value := each.get("accuracy"), int | float)]
    mean = f"{100 * sum(reached) / len(reached):.1f} % right" if reached else ""
    words = ", ".join(each.replace(" ", "\u00a0") for each in (cost, mean) if each)
    return tag("span", name, tag("span", words, class_="range"))


def _faithful(numbers: Mapping[str, Any], group: str) -> str:
    """How much more probable the class is with the hottest positions sharp than with the coldest: over its runs."""
    group_of = {each.get("name"): each.get("group") for each in _list(numbers.get("runs")) if isinstance(each, Mapping)}
    values = [
        each["faithfulness"]
        for each in _list(numbers.get("maps"))
        if isinstance(each, Mapping)
        and each.get("epoch") == "last"
        and isinstance(each.get("faithfulness"), int | float)
        and (group_of.get(each.get("run")) == group or str(each.get("run")).startswith(f"{group} "))
    ]
    if not values:
        return "–"
    return _spread(f"{sum(values) / len(values):+.3f}", f"{min(values):+.3f}", f"{max(values):+.3f}")


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
    return _spread(f"{mean:.2f}", f"{low:.2f}", f"{high:.2f}")


def _spread(mean: str, low: str, high: str) -> Html:
    """A mean, and below it where its values lie."""
    return tag("span", mean, tag("span", f"{low} to {high}", class_="range"))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def reproduced(found: Sequence[Reproduced], pictures: Pictures) -> Html | None:
    """Return each item's picture, its table and its notes."""
    words = (
        "The sound mechanism and the published recipe, which is unsound and stands beside its true ε. Items that are "
        "called quick train for a fraction of what the paper does: they show how training begins. What lies within a "
        "band of another is not told apart."
    )
    parts: list[Html | None] = [tag("p", words)]
    for each in found:
        about = each.about
        place = about["paper"][:1].upper() + about["paper"][1:]
        parts += [
            pictures.show(place, each.picture, each.path) if each.picture else tag("h3", place),
            tag("p", f"{about['title']}, {about['size']}: {about['shows']}.", class_="sub"),
            tag(
                "details",
                tag("summary", "The numbers, and what to know of them"),
                _table(each),
                tag("ul", *(tag("li", note) for note in each.notes)),
                id=f"reproduced-{about['item']}",
            ),
        ]
    return join(*parts) if found else None


def _table(item: Reproduced) -> Html | None:
    """Return the table; what is unsound is marked in it."""
    if not item.lines:
        return None
    headings = list(item.lines[0])
    where = item.path.with_suffix(".md")
    lines = [[_marked(line[name]) for name in headings] for line in item.lines]
    return table(headings, lines, caption=f"The most telling columns; all are in {where}", numbers=_numbers(item.lines))


def _marked(text: str) -> Html:
    name, mark, _ = text.partition(f":\n{UNSOUND}")
    return join(name, tag("div", tag("span", UNSOUND.lower(), class_="badge unsound"))) if mark else join(text)


def _numbers(lines: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the columns that hold numbers."""
    return [
        place
        for place, name in enumerate(lines[0])
        if all(line[name].strip("<>≥ ∞").replace(",", "")[:1].isdigit() or not line[name].strip("∞") for line in lines)
    ]
