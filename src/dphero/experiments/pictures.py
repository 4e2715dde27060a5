"""One look for all pictures: a colour for each verdict and for each method of the paper, the same everywhere.

Colours are those that colour-blind readers can tell apart (Okabe and Ito). No matplotlib is needed to import this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "FURTHER",
    "GREY",
    "MARKERS",
    "METHOD_COLOURS",
    "VERDICT_COLOURS",
    "end_labels",
    "figure_of",
    "room_above",
]

VERDICT_COLOURS: Mapping[str, str] = {
    "sound": "#2f8f6b",
    "unproven": "#b98317",
    "unsound": "#d1541f",
    "refuted": "#b3206e",
    "open": "#7b8494",
}
"""One colour for one verdict, in pictures and on pages; readable on white and on black."""

METHOD_COLOURS: Mapping[str, str] = {
    "sgd": "#000000",
    "dp-sgd": "#0072B2",
    "dp-hero": "#009E73",
    "dp-hero-published": VERDICT_COLOURS["unsound"],
}
"""By method: those that are compared most."""

FURTHER = ("#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#5D3A9B", "#7A7A00")
"""For whatever else is drawn, in this order."""

GREY = "#8A8A8A"
"""For what is there to be compared with."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")


def figure_of(width: float, height: float, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Any, Any]:
    """Return a figure that belongs to no window, and its axes as an array of rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **more)
    for each in axes.flat:
        each.grid(True, alpha=0.3)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def room_above(axes: Any, values: Sequence[float], share: float = 0.16) -> None:
    """Let a vertical axis reach from just below the smallest value to above the largest, with room for a note there."""
    low, high = min(values), max(values)
    span = max(high - low, 1.0)
    axes.set_ylim(low - 0.05 * span, high + share * span)


def end_labels(axes: Any, ends: Sequence[tuple[str, float, str]], *, size: float = 7.5) -> None:
    """Write names at the right end of lines, moved apart so that none covers another.

    Args:
        axes: Where the lines are; their limits must be final.
        ends: Name, height and colour of each line.
        size: Of the letters, in points.
    """
    bottom, top = axes.get_ylim()
    height = axes.get_position().height * axes.figure.get_figheight() * 72
    step = 1.25 * size / height * (top - bottom)
    ordered = sorted(ends, key=lambda end: end[1])
    places: list[float] = []
    for _, value, _ in ordered:  # from below, each at least a line above the last
        places.append(value if not places else max(value, places[-1] + step))
    for number in reversed(range(len(places))):  # what would stand above the axes pushes the others down
        limit = top if number == len(places) - 1 else places[number + 1] - step
        places[number] = min(places[number], limit)
    for (name, value, colour), place in zip(ordered, places, strict=True):
        axes.annotate(
            name,
            (1.0, value),
            (1.04, place),
            xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"),
            fontsize=size,
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "alpha": 0.7,
                "relpos": (0, 0.5),
                "shrinkB": 0,
            },
        )
