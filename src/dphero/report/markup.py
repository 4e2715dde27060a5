"""HTML in which every text is escaped: by construction, not by care."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

_TWO_COLUMNS = 8  # lines of names and values from which there are two beside each other
_MOST_WHOLE = 16  # lines of a table that is printed on one page
_MOST_STACKED = 8  # columns of a table whose lines a phone shows as cards


class Html(str):
    """Text that is HTML already. Any other ``str`` is escaped when it is put into a tag."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Itself, in a notebook."""
        return str(self)


def join(*parts: str | None) -> Html:
    """Return parts one after another; those that are not HTML are escaped, ``None`` is left out."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts if part is not None))


_GLUED = re.compile(r" (?=[%±])|(?<=±) |(?<=[εδσ]) (?=[=≤≈])|(?<=[εδσ] [=≤≈]) ")


def _glued(text: str | None) -> str | None:
    """Keep "3 %" and "ε = 3" on one line; HTML is left as it is."""
    return text if text is None or isinstance(text, Html) else _GLUED.sub("\u00a0", text)


def tag(name: str, /, *children: str | None, **attributes: Any) -> Html:
    """Return an element; ``class_`` is the attribute ``class``, and ``data_x`` is ``data-x``.

    An attribute of ``None`` or ``False`` is left out, one of ``True`` has no value.
    """
    if name in ("p", "li"):
        children = tuple(map(_glued, children))
    shown = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        shown.append(f" {key}" if value is True else f' {key}="{html.escape(str(value))}"')
    opened = f"<{name}{''.join(shown)}>"
    return Html(opened) if name in ("input", "img", "br", "meta") else Html(f"{opened}{join(*children)}</{name}>")


def table(
    headings: Sequence[str], lines: Iterable[Sequence[str | None]], *, caption: str, numbers: Sequence[int] = ()
) -> Html:
    """Return a table. On a phone its lines become cards, or, where columns are many, it can be scrolled sideways.

    Args:
        headings: Of the columns; the first column names the line.
        lines: The cells.
        caption: What it shows.
        numbers: Columns that hold numbers, set to the right.
    """

    def cell(place: int, text: str | None) -> Html:
        kind = "number" if place in numbers else None
        if place == 0:
            return tag("th", text, scope="row", class_=kind, role="rowheader")
        return tag("td", text, class_=kind, role="cell", data_label=headings[place] if stacked else None)

    stacked = 2 < len(headings) <= _MOST_STACKED
    head = [
        tag("th", text, scope="col", class_="number" if k in numbers else None, role="columnheader")
        for k, text in enumerate(headings)
    ]
    body = [tag("tr", *(cell(place, text) for place, text in enumerate(line)), role="row") for line in lines]
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *head, role="row"), role="rowgroup"),
        tag("tbody", *body, role="rowgroup"),
        role="table",  # said again, as a browser forgets it of lines that are shown as cards
        class_="stacked" if stacked else _pairs(len(body)) if len(headings) == 2 else None,
    )
    kept = "scroll whole" if len(body) <= _MOST_WHOLE else "scroll"
    return tag("div", whole, class_=kept, tabindex="0", role="region", aria_label=caption)


def _pairs(count: int) -> str:
    """Long lists of names and values stand in two columns where there is room."""
    return "pairs columns" if count >= _TWO_COLUMNS else "pairs"


def script_json(name: str, value: Any) -> Html:
    """Return values for the page's own script; nothing in them can end the element early."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Html(f'<script type="application/json" id="{html.escape(name)}">{text}</script>')
