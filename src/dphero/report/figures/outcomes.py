"""Drawings of outcomes: the frontier of privacy and utility, every run, claims and audits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dphero.experiments.comparison.table import Row
from dphero.report.figures.drawing import VERDICT_COLOURS, Drawing, Style, layout, line_label, safe, styles
from dphero.report.read import Material, Run
from dphero.report.words import accuracy as shown_accuracy
from dphero.report.words import epsilon as shown_epsilon
from dphero.report.words import verdict

__all__ = ["Claim", "claims", "claims_of", "frontier", "seeds"]

_MOST_LINES = 30

Claim = Mapping[str, Any]
"""A claim on trial: ``what``, ``claimed``, ``true``, ``audited`` (``None`` where not known), ``verdict``."""


def frontier(material: Material) -> Drawing | None:
    """Test accuracy against ε: a point for each setting, error bars of one standard deviation over the seeds."""
    rows = [row for row in material.rows if row.accuracy is not None]
    placed = [row for row in rows if _asked(row) is not None]
    if len(rows) < 2 or not placed:
        return None
    style, data = styles(material.rows), []
    ends = [min(_asked(row) or 1.0 for row in placed), max(_asked(row) or 1.0 for row in placed)]
    for label, group in _groups(rows).items():
        look = style[group[0].method]
        points = sorted((row for row in group if _asked(row) is not None), key=lambda row: _asked(row) or 0.0)
        if points:
            data += [_points(label, points, look), _single_runs(material, label, points, look)]
        else:
            data.append(_ceiling(label, group[0], look, ends))
    drawn = layout("privacy loss ε (smaller is more private)", "test accuracy")
    drawn["xaxis"] |= {
        "type": "log",
        "tickvals": sorted({x for row in placed if (x := _asked(row)) is not None}),
        "tickformat": ".4~g",
    }
    drawn["yaxis"] |= {"tickformat": "~%"}
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
        height=440,
        controls=("true-epsilon", "single-runs"),
    )


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


def _boundless(claim: Claim) -> bool:
    return claim["true"] is not None and math.isinf(claim["true"])


def _beyond(label: str, claim: Claim) -> dict[str, Any]:
    """What no axis is long enough for."""
    place = {"x": 1, "xref": "paper", "xanchor": "left", "y": label, "showarrow": False}
    return {**place, "text": " true ε = ∞ →", "font": {"color": VERDICT_COLOURS[claim["verdict"]]}}


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
        "line": {"color": look.colour, "dash": look.dash, "width": 2},
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
            style[row.method].trace(shown)
            | {
                "x": values,
                "y": [label] * len(values),
                "customdata": [safe(run.name) for run in finished],
                "mode": "markers",
                "hovertemplate": "%{customdata}: %{x:.2%}<extra></extra>",
            }
        )
        data.append(_mean(row, label, style[row.method]))
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


# -- claims and audits ----------------------------------------------------------------------------------------------


def claims_of(material: Material) -> list[Claim]:
    """Return every claim on trial: what papers claim against what holds, and what audits found."""
    found: list[Claim] = []
    for row in material.rows:
        runs = material.runs_of(row)
        if row.claimed_epsilon is not None:
            found.append(_claim(line_label(row), row.claimed_epsilon, row.epsilon, None, verdict(row, runs).kind))
    for run in material.runs:
        found += _audited(run)
    return found


def _audited(run: Run) -> list[Claim]:
    """What the audit of a run found."""
    audit, found = run.audit or {}, []
    ledger = audit.get("ledger")
    if isinstance(ledger, dict):
        kind = "refuted" if ledger.get("refuted") else "sound"
        printed, costs = _number(ledger.get("printed_epsilon")), _number(ledger.get("ledger_epsilon"))
        found.append(_claim(f"{run.name}: printed, against its ledger", printed, costs, None, kind))
    for each in [*_list(audit.get("audits")), *_list(audit.get("one_run"))]:
        claimed = _number(each.get("claimed_epsilon"))
        audited, true = _number(each.get("audited_epsilon")), _number(each.get("true_epsilon"))
        sigma = _number(each.get("noise_multiplier"))
        name = f"{run.name}: {each.get('mechanism', 'audit')}" + ("" if sigma is None else f", σ = {sigma:.3g}")
        found.append(_claim(name, claimed, true, audited, "refuted" if each.get("refuted") else "sound"))
    return found


def _claim(what: str, claimed: float | None, true: float | None, audited: float | None, kind: str) -> Claim:
    return {"what": what, "claimed": claimed, "true": true, "audited": audited, "verdict": kind}


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def claims(material: Material) -> Drawing | None:
    """Claimed against true against audited ε."""
    found = [
        each for each in claims_of(material) if any(_finite(each[name]) for name in ("claimed", "true", "audited"))
    ]
    if not found or len(found) > _MOST_LINES:
        return None
    labels = [safe(each["what"]) for each in found]
    colours = [VERDICT_COLOURS[each["verdict"]] for each in found]
    data = []
    for name, title, symbol in (
        ("audited", "audited: at least", "triangle-right"),
        ("claimed", "claimed", "circle-open"),
        ("true", "true: at most", "diamond"),
    ):
        values = [_finite(each[name]) for each in found]
        if any(value is not None for value in values):
            data.append(
                {
                    "type": "scatter",
                    "name": title,
                    "legendgroup": title,
                    "x": [value or None for value in values],
                    "y": labels,
                    "mode": "markers",
                    "marker": {"symbol": symbol, "size": 11, "color": colours, "line": {"width": 2, "color": colours}},
                    "hovertemplate": f"%{{y}}<br>{title} ε = %{{x:.4~g}}<extra></extra>",
                }
            )
    drawn = layout("ε (logarithmic)", "")
    ticks = [step * 10.0**power for power in range(-4, 13) for step in (1, 3)]
    drawn["xaxis"] |= {"type": "log", "tickformat": ".3~g", "tickvals": ticks}
    drawn["annotations"] = [_beyond(label, each) for label, each in zip(labels, found, strict=True) if _boundless(each)]
    drawn["margin"] |= {"r": 100 if drawn["annotations"] else 16}
    drawn["yaxis"] |= {"autorange": "reversed", "type": "category", "title": {"text": ""}}
    lines = [
        [each["what"], *(shown_epsilon(each[name]) for name in ("claimed", "true", "audited")), each["verdict"]]
        for each in found
    ]
    return Drawing(
        "claims",
        "Claimed, true and audited ε",
        "A line for each claim on trial: the claimed ε as a circle, the true one as a diamond, and the lower bound "
        "that an attack proved as a triangle, on a logarithmic axis. A triangle right of its circle refutes the claim.",
        {"data": data, "layout": drawn},
        ("what", "claimed ε", "true ε", "audited: ε at least", "verdict"),
        lines,
        height=110 + 34 * len(found),
        controls=("keys",),
    )
