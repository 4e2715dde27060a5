"""The table of a comparison: one row for all seeds of a setting, as CSV, JSON and Markdown."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dphero.accounting.statement import round_up
from dphero.experiments.comparison.sweep import Outcome
from dphero.experiments.runs.files import to_json, write_text
from dphero.methods import METHODS, Card


@dataclass(frozen=True)
class Row:
    """What all seeds of one setting gave.

    Attributes:
        method: The method.
        data: The data set.
        setting: What was varied beyond method, ε and seed.
        asked_epsilon: The ε at which it is compared; ``None`` if none was given.
        epsilon: The true ε, the largest of all seeds; infinite if nothing is guaranteed, ``None`` if no run is
            finished.
        other_prices: Other figures for the same runs (a paper's claim, an approximation) by their names.
        delta: δ.
        noise_multiplier: σ that the recipe gave, or that all releases of all seeds had.
        accuracy: Mean test accuracy of the finished runs.
        spread: Sample standard deviation of their accuracies (divisor n − 1); ``None`` for fewer than two.
        seeds: How many runs are finished: n.
        failed: How many runs failed.
        unfinished: How many runs have neither finished nor failed.
        protects: The protected unit.
        relation: Which data sets are neighbours.
        extra_data: Data beyond the private set that the method used, or empty.
        priced: How ε was computed.
        accountant: Which accountant.
        is_bound: Whether ε is a proven bound.
        sound: Whether the method is.
        remark: What must be read with the number, or empty.
        steps: How many steps a run took (mean).
        seconds: How long a run took (mean).
        runs: Names of the runs.
        errors: Why runs failed, by name.
    """

    method: str
    data: str
    setting: Mapping[str, Any]
    asked_epsilon: float | None
    epsilon: float | None
    other_prices: Mapping[str, float]
    delta: float
    noise_multiplier: float | None
    accuracy: float | None
    spread: float | None
    seeds: int
    failed: int
    unfinished: int
    protects: str
    relation: str
    extra_data: str
    priced: str
    accountant: str | None
    is_bound: bool | None
    sound: bool
    remark: str
    steps: float | None
    seconds: float | None
    runs: tuple[str, ...]
    errors: Mapping[str, str]

    @property
    def claimed_epsilon(self) -> float | None:
        """The ε that the method's paper would print for these runs, where that is wrong."""
        return next((value for name, value in self.other_prices.items() if "claim" in name), None)

    @property
    def label(self) -> str:
        """Method and setting, for tables and legends."""
        varied = ", ".join(f"{_short(name)} {_text(value)}" for name, value in self.setting.items())
        return f"{self.method} ({varied})" if varied else self.method


def tabulate(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return one row for all runs that differ in nothing but their seed, in the plan's order."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        planned = outcome.planned
        key = f"{planned.recipe.with_(seed=None).to_toml()} {planned.target} {planned.setting}"
        groups.setdefault(key, []).append(outcome)
    return [_row(group) for group in groups.values()]


def _row(group: Sequence[Outcome]) -> Row:
    planned = group[0].planned
    card = METHODS[planned.recipe.method].card
    results = [outcome.result for outcome in group if outcome.result is not None]
    accuracies = [result["accuracy"] for result in results]
    epsilons = [_finite_or_not(result["epsilon"]) for result in results]
    others: dict[str, float] = {}
    for result in results:
        for name, value in result["other_prices"].items():
            others[name] = max(others.get(name, 0.0), _finite_or_not(value))
    errors = {outcome.planned.name: outcome.error for outcome in group if outcome.error is not None}
    return Row(
        method=planned.recipe.method,
        data=planned.recipe.data,
        setting=dict(planned.setting),
        asked_epsilon=planned.asked,
        epsilon=max(epsilons, default=None),
        other_prices=others,
        delta=planned.recipe.delta,
        noise_multiplier=planned.recipe.noise_multiplier or _same(result["noise_multiplier"] for result in results),
        accuracy=statistics.fmean(accuracies) if accuracies else None,
        spread=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        seeds=len(results),
        failed=len(errors),
        unfinished=sum(outcome.result is None and outcome.error is None for outcome in group),
        protects=card.protects,
        relation=card.relation,
        extra_data=card.extra_data,
        priced=card.priced,
        accountant=_same(result["accountant"] for result in results),
        is_bound=all(result["is_bound"] for result in results) if results else None,
        sound=card.sound,
        remark=remark(card),
        steps=statistics.fmean(result["steps"] for result in results) if results else None,
        seconds=statistics.fmean(result["seconds"] for result in results) if results else None,
        runs=tuple(outcome.planned.name for outcome in group),
        errors=errors,
    )


def remark(card: Card) -> str:
    """Return what must be read with every number of a method, or nothing."""
    if not card.sound:
        return "UNSOUND AS PUBLISHED"
    if card.protects == "nothing":
        return "not private"
    return "labels only" if "label" in card.protects else ""


# -- for reading -----------------------------------------------------------------------------------------


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return headings and texts; columns that say nothing are left out. Prices are rounded up."""
    several_data = len({row.data for row in rows}) > 1
    varied = list(dict.fromkeys(name for row in rows for name in row.setting))
    columns: dict[str, list[str]] = {"method": [row.method for row in rows]}
    if several_data:
        columns["data"] = [str(row.setting.get("data", row.data)) for row in rows]
    for name in varied:
        if not (name == "data" and several_data):
            columns[_short(name)] = [_text(row.setting.get(name, "")) for row in rows]
    columns |= {
        "ε asked": [_number(row.asked_epsilon) for row in rows],
        "true ε": [shown_price(row.epsilon) for row in rows],
        "claimed ε": [shown_price(row.claimed_epsilon) for row in rows],
        "accuracy (mean ± sd)": [_accuracy(row) for row in rows],
        "seeds": [_seeds(row) for row in rows],
        "": [row.remark for row in rows],
    }
    shown = [name for name, texts in columns.items() if any(texts)]
    return shown, [list(texts) for texts in zip(*(columns[name] for name in shown), strict=True)]


def method_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return headings and texts of the second table: what each method protects, and how it was priced."""
    found = {
        row.method: [row.method, row.protects, row.relation, row.priced, row.extra_data, row.remark] for row in rows
    }
    headings = ["method", "protects", "neighbours", "ε priced by", "further data", ""]
    shown = [place for place in range(len(headings)) if any(line[place] for line in found.values())]
    return [headings[place] for place in shown], [[line[place] for place in shown] for line in found.values()]


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what a reader of the table must know."""
    deltas = sorted({row.delta for row in rows if row.protects != "nothing"})
    found = []
    if deltas:
        found.append(f"ε at δ = {', '.join(f'{delta:g}' for delta in deltas)}, rounded up.")
    found.append("Accuracy is that on test images; ± is the sample standard deviation over the seeds (divisor n − 1).")
    if any(row.claimed_epsilon is not None for row in rows):
        found.append('"claimed ε" is what the method\'s paper would print for the same runs; it is not what holds.')
    for row in rows:
        others = {name: value for name, value in row.other_prices.items() if "claim" not in name}
        if others:
            figures = "; ".join(f"{name} {shown_price(value)}" for name, value in others.items())
            found.append(f"{row.label}, true ε {shown_price(row.epsilon)}, by other accounts: {figures}.")
    if any(row.protects != "nothing" and row.asked_epsilon is not None and not row.sound for row in rows):
        found.append(
            'A method that is unsound as published cannot meet "ε asked": it ran with the noise multiplier that dp-sgd '
            "needs for that."
        )
    if any(row.remark == "labels only" for row in rows):
        found.append('"labels only": its ε protects the label of an example and nothing else of it.')
    unproven = sorted({row.method for row in rows if row.is_bound is False and math.isfinite(row.epsilon or 0)})
    if unproven:
        found.append(f"The true ε of {', '.join(unproven)} is no proven bound: the runs' statements say why.")
    found.append(
        "Each ε is that of one run. On private data the whole comparison costs up to their sum (of δ, too), and "
        "noise from a seed that can be guessed protects nothing: train what you publish by itself, without a seed."
    )
    return found


def markdown(rows: Sequence[Row]) -> str:
    """Return the table as Markdown, with what a reader must know below it."""
    parts = []
    for headings, texts in (cells(rows), method_cells(rows)):
        lines = [headings, ["---"] * len(headings), *texts]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    parts.append("\n".join(f"- {note}" for note in notes(rows)))
    errors = {name: error for row in rows for name, error in row.errors.items()}
    if errors:
        parts.append("\n".join(["Failed:", "", *(f"- {name}: {error}" for name, error in errors.items())]))
    return "\n\n".join(parts) + "\n"


def save_table(rows: Sequence[Row], directory: Path) -> None:
    """Write ``table.csv``, ``table.json`` (an infinite ε is null there, and ``inf`` in CSV) and ``table.md``.

    Accuracies are computed without noise: the files are for their owner's eyes only, as the runs' own.
    """
    text = to_json({"rows": as_dicts(rows), "notes": notes(rows)}, indent=2) + "\n"
    write_text(directory / "table.json", text, private=True)
    write_text(directory / "table.md", markdown(rows), private=True)
    flat = []
    for row in rows:
        values = as_dicts([row])[0] | {"runs": " ".join(row.runs), "errors": _list(row.errors)}
        values |= {"setting": _list(row.setting), "other_prices": _list(row.other_prices)}
        flat.append(values | {f"setting.{name}": value for name, value in row.setting.items()})
    write_text(directory / "table.csv", to_csv(flat), private=True)


def as_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as plain values."""
    return [asdict(row) | {"claimed_epsilon": row.claimed_epsilon} for row in rows]


def to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as CSV with a line of names; what a record lacks stays empty."""
    names = list(dict.fromkeys(name for record in records for name in record))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def _finite_or_not(value: float | None) -> float:
    """A result's ε: in JSON an infinite one is null."""
    return math.inf if value is None else value


def _accuracy(row: Row) -> str:
    if row.accuracy is None:
        return "–"
    return f"{row.accuracy:.2%}" + (f" ± {100 * row.spread:.2f}" if row.spread is not None else "")


def _seeds(row: Row) -> str:
    parts = [str(row.seeds)]
    if row.failed:
        parts.append(f"{row.failed} failed")
    if row.unfinished:
        parts.append(f"{row.unfinished} unfinished")
    return ", ".join(parts)


def shown_price(value: float | None) -> str:
    """Return an ε as text, rounded up; nothing for ``None``."""
    if value is None:
        return ""
    return "∞" if math.isinf(value) else f"{round_up(value, 3):,}" if value < 1e3 else f"{math.ceil(value):,}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _short(name: str) -> str:
    return name.removeprefix("options.")


def _list(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in values.items())


def _same(values: Any) -> Any:
    found = set(values)
    return found.pop() if len(found) == 1 else None
