"""The versions that dphero asks for, and those that it is tested with."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def pinned(name: str) -> dict[str, Version]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return {package: Version(version) for package, _, version in (line.partition("==") for line in lines if line)}


def test_the_lowest_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [Requirement(each) for each in (*project["dependencies"], *extras["demo"], *extras["experiments"])]
    lowest = {each.name: Version(s.version) for each in asked for s in each.specifier if s.operator == ">="}
    tested = pinned("constraints.txt")
    assert pinned("constraints-lowest.txt") == {**lowest, "torch": tested["torch"]}
    assert all(tested[each.name] in each.specifier for each in asked)
