"""Pictures of a comparison, each as PNG and SVG with the data behind it as CSV: accuracy against ε, and curves."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dphero._files import write_atomically
from dphero.experiments.comparison.sweep import Outcome
from dphero.experiments.comparison.table import Row, shown_price, tabulate, to_csv
from dphero.experiments.pictures import GREY, MARKERS, colours_of, end_labels, figure_of
from dphero.experiments.runs.files import write_text

_LEGEND_LINES = 7  # more are named at their ends


def _styles(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Return colour and marker of each label: a method has its own colour wherever it is drawn."""
    groups = _by_label(rows)
    best = sorted(groups, key=lambda label: -max(row.accuracy or 0.0 for row in groups[label]))
    colours = colours_of(
        {label: groups[label][0].method if label.split(":")[0] == groups[label][0].method else label for label in best},
        [label for label, group in groups.items() if not group[0].sound],
    )
    return {label: (colours[label], MARKERS[number % len(MARKERS)]) for number, label in enumerate(groups)}


def plot_accuracy(rows: Sequence[Row], directory: Path) -> None:
    """Draw test accuracy against ε, a line for each method and setting, error bars of one standard deviation.

    A method stands at the ε it was asked for (or at its true ε, where only noise was given). One without privacy is a
    horizontal line; one that is unsound says so in the legend, with its true ε.
    Writes ``accuracy.png``, ``.svg`` and ``.csv``.
    """
    rows = [row for row in rows if row.accuracy is not None]
    records = [_point(row) for row in rows]
    write_text(directory / "accuracy.csv", to_csv(records), private=True)
    figure, axes = _figure(7.5, 5.2)
    groups = _by_label(rows)
    ticks = sorted({x for row in rows if (x := _epsilon(row)) is not None})
    shifts, styles, ends = _shifts(len(groups), ticks), _styles(rows), []
    for number, (label, group) in enumerate(groups.items()):
        colour, marker = styles[label]
        points = sorted(((x, row) for row in group if (x := _epsilon(row)) is not None), key=lambda point: point[0])
        if not points:
            _ceiling(axes, group[0], colour)
            ends.append((f"{label} (ε = ∞)", 100 * (group[0].accuracy or 0), colour))
            continue
        places = [(x * shifts[number], 100 * (row.accuracy or 0)) for x, row in points]
        ends.append((label, places[-1][1], colour))
        axes.errorbar(
            *zip(*places, strict=True),
            yerr=[100 * (row.spread or 0) for _, row in points],
            label=label,
            color=colour,
            marker=marker,
            markersize=6,
            linestyle="-" if group[0].sound else ":",
            capsize=4,
            linewidth=1.0 if colour == GREY else 1.8,
            alpha=0.7 if colour == GREY else 1.0,
            zorder=2 if colour == GREY else 3,
        )
        for place, (_, row) in zip(places, points, strict=True):
            if not row.sound and row.epsilon is not None:
                _name(axes, f"true ε {_short_price(row.epsilon)}", place, row, colour)
    if ticks:
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
        axes.minorticks_off()
        axes.margins(x=0.08)
    axes.set_xlabel(f"privacy loss ε (log scale{_deltas(rows)}); smaller is more private")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(f"{', '.join(sorted({row.data for row in rows}))}: {_averaged(rows)}", fontsize=11)
    if len(groups) > _LEGEND_LINES:
        end_labels(axes, ends)
    else:
        _legend_of_all(figure, [axes])
    save_figure(figure, directory / "accuracy", private=True)


def _name(axes: Any, words: str, place: tuple[float, float], row: Row, colour: str) -> None:
    """Write something below a point and its error bar."""
    axes.annotate(
        words,
        (place[0], place[1] - 100 * (row.spread or 0)),
        xytext=(0, -5),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=7,
        color=colour,
        zorder=4,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8},
    )


def plot_curves(outcomes: Sequence[Outcome], directory: Path) -> None:
    """Draw test accuracy against the epoch, a panel for each ε, a line for each method and setting.

    Lines are means over the seeds, bands one sample standard deviation.
    Writes ``curves.png``, ``.svg`` and ``.csv``.
    """
    rows = tabulate(outcomes)
    by_name = {outcome.planned.name: outcome for outcome in outcomes}
    records, curves = [], {}
    for number, row in enumerate(rows):
        for name in row.runs:
            outcome = by_name[name]
            about = {"method": row.method, "asked_epsilon": row.asked_epsilon, "seed": outcome.planned.recipe.seed}
            setting = {f"setting.{name}": value for name, value in row.setting.items()}
            records += [{"run": name, **about, **setting, **line} for line in outcome.metrics]
        curves[number] = mean_curve([by_name[name].metrics for name in row.runs], "accuracy")
    write_text(directory / "curves.csv", to_csv(records), private=True)
    panels = _panels(rows)
    figure, grid = _figure(max(5.5, 3.9 * len(panels) + 1), 4.6, columns=len(panels))
    styles = _styles(rows)
    for axes, (title, numbers) in zip(grid, panels.items(), strict=True):
        for number in numbers:
            _draw_curve(axes, curves[number], rows[number], *styles[_legend_label(rows[number])])
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("epoch (passes over the data)")
    several = any(row.seeds > 1 for row in rows)
    grid[0].set_ylabel("test accuracy (%), mean ± sample sd" if several else "test accuracy (%), one seed")
    _legend_of_all(figure, grid)
    save_figure(figure, directory / "curves", private=True)


