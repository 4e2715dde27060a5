"""A plan: the runs of a comparison, written down before the first begins."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dphero._files import DamagedFile, open_json, seal_json
from dphero.experiments.runs.files import read_json, to_json, write_text
from dphero.methods import recipe as recipes
from dphero.methods.recipe import Recipe

_VERSION = 2  # of plan.json: sealed


@dataclass(frozen=True)
class Planned:
    """One run of a plan.

    Attributes:
        name: Its directory's name.
        recipe: What it does.
        target: The ε at which it is compared, where the recipe cannot ask for that ε itself.
        setting: What was varied, beyond method, ε and seed.
    """

    name: str
    recipe: Recipe
    target: float | None = None
    setting: Mapping[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> float | None:
        """The ε at which it is compared, if one was given."""
        return self.recipe.epsilon if self.target is None else self.target


def save_plan(directory: Path, plan: Sequence[Planned]) -> None:
    """Write ``plan.json``; where the same plan is there already, leave it.

    Raises:
        ValueError: If another plan is there, or two runs have one name.
        OSError: If it cannot be written.
    """
    names = [planned.name.lower() for planned in plan]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two runs are called {sorted(twice)[0]!r}: names must differ, in more than case")
    path = directory / "plan.json"
    runs = json.loads(to_json([_as_dict(planned) for planned in plan]))
    if os.path.lexists(path):
        before = _read(path)
        if before["runs"] != runs:
            raise ValueError(
                f"{directory} holds another comparison: {_difference(before, plan)}; go on with "
                f"that by --resume {directory}, or give another --out"
            )
        return
    text = to_json(seal_json({"version": _VERSION, "runs": runs}), indent=1) + "\n"
    directory.mkdir(parents=True, exist_ok=True)
    write_text(path, text, private=True)  # it holds the seeds


def load_plan(directory: Path, *, trust: bool = False) -> list[Planned]:
    """Read ``plan.json``.

    Args:
        directory: Of the comparison.
        trust: Whether code that it names may be imported and run.

    Raises:
        ValueError: If there is none, it cannot be understood, or it names code that is not trusted.
    """
    path = directory / "plan.json"
    if not os.path.lexists(path):
        raise ValueError(f"{directory} is not the directory of a comparison: there is no plan.json in it")
    try:
        runs = _read(path)["runs"]
        plan = [Planned(run["name"], recipes.merge(run["recipe"]), run["target"], dict(run["setting"])) for run in runs]
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(path, f"{error!r} (or it is of another version)") from error
    for planned in plan:
        if not isinstance(planned.name, str) or not re.fullmatch(r"\w[\w.+-]*", planned.name):
            raise DamagedFile(path, f"{planned.name!r} is no name of a run's directory")
        recipes.require_trust(planned.recipe.as_dict(), path, trust)
    return plan


def _read(path: Path) -> dict[str, Any]:
    """Return what ``plan.json`` holds, verified; the first version had no digest."""
    found = read_json(path, "version", "runs")
    return open_json(found, path, required=found["version"] != 1)


def _as_dict(planned: Planned) -> dict[str, Any]:
    return {
        "name": planned.name,
        "recipe": planned.recipe.as_dict(),
        "target": planned.target,
        "setting": dict(planned.setting),
    }


def _difference(before: Any, plan: Sequence[Planned]) -> str:
    """Say in a few words how a plan differs from that of a file."""
    was = {run.get("name"): run for run in before.get("runs", [])}
    now = {planned.name: json.loads(to_json(_as_dict(planned))) for planned in plan}
    if only := sorted(set(was) ^ set(now)):
        return f"{only[0]} is {'there and not in this plan' if only[0] in was else 'not there'}"
    for name, run in now.items():
        old, new = was[name]["recipe"], run["recipe"]
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                return f"run {name} has {key} {old.get(key)!r} there, {new.get(key)!r} here"
    return "its runs come in another order"
