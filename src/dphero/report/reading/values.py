"""Whether what a file holds can be shown: numbers are numbers, texts are texts. What is not is damage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dphero._files import DamagedFile
from dphero.experiments.comparison.plan import Planned
from dphero.methods import METHODS

_NUMBERS = ("accuracy", "delta", "steps", "seconds")  # of a result: always there
_NOT_ALWAYS = ("epsilon", "noise_multiplier")  # an infinite ε is null in JSON
_OF_ROWS = ("asked_epsilon", "epsilon", "noise_multiplier", "accuracy", "spread", "steps", "seconds")  # or null
_AUDITED = (
    "claimed_epsilon", "audited_epsilon", "true_epsilon", "noise_multiplier", "printed_epsilon", "ledger_epsilon",
)  # fmt: skip
_EXPLAINED = {"runs": ("name", "group"), "maps": ("run",), "agreement": ("a", "b"), "verdicts": ("group", "verdict")}


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; what is neither true nor false is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def check_result(result: Mapping[str, Any], path: Path) -> None:
    """Raise ``DamagedFile`` unless a result has all that tables show, each of its kind."""
    needed = (*_NUMBERS, *_NOT_ALWAYS, "is_bound", "accountant", "other_prices")
    if missing := [name for name in needed if name not in result]:
        raise DamagedFile(path, f"it lacks {', '.join(missing)}")
    _require_numbers(result, _NUMBERS, path, "the result")
    _require_numbers(result, [name for name in _NOT_ALWAYS if result[name] is not None], path, "the result")
    if not 0 <= result["accuracy"] <= 1:
        raise DamagedFile(path, f"its accuracy is {result['accuracy']!r}, and a share lies between 0 and 1")
    others = result["other_prices"]
    if not isinstance(others, Mapping) or not all(value is None or is_number(value) for value in others.values()):
        raise DamagedFile(path, "its other_prices are no table of numbers")
    if not isinstance(result["is_bound"], bool) or not isinstance(result["accountant"], str):
        raise DamagedFile(path, "is_bound is neither true nor false, or accountant is no name")


def check_metrics(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Raise ``DamagedFile`` unless each evaluation has an accuracy; what a diverged training has as ``null`` may be."""
    for number, line in enumerate(lines, 1):
        if not is_number(line.get("accuracy")):
            raise DamagedFile(path, f"evaluation {number} has no accuracy")
        names = [name for name in ("epoch", "epsilon") if line.get(name) is not None]
        _require_numbers(line, names, path, f"evaluation {number}")


def check_environment(environment: Mapping[str, Any], path: Path) -> None:
    """Raise ``DamagedFile`` unless the packages of an environment are names and versions."""
    packages = environment.get("packages", {})
    if not isinstance(packages, Mapping) or not all(isinstance(each, str | None) for each in packages.values()):
        raise DamagedFile(path, "its packages are no table of versions")


def check_federation(federation: Mapping[str, Any], result: Mapping[str, Any] | None, path: Path) -> None:
    """Raise ``DamagedFile`` unless a federation says how many clients it has, and its result what each has spent."""
    if type(federation.get("clients")) is not int or federation["clients"] < 1:
        raise DamagedFile(path, f"its clients are {federation.get('clients')!r}, not their number")
    spent = (result or {}).get("clients", {})
    if not isinstance(spent, Mapping) or not all(value is None or is_number(value) for value in spent.values()):
        raise DamagedFile(path.with_name("result.json"), "its clients are no table of what each has spent")


def check_plan(plan: Sequence[Planned], path: Path) -> None:
    """Raise ``DamagedFile`` unless a plan has runs, by methods that are known here, at an ε that is a number."""
    if not plan:
        raise DamagedFile(path, "it plans no run")
    for planned in plan:
        if planned.recipe.method not in METHODS:
            raise DamagedFile(path, f"method {planned.recipe.method!r} is not known to this dphero")
        if planned.target is not None and not is_number(planned.target):
            raise DamagedFile(path, f"the ε of {planned.name} is {planned.target!r:.60}, no finite number")


def check_table(table: Mapping[str, Any], path: Path) -> None:
    """Raise ``DamagedFile`` unless the rows of a comparison's table are tables, with numbers where numbers belong."""
    rows = table.get("rows", [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise DamagedFile(path, "its rows are no tables")
    for row in rows:
        _require_numbers(row, [name for name in _OF_ROWS if row.get(name) is not None], path, "a row")
        if not all(isinstance(row.get(name, {}), Mapping) for name in ("errors", "setting", "other_prices")):
            raise DamagedFile(path, "errors, setting or other_prices of a row are no tables")
        _require_numbers(row.get("other_prices", {}), row.get("other_prices", {}), path, "a row")


def check_audit(audit: Mapping[str, Any], path: Path) -> None:
    """Raise ``DamagedFile`` unless the findings of an audit are tables with numbers where numbers belong."""
    ledger = audit.get("ledger") or {}
    found = [audit.get(name) or [] for name in ("audits", "one_run")]
    if not isinstance(ledger, Mapping) or not all(isinstance(each, list) for each in found):
        raise DamagedFile(path, "its findings are no lists")
    findings = [ledger, *(each for several in found for each in several)]
    if not all(isinstance(each, Mapping) for each in findings):
        raise DamagedFile(path, "its findings are no tables")
    for each in findings:
        _require_numbers(each, [name for name in _AUDITED if each.get(name) is not None], path, "a finding")


def check_explanation(numbers: Mapping[str, Any], path: Path) -> None:
    """Raise ``DamagedFile`` unless what an explanation lists are tables with names."""
    for name, named in _EXPLAINED.items():
        found = numbers.get(name, [])
        if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
            raise DamagedFile(path, f"{name} is no list of tables")
        if any(not isinstance(each.get(key), str) for each in found for key in named):
            raise DamagedFile(path, f"in {name}, {' or '.join(named)} is no name")


def _require_numbers(values: Mapping[str, Any], names: Iterable[str], path: Path, whose: str) -> None:
    for name in names:
        if not is_number(values[name]):
            raise DamagedFile(path, f"{name} of {whose} is {values[name]!r:.60}, no finite number")