def _draw_curve(axes: Any, curve: Sequence[tuple[float, float, float]], row: Row, colour: str, marker: str) -> None:
    if not curve:
        return
    epochs = [epoch for epoch, _, _ in curve]
    means, spreads = ([100 * point[place] for point in curve] for place in (1, 2))
    axes.plot(
        epochs,
        means,
        color=colour,
        label=_legend_label(row),
        linestyle="-" if row.sound else ":",
        marker=marker if len(epochs) < 20 else None,
        markersize=4,
    )
    low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
    axes.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)


def mean_curve(runs: Sequence[Sequence[Mapping[str, Any]]], name: str) -> list[tuple[float, float, float]]:
    """Return (epoch, mean, sample sd) of a metric, where all begun runs were evaluated and the value is finite.

    Args:
        runs: The evaluations of each run; where they have no epoch (rounds of a federated run), steps are counted.
        name: Of the metric.
    """
    begun = [{line["step"]: line for line in lines} for lines in runs if lines]
    if not begun:
        return []
    found = []
    for step in sorted(set.intersection(*(set(lines) for lines in begun))):
        given = [lines[step].get(name) for lines in begun]
        values = [float(value) for value in given if isinstance(value, int | float) and math.isfinite(value)]
        if len(values) == len(begun):
            epoch = begun[0][step].get("epoch")
            when = float(epoch) if isinstance(epoch, int | float) else float(step)
            found.append((when, statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0))
    return found


def _short_price(value: float) -> str:
    """Return an ε as text, rounded up: large ones by their power of ten."""
    if value < 1e4 or math.isinf(value):
        return shown_price(value)
    power = math.floor(math.log10(value))
    return f"{math.ceil(value / 10 ** (power - 1)) / 10:g}e{power}"


def _shifts(groups: int, ticks: Sequence[float]) -> list[float]:
    """Return factors that set the groups' points a little apart, so that error bars can be told apart."""
    width = 0.012 * math.log(ticks[-1] / ticks[0]) if len(ticks) > 1 else 0.02
    return [math.exp(width * (number - (groups - 1) / 2)) for number in range(groups)]


def _panels(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Return the numbers of the rows in each panel; methods without privacy are in all."""
    asked = sorted({row.asked_epsilon for row in rows if row.asked_epsilon is not None})
    rest = [number for number, row in enumerate(rows) if row.asked_epsilon is None]
    if not asked:
        return {"training": rest}
    return {
        f"ε = {epsilon:g}": [number for number, row in enumerate(rows) if row.asked_epsilon == epsilon] + rest
        for epsilon in asked
    }


def _by_label(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_legend_label(row), []).append(row)
    return found


def _legend_label(row: Row) -> str:
    return row.label + (f": {row.remark}" if row.remark else "")


def _epsilon(row: Row) -> float | None:
    """Where a row stands on the axis of ε."""
    if row.asked_epsilon is not None:
        return row.asked_epsilon
    return row.epsilon if row.epsilon is not None and math.isfinite(row.epsilon) else None


def _point(row: Row) -> dict[str, Any]:
    return {
        "method": row.method,
        "data": row.data,
        **{f"setting.{name}": value for name, value in row.setting.items()},
        "plotted_epsilon": _epsilon(row),
        "asked_epsilon": row.asked_epsilon,
        "true_epsilon": row.epsilon,
        "claimed_epsilon": row.claimed_epsilon,
        "delta": row.delta,
        "accuracy_mean": row.accuracy,
        "accuracy_sample_sd": row.spread,
        "seeds": row.seeds,
        "remark": row.remark,
    }


def _ceiling(axes: Any, row: Row, colour: str) -> None:
    assert row.accuracy is not None
    mean, spread = 100 * row.accuracy, 100 * (row.spread or 0)
    axes.axhline(mean, color=colour, linestyle="--", label=f"{_legend_label(row)} (ε = ∞)")
    axes.axhspan(mean - spread, mean + spread, color=colour, alpha=0.12, linewidth=0)


def _averaged(rows: Sequence[Row]) -> str:
    """Say what each point is made of."""
    seeds = sorted({row.seeds for row in rows})
    if seeds == [1]:
        return "one seed, so the spread is not known"
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}" if seeds else "0"
    return f"mean ± sample sd of {count} seeds"


def _deltas(rows: Sequence[Row]) -> str:
    deltas = sorted({row.delta for row in rows if row.protects != "nothing"})
    return f", δ = {', '.join(f'{delta:g}' for delta in deltas)}" if deltas else ""


# -- figures ---------------------------------------------------------------------------------------------


def require_matplotlib() -> None:
    """Raise ``ImportError`` with advice if there is no matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"plots need matplotlib ({error}): pip install 'dphero[experiments]'") from error


def _figure(width: float, height: float, columns: int | None = None) -> tuple[Any, Any]:
    """Return a figure that belongs to no window, with axes (or a row of them, sharing their y axis)."""
    figure, axes = figure_of(width, height, columns=columns or 1, sharey=True)
    return figure, axes[0] if columns else axes[0][0]


def _legend_of_all(figure: Any, grid: Sequence[Any]) -> None:
    """One legend below all axes: it hides nothing."""
    entries: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=min(2, len(entries)), fontsize=8
        )


def save_figure(figure: Any, path: Path, *, private: bool = False) -> None:
    """Write a figure as ``path.png`` and ``path.svg``; one of private numbers is for its owner's eyes only."""
    for kind in ("png", "svg"):
        target = path.with_name(f"{path.name}.{kind}")
        drawn = io.BytesIO()
        figure.savefig(drawn, format=kind, dpi=150)
        write_atomically(target, drawn.getbuffer(), private=private)
