"""Consoles and tables that show names of the user's own as they are, and whole."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

__all__ = ["console", "table"]


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: ``[a]`` or ``:cat:`` in a file's name is no markup."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def table(*headings: str) -> Table:
    """Return a table that, where the terminal is narrow, folds what it holds and cuts nothing short."""
    found = Table()
    for heading in headings:
        found.add_column(heading, overflow="fold")
    return found
