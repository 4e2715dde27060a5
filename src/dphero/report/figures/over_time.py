"""Drawings of what changes over time, and of what an attacker could gain: plain values that plotly draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dphero.experiments.comparison.table import Row
from dphero.experiments.pictures import GREY
from dphero.experiments.plots import mean_curve
from dphero.report.figures.drawing import (
    TOGETHER,
    Drawing,
    Style,
    kind,
    layout,
    line_label,
    safe,
    styles,
    thinned,
    wider_below,
)
from dphero.report.gain import RATES, Gain, worst_gain
from dphero.report.reading.gather import Material
from dphero.report.words import accuracy as shown_accuracy
from dphero.report.words import epsilon as shown_epsilon
from dphero.report.words import percent

_MOST_BANDS = 6
_LARGE = 50.0  # an ε above this would hide all others on an even axis
_CURVE_POINTS = 80
_APART = 0.2  # powers of ten between two names

_Curve = Sequence[tuple[float, float, float]]  # epoch, mean and spread over the seeds


def gain(material: Material) -> Drawing | None:
    """The best true-positive rate of any attack at each false-positive rate."""
    found = [(row, worst_gain(material.runs_of(row))) for row in material.rows]
    known = [(row, each) for row, each in found if each.curve is not None]
    if not known:
        return None
    style, data, shown = styles(material.rows), [], set[str]()
    for row, each in known:
        curve = each.curve
        assert curve is not None
        places = [k for k, rate in enumerate(curve.false_positive_rates) if rate >= 1e-4]
        places = places[:: max(1, len(places) // _CURVE_POINTS)] + places[-1:]
        data.append(
            style[kind(row)].trace(shown)
            | {
                "x": [round(float(curve.false_positive_rates[k]), 7) for k in places],
                "y": [round(float(curve.true_positive_rates[k]), 7) for k in places],
                "mode": "lines",
                "hovertemplate": f"{safe(line_label(row))}<br>false positives %{{x:.2%}}<br>"
                "true positives at most %{y:.2%}<extra></extra>",
            }
        )
    widened = wider_below(data)
    labels = "Of methods that protect labels only, the curve is about exchanged labels: they do not hide who was there."
    notes = ["" if widened == data else TOGETHER, labels if any(each.labels_only for _, each in known) else ""]
    guess: dict[str, Any] = {"x": [1e-4, 1], "y": [1e-4, 1], "mode": "lines", "name": "guessing"}
    guess |= {"legendgroup": "guessing", "line": {"color": "#888888", "width": 1, "dash": "dot"}, "hoverinfo": "skip"}
    rates = {"type": "log", "tickformat": "~%", "dtick": 1}
    drawn = layout("share of outsiders accused (false positives)", "share of members found (true positives)")
    drawn["xaxis"] |= rates | {"range": [-4, 0]}
    drawn["yaxis"] |= rates | {"range": [-4, 0.05]}
    drawn["shapes"] = [_at(rate) for rate in RATES]
    drawn["annotations"] = _names(known)
    lines = [
        [line_label(row), shown_epsilon(row.epsilon), *(percent(each.rates[rate]) for rate in RATES)]
        for row, each in known
    ]
    return Drawing(
        "gain",
        "The best attack that the guarantee allows",
        "Curves of the largest share of members that any attacker can find, against the share of outsiders accused "
        "wrongly, both on logarithmic axes. The dotted diagonal is guessing; vertical lines mark 0.1 % and 1 %.",
        {"data": [*widened, guess], "layout": drawn},
        ("setting", "ε", "found at 0.1 % false positives", "found at 1 % false positives"),
        lines,
        note=" ".join(filter(None, notes)),
    )


def _names(known: Sequence[tuple[Row, Gain]]) -> list[dict[str, Any]]:
    """Return the ε of each curve, above the first rate; of those that lie close together, one."""
    found: dict[float, str] = {}
    for row, each in known:
        if each.curve is not None and row.epsilon is not None and math.isfinite(row.epsilon):
            height = math.log10(max(each.rates[RATES[0]], 1e-4))
            if height < -0.1 and all(abs(height - other) > _APART for other in found):
                asked = row.epsilon if row.asked_epsilon is None or not row.sound else row.asked_epsilon
                found[height] = f"ε = {asked:.4g}"
    font = {"color": GREY, "size": 11}
    place = {"x": math.log10(RATES[0]), "xanchor": "right", "yanchor": "bottom", "showarrow": False, "font": font}
    return [place | {"y": height, "text": text} for height, text in found.items()]


def _at(rate: float) -> dict[str, Any]:
    place = {"x0": rate, "x1": rate, "y0": 0, "y1": 1, "yref": "paper"}
    return {"type": "line", **place, "line": {"color": "#888888", "width": 1, "dash": "dash"}, "opacity": 0.6}


def budget(material: Material) -> Drawing | None:
    """The privacy loss spent, over the training."""
    style, data, shown, lines, largest = styles(material.rows), [], set[str](), [], 0.0
    unbounded: list[str] = []
    for row in material.rows:
        if row.protects == "nothing":
            continue
        curve = _spent(material, row)
        if not curve:
            if any(run.metrics for run in material.runs_of(row)):
                unbounded.append(line_label(row))
            continue
        largest = max(largest, *(spent for _, spent, _ in curve))
        data.append(style[kind(row)].trace(shown) | _points(row, curve, "ε = %{y:.4~g}"))
        middle = curve[len(curve) // 2]
        asked = "" if row.asked_epsilon is None else f"{row.asked_epsilon:g}"
        lines.append([line_label(row), shown_epsilon(middle[1]), shown_epsilon(curve[-1][1]), asked])
    if not data:
        return None
    drawn = layout(_time(material), "ε spent")
    drawn["xaxis"] |= _rounds(material)
    drawn["yaxis"] |= {"type": "log"} if largest > _LARGE else {"rangemode": "tozero"}
    widened = wider_below(data)
    boundless = f"Not drawn, because nothing bounds what they spend: {', '.join(unbounded)}." if unbounded else ""
    return Drawing(
        "budget",
        "Budget spent over time",
        "Lines of the privacy loss ε after each evaluation, one for each setting: the largest among its runs.",
        {"data": widened, "layout": drawn},
        ("setting", "ε half-way", "ε at the end", "ε asked for"),
        lines,
        note=" ".join(filter(None, ("" if widened == data else TOGETHER, boundless))),
    )


def accuracy(material: Material) -> Drawing | None:
    """Test accuracy over the training, with the spread over seeds."""
    style, data, shown, lines = styles(material.rows), [], set[str](), []
    for row in material.rows:
        curve = _curve(material, row, "accuracy")
        if not curve:
            continue
        drawn_curve = thinned(curve)
        if row.seeds > 1 and len(material.rows) <= _MOST_BANDS:
            data.append(_band(drawn_curve, style[kind(row)], row))
        points = _points(row, drawn_curve, "%{y:.2%} ± %{customdata:.2%}")
        data.append(style[kind(row)].trace(shown) | points | {"customdata": [spread for _, _, spread in drawn_curve]})
        best = max(mean for _, mean, _ in curve)
        lines.append(
            [
                line_label(row),
                shown_accuracy(curve[-1][1], curve[-1][2] if row.seeds > 1 else None),
                shown_accuracy(best),
            ]
        )
    if not data:
        return None
    drawn = layout(_time(material), "test accuracy")
    drawn["xaxis"] |= _rounds(material)
    drawn["yaxis"] |= {"tickformat": "~%"}
    return Drawing(
        "accuracy",
        "Accuracy over time",
        "Lines of test accuracy after each evaluation, means over the seeds, with bands of one standard deviation.",
        {"data": data, "layout": drawn},
        ("setting", "accuracy at the end", "best of the mean"),
        lines,
    )


def _band(curve: _Curve, style: Style, row: Row) -> dict[str, Any]:
    forth, back = list(curve), list(reversed(curve))
    return {
        "x": [x for x, _, _ in forth + back],
        "y": [mean + spread for _, mean, spread in forth] + [mean - spread for _, mean, spread in back],
        "fill": "toself",
        "fillcolor": style.colour,
        "opacity": 0.15,
        "mode": "none",
        "line": {"width": 0},
        "legendgroup": safe(style.group),
        "name": safe(line_label(row)),
        "showlegend": False,
        "hoverinfo": "skip",
    }


def diagnostics(material: Material) -> Drawing | None:
    """Training losses and shares of clipped examples: computed from the private data without noise."""
    style, data, shown, lines = styles(material.rows), [], set[str](), []
    for row in material.rows:
        loss, clipped = _curve(material, row, "loss"), _curve(material, row, "clipped")
        if loss:
            data.append(style[kind(row)].trace(shown) | _points(row, loss, "loss %{y:.4~g}"))
        if clipped:
            data.append(style[kind(row)].trace(shown) | _points(row, clipped, "clipped %{y:.1%}") | {"yaxis": "y2"})
        if loss or clipped:
            ends = (f"{loss[-1][1]:.4g}" if loss else "–", f"{100 * clipped[-1][1]:.1f} %" if clipped else "–")
            lines.append([line_label(row), *ends])
    if not data:
        return None
    drawn = layout(_time(material), "training loss")
    drawn["yaxis"] |= {"domain": [0.55, 1.0]}
    drawn["yaxis2"] = dict(drawn["yaxis"]) | {"domain": [0.0, 0.42], "title": {"text": "share clipped"}}
    drawn["yaxis2"] |= {"range": [-0.03, 1.03], "tickformat": "~%"}
    drawn["xaxis"] |= {"anchor": "y2"}
    return Drawing(
        "diagnostics",
        "Training loss and share of clipped examples",
        "Two panels of lines over the training: mean training loss above, share of clipped examples below.",
        {"data": data, "layout": drawn},
        ("setting", "training loss at the end", "clipped at the end"),
        lines,
        height=480,
    )


def _curve(material: Material, row: Row, name: str) -> _Curve:
    """Return a metric over the training, a mean over the runs of a row."""
    return mean_curve([run.metrics for run in material.runs_of(row)], name)


def _spent(material: Material, row: Row) -> _Curve:
    """Return the ε spent over the training: the largest among the runs of a row, as in every table."""
    curves = [mean_curve([run.metrics], "epsilon") for run in material.runs_of(row) if run.metrics]
    spent = [{epoch: value for epoch, value, _ in curve} for curve in curves]
    common = [epoch for epoch in spent[0] if all(epoch in each for each in spent)] if spent else []
    return [(epoch, max(each[epoch] for each in spent), 0.0) for epoch in common]


def _points(row: Row, curve: _Curve, shown: str) -> dict[str, Any]:
    """Return the points of a line, and what is shown of each by hovering."""
    curve = thinned(curve)
    return {
        "x": [x for x, _, _ in curve],
        "y": [mean for _, mean, _ in curve],
        "mode": "lines+markers" if len(curve) < 30 else "lines",
        "hovertemplate": f"{safe(line_label(row))}<br>%{{x:.4~g}}: {shown}<extra></extra>",
    }


def _rounds(material: Material) -> dict[str, Any]:
    """Whole numbers on the axis where all runs count in rounds."""
    most = max((len(run.metrics) for run in material.runs), default=0)
    return {"dtick": max(1, math.ceil(most / 12))} if _time(material) == "round" else {}


def _time(material: Material) -> str:
    federated = {run.federation is not None for run in material.runs}
    if federated == {True}:
        return "round"
    return "epoch (round of a federated run)" if True in federated else "epoch (passes over the data)"
