"""Claims on trial: what papers and runs print, against what holds, against what audits found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dphero.experiments.pictures import VERDICT_COLOURS
from dphero.report.figures.drawing import Drawing, layout, line_label, safe
from dphero.report.reading.gather import Material
from dphero.report.reading.runs import Run
from dphero.report.words import epsilon as shown_epsilon
from dphero.report.words import verdict

_MOST_LINES = 30
_KINDS = ("claimed", "true", "audited")

_WORDS = {
    "sound": "not refuted", "unproven": "not a proven bound", "unsound": "unsound as published", "refuted": "refuted",
    "open": "open",
}  # fmt: skip

Claim = Mapping[str, Any]
"""A claim on trial: ``what``, ``claimed``, ``true``, ``audited`` (``None`` where not known), ``verdict``."""


def claims_of(material: Material) -> list[Claim]:
    """Return every claim on trial: what papers claim against what holds, and what audits found."""
    found: list[Claim] = []
    for row in material.rows:
        runs = material.runs_of(row)
        if row.claimed_epsilon is not None:
            kind = verdict(row, runs).kind
            if kind == "sound" and row.epsilon is not None and row.claimed_epsilon < row.epsilon:
                kind = "unproven"  # what is proven of it is the true ε, not the claim
            found.append(_claim(line_label(row), row.claimed_epsilon, row.epsilon, None, kind))
    for run in material.runs:
        found += _audited(run, f"{run.name}: " if len(material.runs) > 1 else "")
    return found


def _audited(run: Run, whose: str) -> list[Claim]:
    """What the audit of a run found; that no attack refuted what is unsound does not make it sound."""
    audit, found = run.audit or {}, []
    otherwise, mark = ("unsound", " (UNSOUND AS PUBLISHED)") if run.unsound else ("sound", "")
    ledger = audit.get("ledger")
    if isinstance(ledger, dict):
        kind = "refuted" if ledger.get("refuted") else otherwise
        printed, costs = _number(ledger.get("printed_epsilon")), _number(ledger.get("ledger_epsilon"))
        found.append(_claim(f"{whose}printed, against its ledger{mark}", printed, costs, None, kind))
    for each in [*_list(audit.get("audits")), *_list(audit.get("one_run"))]:
        claimed = _number(each.get("claimed_epsilon"))
        audited, true = _number(each.get("audited_epsilon")), _number(each.get("true_epsilon"))
        sigma = _number(each.get("noise_multiplier"))
        name = f"{whose}{each.get('mechanism', 'audit')}" + ("" if sigma is None else f", σ = {sigma:.3g}") + mark
        found.append(_claim(name, claimed, true, audited, "refuted" if each.get("refuted") else otherwise))
    return found


def _claim(what: str, claimed: float | None, true: float | None, audited: float | None, kind: str) -> Claim:
    return {"what": what, "claimed": claimed, "true": true, "audited": audited, "verdict": kind}


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def claims(material: Material) -> Drawing | None:
    """Claimed against true against audited ε."""
    found = [each for each in claims_of(material) if any(_finite(each[name]) for name in _KINDS)]
    if not found or len(found) > _MOST_LINES:
        return None
    labels = [safe(each["what"]) for each in found]
    colours = [VERDICT_COLOURS[each["verdict"]] for each in found]
    data = []
    for name, title, symbol in (
        ("audited", "audited: at least", "triangle-right"),
        ("claimed", "claimed", "circle-open"),
        ("true", "true", "diamond"),
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
                    "cliponaxis": False,
                    "marker": {"symbol": symbol, "size": 11, "color": colours, "line": {"width": 2, "color": colours}},
                    "hovertemplate": f"%{{y}}<br>{title} ε = %{{x:.4~g}}<extra></extra>",
                }
            )
    drawn = layout("ε (logarithmic)", "")
    drawn["xaxis"] |= {"type": "log"} | _ticks([each[name] for each in found for name in _KINDS])
    drawn["annotations"] = [_beyond(label, each) for label, each in zip(labels, found, strict=True) if _boundless(each)]
    drawn["margin"] |= {"r": 100 if drawn["annotations"] else 16}
    drawn["yaxis"] |= {"autorange": "reversed", "type": "category", "title": {"text": ""}}
    lines = [[each["what"], *(shown_epsilon(each[name]) for name in _KINDS), _WORDS[each["verdict"]]] for each in found]
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


def _ticks(values: Sequence[float | None]) -> dict[str, Any]:
    """Return the reach of the axis of ε and its ticks: few of them, in the words of people."""
    found = [math.log10(value) for each in values if (value := _finite(each)) is not None and value > 0]
    low, high = min(found), max(found)
    every = max(1, math.ceil((high - low) / 4))
    powers = range(every * math.floor(low / every), math.ceil(high) + 1, every)
    places = [step * 10.0**power for power in powers for step in ((1, 3) if high - low <= 3 else (1,))]
    room = 0.05 * max(1.0, high - low)
    names = [f"{place / 1e6:,g} million" if place >= 1e6 else f"{place:,g}" for place in places]
    return {"tickvals": places, "ticktext": names, "range": [low - room, high + room]}


def _boundless(claim: Claim) -> bool:
    return claim["true"] is not None and math.isinf(claim["true"])


def _beyond(label: str, claim: Claim) -> dict[str, Any]:
    """What no axis is long enough for."""
    place = {"x": 1, "xref": "paper", "xanchor": "left", "y": label, "showarrow": False}
    return {**place, "text": " true ε = ∞ →", "font": {"color": VERDICT_COLOURS[claim["verdict"]]}}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
