"""A picture of who holds what: one row for each client, one column for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dphero.experiments.plots import require_matplotlib, save_figure
from dphero.experiments.runs.files import write_text

_MOST_ROWS = 100


def plot_partition(counts: NDArray[np.int64], classes: tuple[str, ...], path: Path, *, title: str) -> None:
    """Draw how many examples of each class each client holds; the figures go to a CSV beside it.

    Args:
        counts: Clients × classes.
        classes: The names of the classes.
        path: Without ending: ``.png``, ``.svg`` and ``.csv`` are written.
        title: Of the picture.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    header = ",".join(["client", *(f'"{name}"' for name in classes)])
    rows = [",".join(map(str, [client, *row])) for client, row in enumerate(counts.tolist())]
    write_text(path.with_suffix(".csv"), "\n".join([header, *rows]) + "\n")
    shown = counts[:_MOST_ROWS]
    figure = Figure(figsize=(1.5 + 0.6 * len(classes), 1.6 + 0.25 * len(shown)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shown, aspect="auto", cmap="viridis", vmin=0)
    axes.set_xticks(range(len(classes)), classes, rotation=45 if max(map(len, classes)) > 3 else 0)
    rows_named = range(len(shown))[:: max(1, len(shown) // 20)]
    axes.set_yticks(rows_named, [f"{row}  ({shown[row].sum():,})" for row in rows_named])
    axes.set_xlabel("class")
    axes.set_ylabel("client (examples in all)")
    axes.set_title(title if len(shown) == len(counts) else f"{title} (the first {len(shown)} clients)")
    if shown.size <= 200:
        middle = shown.max() / 2
        for (row, column), value in np.ndenumerate(shown):
            axes.text(column, row, str(value), ha="center", va="center", color="white" if value < middle else "black")
    figure.colorbar(image, label="examples")
    save_figure(figure, path)
