"""One look for all pictures: a colour for each verdict and for each method of the paper, the same everywhere.

Colours are those that colour-blind readers can tell apart (Okabe and Ito). No matplotlib is needed to import this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

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

FURTHER = ("#C0609A", "#C98500", "#2F93CF", "#8C6D31", "#8A63D2", "#7A7A00")
"""For whatever else is drawn, in this order; on white and on a dark page each has a contrast of three or more."""

GREY = "#8A8A8A"
"""For what is there to be compared with."""

ON_DARK: Mapping[str, str] = {METHOD_COLOURS["sgd"]: "#e6eaf0", VERDICT_COLOURS["refuted"]: "#e0559f"}
"""What stands on a dark page for a colour that cannot be seen there."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")


_MANY = 7  # names; of more, only the best known and the first few others have a colour
_FEW = 3


def colours_of(methods: Mapping[str, str], unsound: Collection[str] = ()) -> dict[str, str]:
    """Return a colour for each name: that of its method, that of what is unsound, or a further one.

    Among many names most are grey, so that the others can be followed.

    Args:
        methods: The method of each name, the most important names first: those are the last to become grey.
        unsound: Names of what is unsound as published.
    """
    further = iter(FURTHER[:_FEW] if len(methods) > _MANY else FURTHER)
    found = {}
    for name, method in methods.items():
        own = VERDICT_COLOURS["unsound"] if name in unsound else METHOD_COLOURS.get(method)
        found[name] = own or next(further, GREY)
    return found


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
    places = move_apart([value for _, value, _ in ordered], step, top)
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


def move_apart(values: Sequence[float], step: float, top: float) -> list[float]:
    """Return places near ascending ``values`` that lie at least ``step`` apart, none above ``top``.

    Values that are too close share a cluster of places, which lies as near to all of them as it can.
    """
    clusters: list[list[float]] = []
    starts: list[float] = []  # where each cluster begins
    for value in values:
        clusters.append([value])
        starts.append(value)
        while len(clusters) > 1 and starts[-2] + step * len(clusters[-2]) > starts[-1]:
            last, _ = clusters.pop(), starts.pop()
            clusters[-1] += last
            starts[-1] = sum(each - step * k for k, each in enumerate(clusters[-1])) / len(clusters[-1])
    places = [start + step * k for start, each in zip(starts, clusters, strict=True) for k in range(len(each))]
    for number in reversed(range(len(places))):  # what would stand above the top pushes the others down
        limit = top if number == len(places) - 1 else places[number + 1] - step
        places[number] = min(places[number], limit)
    return places
