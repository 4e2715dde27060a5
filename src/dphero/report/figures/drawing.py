"""What a figure is before it is drawn: plain values for plotly, words for those who cannot see it, and its numbers."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dphero.experiments.comparison.table import Row
from dphero.experiments.pictures import GREY, colours_of, move_apart

_MOST_POINTS = 500  # of a line: more cannot be told apart on a screen
_RIM, _SAME = 5, 0.04  # pixels that a line shows beside one above it; values that cannot be told apart
_FULL = 1  # pixel more for a line upon another, whose colour would mix with that below
_MOST_WIDER = 12  # lines; among more, wide ones would cover the others
TOGETHER = "Curves that are the same, or nearly so, lie upon each other: the lower ones are drawn wider."
_Point = TypeVar("_Point")
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
            "line": self.line,
            "marker": {"color": self.colour, "symbol": self.symbol, "size": 7},
        }

    @property
    def line(self) -> dict[str, Any]:
        """How its lines are drawn: grey ones, that others are compared with, are thinner."""
        return {"color": self.colour, "dash": self.dash, "width": 1.2 if self.colour == GREY else 2}


def kind(row: Row) -> str:
    """Return what all lines of one look have in common: the method, and what must be read with it."""
    return row.method + (f" ({row.remark})" if row.remark else "")


def styles(rows: Sequence[Row]) -> dict[str, Style]:
    """Return a style for each :func:`kind`: the colour its method has in all pictures, and a shape besides."""
    first = {kind(row): row for row in reversed(rows)}
    reached = {name: max((row.accuracy or 0.0 for row in rows if kind(row) == name), default=0.0) for name in first}
    best_first = {name: first[name].method for name in sorted(first, key=lambda name: -reached[name])}
    colours = colours_of(best_first, [name for name, row in first.items() if not row.sound])
    found: dict[str, Style] = {}
    for number, name in enumerate(dict.fromkeys(map(kind, rows))):
        row = first[name]
        dash = "dot" if not row.sound else "dash" if row.protects == "nothing" else "solid"
        found[name] = Style(name, colours[name], _SYMBOLS[number % len(_SYMBOLS)], dash)
    return found


def thinned(points: Sequence[_Point]) -> Sequence[_Point]:
    """Return a line of at most so many points as a screen can show: the first, the last, and some between."""
    every = math.ceil(len(points) / _MOST_POINTS)
    return points if every <= 1 else [*points[:-1:every], points[-1]]


def layout(x: str, y: str) -> dict[str, Any]:
    """Return the layout that all figures share; the page adds the colours of its theme."""
    axis = {"automargin": True, "zeroline": False, "gridcolor": "rgba(128,128,128,0.2)", "linecolor": "#888888"}
    return {
        "xaxis": {**axis, "title": {"text": x, "standoff": 8}},
        "yaxis": {**axis, "title": {"text": y, "standoff": 12}},
        "margin": {"l": 56, "r": 16, "t": 12, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": -0.25},
        "uirevision": "kept",
    }


def wider_below(traces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Widen lines that lie upon others of nearly the same values, the lower ones more: the colours of all are seen."""
    if len(traces) > _MOST_WIDER:
        return list(traces)
    found = []
    for number, trace in enumerate(traces):
        rim = _RIM * min(2, sum(_coincide(trace, other) for other in traces[number + 1 :]))
        rim = rim or _FULL * any(_coincide(trace, other) for other in traces[:number])
        line = {**trace["line"], "width": trace["line"]["width"] + rim}
        marker = {**trace["marker"], "size": trace["marker"]["size"] + rim}
        found.append({**trace, "line": line, "marker": marker} if rim else trace)
    return found


def _coincide(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both are solid lines of different methods that hardly differ."""
    if {one["line"]["dash"], other["line"]["dash"]} != {"solid"} or one["name"] == other["name"]:
        return False
    if one["x"] != other["x"]:
        return False
    return all(abs(a - b) <= _SAME * max(abs(a), abs(b)) for a, b in zip(one["y"], other["y"], strict=True))


def line_ends(
    ends: Sequence[tuple[str, str, float, str]], low: float, high: float, pixels: int
) -> list[dict[str, Any]]:
    """Return names at the right end of lines, moved apart so that none covers another; narrow screens leave them out.

    Args:
        ends: Group, name, height and colour of each line.
        low: Where the vertical axis begins.
        high: Where it ends.
        pixels: Its length.
    """
    ordered = sorted(ends, key=lambda end: end[2])
    places = move_apart([value for _, _, value, _ in ordered], 15 / pixels * (high - low), high)
    return [
        {
            "name": safe(group), "text": safe(name if len(name) <= 30 else f"{name[:29]}…"),
            "font": {"color": colour, "size": 11}, "x": 1, "xref": "paper", "y": value,
            "xanchor": "left", "yanchor": "middle", "ax": 12, "ay": (value - place) / (high - low) * pixels,
            "showarrow": True, "arrowhead": 0, "arrowwidth": 0.7, "arrowcolor": colour, "standoff": 0,
        }
        for (group, name, value, colour), place in zip(ordered, places, strict=True)
    ]  # fmt: skip


def line_label(row: Row) -> str:
    """Return what a line stands for: method, setting and ε."""
    asked, noise = row.asked_epsilon, row.noise_multiplier
    if row.protects == "nothing":
        at = ""
    elif asked is not None and math.isfinite(asked):
        at = f", ε = {asked:g}"
    else:
        at = f", σ = {noise:.4g}" if noise is not None else ""
    return f"{row.label}{at}" + (f" ({row.remark})" if row.remark else "")


def safe(text: str) -> str:
    """Return a name as plotly shows it: it takes some HTML in texts, and names are none."""
    return html.escape(text, quote=False)
