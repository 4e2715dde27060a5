"""What a figure is before it is drawn: plain values for plotly, words for those who cannot see it, and its numbers."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dphero.experiments.comparison.table import Row
from dphero.experiments.pictures import VERDICT_COLOURS

__all__ = ["VERDICT_COLOURS", "Drawing", "Style", "layout", "line_label", "safe", "styles"]

# Sound methods: colours that colour-blind readers can tell apart, none of them a verdict's; and a shape besides.
_COLOURS = ("#2e7cc7", "#8b5fc7", "#1fa3b5", "#c2628f", "#8a7f2c", "#5d6fe0", "#9a6b4a", "#4aa3e0")
_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross", "x", "pentagon", "star", "hexagon")


@dataclass(frozen=True)
class Drawing:
    """A figure to be drawn.

    Attributes:
        name: Its place on the page.
        title: Above it.
        description: What can be seen, for those who cannot.
        spec: ``data`` and ``layout`` as plotly takes them.
        headings: Of the table of its numbers.
        lines: That table.
        height: In pixels.
        note: What is not drawn, or lies behind something else.
        controls: What its reader may switch, by names that the page's script knows.
    """

    name: str
    title: str
    description: str
    spec: dict[str, Any]
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    height: int = 380
    note: str = ""
    controls: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class Style:
    """How all lines of a method look."""

    group: str
    colour: str
    symbol: str
    dash: str

    def trace(self, shown: set[str]) -> dict[str, Any]:
        """Return the beginnings of a line; the first of each method is the one in the legend."""
        first = self.group not in shown
        shown.add(self.group)
        return {
            "type": "scatter",
            "name": safe(self.group),
            "legendgroup": safe(self.group),
            "showlegend": first,
            "line": {"color": self.colour, "dash": self.dash, "width": 2},
            "marker": {"color": self.colour, "symbol": self.symbol, "size": 7},
        }


def styles(rows: Sequence[Row]) -> dict[str, Style]:
    """Return a style for each method; unsound and non-private ones have the colour of their verdict."""
    found: dict[str, Style] = {}
    for row in rows:
        if row.method in found:
            continue
        number = len(found)
        symbol = _SYMBOLS[number % len(_SYMBOLS)]
        name = row.method + (f" ({row.remark})" if row.remark else "")
        if not row.sound:
            found[row.method] = Style(name, VERDICT_COLOURS["unsound"], symbol, "dot")
        elif row.protects == "nothing":
            found[row.method] = Style(name, VERDICT_COLOURS["open"], symbol, "dash")
        else:
            found[row.method] = Style(name, _COLOURS[number % len(_COLOURS)], symbol, "solid")
    return found


def layout(x: str, y: str) -> dict[str, Any]:
    """Return the layout that all figures share; the page adds the colours of its theme."""
    axis = {"automargin": True, "zeroline": False, "gridcolor": "rgba(128,128,128,0.2)", "linecolor": "#888888"}
    return {
        "xaxis": {**axis, "title": {"text": x}},
        "yaxis": {**axis, "title": {"text": y}},
        "margin": {"l": 56, "r": 16, "t": 12, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": -0.25},
        "uirevision": "kept",
    }


def line_label(row: Row) -> str:
    """Return what a line stands for: method, setting and ε."""
    asked = row.asked_epsilon
    if row.protects == "nothing":
        return f"{row.label} ({row.remark})" if row.remark else row.label
    at = f", ε = {asked:g}" if asked is not None and math.isfinite(asked) else ""
    return f"{row.label}{at}" + (f" ({row.remark})" if row.remark else "")


def safe(text: str) -> str:
    """Return a name as plotly shows it: it takes some HTML in texts, and names are none."""
    return html.escape(text, quote=False)
