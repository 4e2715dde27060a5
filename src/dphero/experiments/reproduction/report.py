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

__all__ = ["PRICED", "Report", "markdown", "prices", "remark", "save", "shown"]


PRICED = (
    "'true ε' of sound methods is a proven upper bound. That of the published recipe is what a Rényi filter of fixed "
    "order charges for the noise of its weakest direction: no proven bound, and at such sizes larger than need be. "
    "What its first step alone costs at least, exactly, is in noise-spectra."
)
"""A note for every table with prices."""


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


def save(report: Report, about: Mapping[str, Any], directory: Path, name: str) -> None:
    """Write ``NAME.json`` (all of it), ``NAME.csv`` (the data behind the picture) and ``NAME.md`` (for people)."""
    values = {**about, "notes": list(report.notes), "rows": [dict(row) for row in report.rows]}
    write_text(directory / f"{name}.json", to_json(values, indent=1) + "\n")
    write_text(directory / f"{name}.csv", to_csv(report.points))
    notes = "\n".join(f"- {note}" for note in report.notes)
    write_text(directory / f"{name}.md", f"# {about['title']}\n\n{markdown(report.rows)}\n{notes}\n")
