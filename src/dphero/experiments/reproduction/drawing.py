"""Pictures: one look for all items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dphero.experiments.plots import save_figure
from dphero.experiments.reproduction.settings import METHOD_TITLES, PUBLISHED

__all__ = ["COLOURS", "finish", "grid", "line"]

# Colours that colour-blind readers can tell apart (Okabe and Ito), and a line style besides.
COLOURS: Mapping[str, str] = {"sgd": "#000000", "dp-sgd": "#0072B2", "dp-hero": "#009E73", PUBLISHED: "#D55E00"}
_STYLES: Mapping[str, str] = {"sgd": "--", "dp-sgd": "-", "dp-hero": "-", PUBLISHED: ":"}
_MARKERS: Mapping[str, str] = {"sgd": "", "dp-sgd": "s", "dp-hero": "o", PUBLISHED: "x"}


def grid(rows: int, columns: int, *, width: float = 3.5, height: float = 2.7, **more: Any) -> tuple[Any, Any]:
    """Return a figure that belongs to no window, and its axes as a list of rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns + 0.4, height * rows + 1.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **more)
    for each in axes.flat:
        each.grid(True, alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def line(axes: Any, method: str, x: Sequence[float], y: Sequence[float]) -> None:
    """Draw one method's curve."""
    axes.plot(
        x,
        y,
        color=COLOURS[method],
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
    below = 0.98 - 0.24 / figure.get_figheight()  # a line under the title, however high the figure is
    parts = [
        figure.suptitle(f"{title}\n", fontsize=12),
        figure.text(0.5, below, note, ha="center", va="top", fontsize=8, color="#555555"),
    ]
    if entries:
        below_all = {"loc": "outside lower center", "ncols": columns, "fontsize": 8}
        parts.append(figure.legend(entries.values(), entries.keys(), **below_all))
    _widen(figure, parts)
    save_figure(figure, path)


def _widen(figure: Any, parts: Sequence[Any]) -> None:
    """Make the figure wide enough that none of its parts is cut off."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    widest = max(part.get_window_extent(renderer).width for part in parts) / figure.dpi
    figure.set_figwidth(max(figure.get_figwidth(), widest + 0.4))
