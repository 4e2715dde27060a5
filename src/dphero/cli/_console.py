"""Consoles and tables that show names of the user's own as they are, and whole."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_NARROWEST, _USUAL = 10, 80

# control characters (ESC among them), and those that change the direction in which text is read
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Return a text in which a terminal finds nothing to obey: escape codes, in a file's name say, are spelt out."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def say(message: str) -> None:
    """Print a line on stderr."""
    typer.echo(visible(message), err=True)


class _Console(Console):
    """Shows what it is given as text, and never passes on escape codes that are in it."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text as it will be shown, also that in tables."""
        return super().render_str(visible(text), **options)


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: ``[a]`` or ``:cat:`` in a file's name is no markup."""
    found = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if found.width < _NARROWEST:  # COLUMNS=0, or a terminal that does not know: nothing would be seen at all
        found.width = _USUAL
    return found


def print_text(screen: Console, text: str) -> None:
    """Print lines of text; what goes on in the next line of the terminal is indented as the point it belongs to."""
    for line in text.splitlines():
        start = re.match(r" *(?:- )?", line)
        indent = " " * len(start[0] if start else "")
        screen.print("\n".join(textwrap.wrap(line, screen.width, subsequent_indent=indent)), soft_wrap=True)


def table(*headings: str) -> Table:
    """Return a table that, where the terminal is narrow, folds what it holds and cuts nothing short."""
    found = Table()
    for heading in headings:
        found.add_column(heading, overflow="fold")
    return found
