"""What a reproduced item leaves behind: pictures, the data behind them, a table, and everything as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dphero.accounting import Ledger, claimed_by_paper, price
from dphero.experiments.comparison.sweep import Outcome
from dphero.experiments.comparison.table import shown_price, to_csv
from dphero.experiments.reproduction.settings import DELTAS, PUBLISHED, UNSOUND
from dphero.experiments.runs.files import to_json, write_text
from dphero.experiments.runs.rundir import RunDirectory
from dphero.methods import METHODS

PRICED = (
    "'true ε' of sound methods is a proven upper bound. That of the published recipe is what a Rényi filter of fixed "
    "order charges for the noise of its weakest direction: no proven bound, and at such sizes larger than need be. "
    "What its first step alone costs at least, exactly, is in noise-spectra."
)
"""A note for every table with prices."""

_PUBLISHED_TRUE = f"published recipe, {UNSOUND}: true ε"
_SCREEN: Mapping[str, str] = {  # the columns that a terminal shows, and what they are called there
    "data": "data",
    "system": "system",
    "ε printed": "ε printed",
    "printed, system (%)": "system, printed (%)",
    "ours, system (%)": "system, ours (%)",
    "printed, DP-Hero (%)": "DP-Hero, printed (%)",
    "ours, sound DP-Hero (%)": "DP-Hero, sound, ours (%)",
    _PUBLISHED_TRUE: f"true ε as printed: {UNSOUND}",
    "ε asked": "ε asked",
    "σ": "σ",
    "L": "L",
    "η": "η",
    "method": "method",
    "noise": "noise",
    "scope": "scope",
    "exponent": "exponent",
    "accuracy": "accuracy (%)",
    "accuracy (%)": "accuracy (%)",
    "standard deviation": "± (%)",
    f"claimed ε, δ {DELTAS[0]:.0e}": "claimed ε",
    "claimed ε": "claimed ε",
    f"true ε, δ {DELTAS[0]:.0e}": "true ε",
    "true ε": "true ε",
    "model": "model",
    "state": "state",
    "layer": "layer",
    "rule": "rule",
    "weakest": "weakest direction",
    "weakest, first": "weakest σ, first",
    "weakest, last": "weakest σ, last",
}
_NAMED = ("method", "noise")  # what a remark is about
_IN_NOTES = ("data", "L", "η")  # not worth a column where all rows have the same


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        rows: The table: one mapping of names to values a line.
        points: The data behind the picture.
        notes: What a reader must know.
    """

    rows: Sequence[Mapping[str, Any]]
    points: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = field(default_factory=tuple)


def remark(method: str) -> str:
    """Return what must stand beside every number of a method, or nothing."""
    return "" if METHODS[method].card.sound else UNSOUND


def prices(outcome: Outcome, memory: dict[Any, float]) -> dict[str, float]:
    """Return the true ε of a finished run at the paper's two δ and, for the published recipe, what the paper claims.

    Args:
        outcome: The run.
        memory: Prices found before; runs that differ in the shape of sound noise alone cost the same.
    """
    recipe, found = outcome.planned.recipe, {}
    text = RunDirectory(outcome.path, recipe).read("ledger.json")
    ledger = Ledger.from_json(text)
    for delta in DELTAS:
        key = (text, delta)
        if key not in memory:
            adaptive = any(event.adaptive for event in ledger.counts)
            memory[key] = price(ledger, delta, "filter" if adaptive else recipe.accountant).epsilon
        found[f"true ε, δ {delta:.0e}"] = memory[key]
        if recipe.method == PUBLISHED and recipe.noise_multiplier is not None:
            found[f"claimed ε, δ {delta:.0e}"] = claimed_by_paper([recipe.noise_multiplier], delta).epsilon
    return found


def shown(name: str, value: Any) -> str:
    """Return a value as text: prices rounded up, shares in percent."""
    if value is None or value == "":
        return ""
    if "ε" in name and isinstance(value, float):
        return "> 1e6" if 1e6 < value < math.inf else shown_price(value)
    if isinstance(value, float):
        return "∞" if math.isinf(value) else f"{value:.4g}"
    return str(value)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table; columns without any value are left out."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    lines = [names, ["---"] * len(names)]
    lines += [[shown(name, row.get(name)) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def brief(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return, as text, the few columns that fit a terminal of 80 characters; of many layers, the weakest of each state.

    What is unsound stays marked: the mark stands with the name.
    """
    found = []
    for row in _weakest(rows):
        if "ε asked" in row:  # says the same as σ, in the reader's terms
            row = {name: value for name, value in row.items() if name != "σ"}
        line = {heading: _with_spread(name, row) for name, heading in _SCREEN.items() if name in row}
        if UNSOUND in row.get("remark", ""):
            name = next(name for name in _NAMED if name in line)
            line[name] = f"{line[name]}:\n{UNSOUND}"
        found.append(line)
    names = dict.fromkeys(name for name in _SCREEN.values() if any(name in line for line in found))
    values = {name: {line.get(name, "") for line in found} for name in names}
    kept = [name for name in names if values[name] != {""} and not (name in _IN_NOTES and len(values[name]) == 1)]
    return [{name: line.get(name, "") for name in kept} for line in found]


def _with_spread(name: str, row: Mapping[str, Any]) -> str:
    """Return a mean of several seeds with their standard deviation, where that has no column of its own."""
    spread = row.get(name.replace(" (%)", ": ±")) if "(%)" in name else None
    return shown(name, row[name]) if spread is None else f"{row[name]:.2f} ± {spread:.2f}"


def _weakest(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return, of rows about layers, the one with the weakest direction of each network, state and rule."""
    if not rows or "state" not in rows[0]:
        return rows
    found: dict[Any, Mapping[str, Any]] = {}
    for row in rows:
        key = (row["model"], row["state"], row["rule"])
        if key not in found or row["weakest"] < found[key]["weakest"]:
            found[key] = row
    return list(found.values())


def save(report: Report, about: Mapping[str, Any], directory: Path, name: str) -> None:
    """Write ``NAME.json`` (all of it), ``NAME.csv`` (the data behind the picture) and ``NAME.md`` (for people)."""
    values = {**about, "notes": list(report.notes), "rows": [dict(row) for row in report.rows]}
    write_text(directory / f"{name}.json", to_json(values, indent=1) + "\n")
    write_text(directory / f"{name}.csv", to_csv(report.points))
    notes = "\n".join(f"- {note}" for note in report.notes)
    write_text(directory / f"{name}.md", f"# {about['title']}\n\n{markdown(report.rows)}\n{notes}\n")
