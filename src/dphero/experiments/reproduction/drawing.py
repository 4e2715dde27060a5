"""Pictures: one look for all items."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dphero.experiments.pictures import METHOD_COLOURS, figure_of
from dphero.experiments.plots import save_figure
from dphero.experiments.reproduction.settings import METHOD_TITLES, PUBLISHED

_STYLES: Mapping[str, str] = {"sgd": "--", "dp-sgd": "-", "dp-hero": "-", PUBLISHED: ":"}
_MARKERS: Mapping[str, str] = {"sgd": "", "dp-sgd": "s", "dp-hero": "o", PUBLISHED: "x"}


def grid(rows: int, columns: int, *, width: float = 3.5, height: float = 2.7, **more: Any) -> tuple[Any, Any]:
    """Return a figure that belongs to no window, and its axes as a list of rows."""
    return figure_of(width * columns + 0.4, height * rows + 1.4, rows, columns, **more)


def line(axes: Any, method: str, x: Sequence[float], y: Sequence[float], deviation: Sequence[float] = ()) -> None:
    """Draw one method's curve, and a band of one deviation around it where there is one."""
    if any(deviation):
        low, high = ([value + sign * by for value, by in zip(y, deviation, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=METHOD_COLOURS[method], alpha=0.18, linewidth=0)
    axes.plot(
        x,
        y,
        color=METHOD_COLOURS[method],
        linestyle=_STYLES[method],
        marker=_MARKERS[method],
        markersize=3.5,
        markevery=max(1, len(x) // 12),
        linewidth=1.8 if method == PUBLISHED else 1.4,
        label=METHOD_TITLES[method],
    )


def finish(figure: Any, path: Path, title: str, note: str, columns: int = 2) -> None:
    """Add title, one legend for all axes and a note on what was done, and write PNG and SVG.

    A figure that is too narrow for them is widened.
    """
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    lines = _wrapped(note, int(14.5 * figure.get_figwidth()))  # letters of this size in a line of the figure
    above = (0.34 + 0.16 * len(lines)) / figure.get_figheight()
    engine = figure.get_layout_engine()
    engine.set(rect=(0, 0, 1, 1 - above))  # the panels begin below title and note
    parts = [figure.text(0.5, 1 - 0.08 / figure.get_figheight(), title, ha="center", va="top", fontsize=12)]
    figure.text(
        0.5, 1 - 0.34 / figure.get_figheight(), "\n".join(lines), ha="center", va="top", fontsize=8, color="#555555"
    )
    if entries:
        below_all = {"loc": "outside lower center", "ncols": columns, "fontsize": 8}
        parts.append(figure.legend(entries.values(), entries.keys(), **below_all))
    _widen(figure, parts)
    save_figure(figure, path)


def _wrapped(text: str, width: int) -> list[str]:
    """Break a text into as few lines as there must be, of about the same length."""
    lines = textwrap.wrap(text, width)
    even = next(least for least in range(-(-len(text) // len(lines)), width + 1)
                if len(textwrap.wrap(text, least)) == len(lines)) if len(lines) > 1 else width  # fmt: skip
    return textwrap.wrap(text, even)


def _widen(figure: Any, parts: Sequence[Any]) -> None:
    """Make the figure wide enough that none of its parts is cut off."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    widest = max(part.get_window_extent(renderer).width for part in parts) / figure.dpi
    figure.set_figwidth(max(figure.get_figwidth(), widest + 0.4))
