"""Drawings of outcomes: the frontier of privacy and utility, and every run beside the mean of its setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dphero.experiments.comparison.table import Row
from dphero.report.figures.drawing import Drawing, Style, kind, layout, line_ends, line_label, safe, styles
from dphero.report.reading.gather import Material
from dphero.report.reading.runs import Run
from dphero.report.words import accuracy as shown_accuracy
from dphero.report.words import epsilon as shown_epsilon

_MOST_LINES = 30
_MOST_LABELS = 24
_HEIGHT = 440
_SEEN = 0.01  # of an ε: what is nearer cannot be told apart in the figure


def frontier(material: Material) -> Drawing | None:
    """Test accuracy against ε: a point for each setting, error bars of one standard deviation over the seeds."""
    rows = [row for row in material.rows if row.accuracy is not None]
    placed = [row for row in rows if _asked(row) is not None]
    if len(rows) < 2 or not placed:
        return None
    style, data, named = styles(material.rows), [], []
    ends = [min(_asked(row) or 1.0 for row in placed), max(_asked(row) or 1.0 for row in placed)]
    for label, group in _groups(rows).items():
        look = style[kind(group[0])]
        points = sorted((row for row in group if _asked(row) is not None), key=lambda row: _asked(row) or 0.0)
        if points:
            data += [_points(label, points, look), _single_runs(material, label, points, look)]
        else:
            data.append(_ceiling(label, group[0], look, ends))
        named.append((look.group, group[0].label, (points or group)[-1].accuracy or 0.0, look.colour))
    drawn = layout("privacy loss ε (smaller is more private)", "test accuracy")
    drawn["xaxis"] |= {
        "type": "log",
        "tickvals": sorted({x for row in placed if (x := _asked(row)) is not None}),
        "tickformat": ".4~g",
    }
    low, high = _range(material, rows)
    drawn["yaxis"] |= {"tickformat": "~%", "range": [low, high]}
    if len(named) <= _MOST_LABELS:
        drawn["annotations"] = line_ends(named, low, high, _HEIGHT - 60)
        drawn["margin"] |= {"r": 20 + 7 * max(len(end["text"]) for end in drawn["annotations"])}
    lines = [
        [line_label(row), shown_epsilon(row.epsilon), shown_accuracy(row.accuracy, row.spread), str(row.seeds)]
        for row in rows
    ]
    return Drawing(
        "frontier",
        "Privacy against utility",
        "Test accuracy against the privacy loss ε, a line for each method with error bars of one standard deviation "
        "over the seeds; training without privacy is a horizontal dashed line.",
        {"data": data, "layout": drawn},
        ("setting", "true ε", "accuracy (mean ± sd)", "seeds"),
        lines,
        height=_HEIGHT,
        controls=_controls(material, placed, rows),
    )


def _controls(material: Material, placed: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """The switches that would change something: where ε is not the one asked for, and where a point is several runs."""
    moved = any(_elsewhere(_asked(row) or 0.0, _finite(row.epsilon)) for row in placed)
    several = material.runs and any(row.seeds > 1 for row in rows)
    return [*(["true-epsilon"] if moved else []), *(["single-runs"] if several else [])]


def _elsewhere(asked: float, true: float | None) -> bool:
    return true is None or abs(true - asked) > _SEEN * asked


def _range(material: Material, rows: Sequence[Row]) -> tuple[float, float]:
    """Where the axis of accuracy begins and ends: all points fit, with their error bars, and all single runs."""
    values = [(row.accuracy or 0.0) + sign * (row.spread or 0.0) for row in rows for sign in (-1, 1)]
    values += [run.result["accuracy"] for run in material.runs if run.result is not None]
    room = max(0.06 * (max(values) - min(values)), 0.002)
    return min(values) - room, max(values) + room


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Lines of the frontier: method and setting, whatever ε."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.label + (f" ({row.remark})" if row.remark else ""), []).append(row)
    return found


def _asked(row: Row) -> float | None:
    """Where a row stands: at the ε it was asked for, or at its true one."""
    if row.protects == "nothing":
        return None
    return row.asked_epsilon if row.asked_epsilon is not None else _finite(row.epsilon)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _points(label: str, rows: Sequence[Row], look: Style) -> dict[str, Any]:
    asked, true = [_asked(row) for row in rows], [_finite(row.epsilon) for row in rows]
    return {
        "type": "scatter",
        "name": safe(label),
        "legendgroup": safe(look.group),
        "x": asked,
        "y": [row.accuracy for row in rows],
        "error_y": {"type": "data", "array": [row.spread or 0.0 for row in rows], "thickness": 1.5, "width": 4},
        "customdata": [[shown_epsilon(row.epsilon), row.spread or 0.0, row.seeds] for row in rows],
        "mode": "lines+markers",
        "line": look.line,
        "marker": {"color": look.colour, "symbol": look.symbol, "size": 9},
        "meta": {"asked": asked, "true": true},
        "hovertemplate": f"{safe(label)}<br>true ε %{{customdata[0]}}<br>accuracy %{{y:.2%}} ± %{{customdata[1]:.2%}}"
        "<br>seeds: %{customdata[2]}<extra></extra>",
    }


def _single_runs(material: Material, label: str, rows: Sequence[Row], look: Style) -> dict[str, Any]:
    """The runs behind the means; hidden until they are asked for."""
    asked: list[float | None] = []
    true: list[float | None] = []
    values, names = [], []
    for row in rows:
        for run in material.runs_of(row):
            if run.result is not None:
                asked.append(_asked(row))
                true.append(_finite(_epsilon(run)))
                values.append(run.result["accuracy"])
                names.append(safe(run.name))
    return {
        "type": "scatter",
        "name": safe(f"{label}: single runs"),
        "legendgroup": safe(look.group),
        "showlegend": False,
        "visible": False,
        "x": asked,
        "y": values,
        "customdata": names,
        "mode": "markers",
        "marker": {"color": look.colour, "symbol": f"{look.symbol}-open", "size": 7},
        "meta": {"asked": asked, "true": true, "single": True},
        "hovertemplate": "%{customdata}<br>accuracy %{y:.2%}<extra></extra>",
    }


def _epsilon(run: Run) -> float:
    assert run.result is not None
    value = run.result["epsilon"]
    return math.inf if value is None else float(value)


def _ceiling(label: str, row: Row, look: Style, ends: Sequence[float]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": safe(label),
        "legendgroup": safe(look.group),
        "x": [ends[0] * 0.9, ends[1] * 1.1],
        "y": [row.accuracy, row.accuracy],
        "mode": "lines",
        "line": {"color": look.colour, "dash": "dash", "width": 2},
        "meta": {"everywhere": True},
        "hovertemplate": f"{safe(label)}<br>accuracy %{{y:.2%}}<extra></extra>",
    }


def seeds(material: Material) -> Drawing | None:
    """The accuracy of every finished run, beside the mean of its setting."""
    rows = [row for row in material.rows if row.accuracy is not None and material.runs_of(row)]
    if not rows or len(rows) > _MOST_LINES or not any(row.seeds > 1 for row in rows):
        return None
    style, data, shown, lines = styles(material.rows), [], set[str](), []
    for row in rows:
        finished = [run for run in material.runs_of(row) if run.result is not None]
        values = [run.result["accuracy"] for run in finished if run.result is not None]
        label = safe(line_label(row))
        data.append(
            style[kind(row)].trace(shown)
            | {
                "x": values,
                "y": [label] * len(values),
                "customdata": [safe(run.name) for run in finished],
                "mode": "markers",
                "hovertemplate": "%{customdata}: %{x:.2%}<extra></extra>",
            }
        )
        data.append(_mean(row, label, style[kind(row)]))
        lines.append(
            [line_label(row), shown_accuracy(row.accuracy, row.spread), " ".join(f"{100 * v:.2f}" for v in values)]
        )
    drawn = layout("test accuracy", "")
    drawn["xaxis"] |= {"tickformat": "~%"}
    drawn["yaxis"] |= {"autorange": "reversed", "type": "category", "title": {"text": ""}}
    return Drawing(
        "seeds",
        "Every run, and the mean of its setting",
        "A line for each setting with a point for the accuracy of each run, the mean as a vertical stroke and one "
        "standard deviation as an error bar.",
        {"data": data, "layout": drawn},
        ("setting", "mean ± sd", "runs (%)"),
        lines,
        height=90 + 30 * len(rows),
    )


def _mean(row: Row, label: str, look: Style) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": label,
        "legendgroup": safe(look.group),
        "showlegend": False,
        "x": [row.accuracy],
        "y": [label],
        "error_x": {"type": "data", "array": [row.spread or 0.0], "thickness": 1.5, "width": 5},
        "mode": "markers",
        "marker": {"symbol": "line-ns-open", "size": 16, "color": look.colour, "line": {"width": 2}},
        "hovertemplate": "mean %{x:.2%}<extra></extra>",
    }
