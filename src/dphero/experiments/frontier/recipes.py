"""Named recipes: settings with which a figure of the frontier was reached, one file each."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from dphero._checks import closest
from dphero.methods import recipe as recipes

_FOLDER = files(__package__) / "recipes"

NAMES = tuple(sorted(each.name.removesuffix(".toml") for each in _FOLDER.iterdir() if each.name.endswith(".toml")))
"""What there is."""


def named(name: str) -> dict[str, Any]:
    """Return the settings of a named recipe.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in NAMES:
        hint = closest(name, NAMES, f"there are {', '.join(NAMES)}")
        raise ValueError(f"there is no file {name!r}, and no recipe of that name; {hint}")
    return recipes.parse((_FOLDER / f"{name}.toml").read_bytes(), name)


def described(name: str) -> str:
    """Return a recipe's first line, which says what it does."""
    first, _, _ = (_FOLDER / f"{name}.toml").read_text().partition("\n")
    return first.removeprefix("# ")
