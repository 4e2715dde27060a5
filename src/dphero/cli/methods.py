"""``dphero methods``: the ways to train, what each protects, and what is known against it."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from dphero.cli._console import console, table
from dphero.cli._options import JsonOption

if TYPE_CHECKING:
    from dphero.methods import Method


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("methods")(methods)


def methods(
    name: Annotated[str | None, typer.Argument(help="Show this one, with its options.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every method in full: protection, price, paper and known flaws.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the ways to train and what each protects; or one of them in full."""
    from dphero.methods import METHODS, make

    if name is not None:
        make(name)  # an unknown one ends here
        if as_json:
            typer.echo(json.dumps(_record(METHODS[name]), ensure_ascii=False))
        else:
            _show(METHODS[name], with_options=True)
        return
    chosen = [METHODS[each] for each in sorted(METHODS)]
    if as_json:
        typer.echo(json.dumps([_record(each) for each in chosen], ensure_ascii=False))
        return
    if everything:
        for each in chosen:
            _show(each, with_options=False)
    else:
        shown = table("method", "what it is", "protects")
        for each in chosen:
            unsound = "" if each.card.sound else " UNSOUND AS PUBLISHED"
            shown.add_row(each.card.name, each.card.title, f"{each.card.protects}{unsound}")
        console().print(shown)
    console().print(
        "One in full: dphero methods NAME. All: dphero methods --all. To use it: dphero train --method NAME."
    )


def _record(method: type[Method]) -> dict[str, Any]:
    """Everything about a method, in plain values."""
    defaults = {data: dict(settings) for data, settings in method.defaults.items()}
    return {**asdict(method.card), "options": _options(method), "defaults": defaults}


def _options(method: type[Method]) -> list[dict[str, Any]]:
    """The method's own settings, with what its docstring says of them."""
    _, _, text = (inspect.getdoc(method) or "").partition("Attributes:\n")
    described = {
        match[1]: " ".join(match[2].replace("``", "").split())
        for match in re.finditer(r"^    (\w+): (.*(?:\n {8,}.*)*)", text, re.MULTILINE)
    }
    return [
        {
            "name": option.name,
            "default": None if option.default is MISSING else option.default,
            "description": described.get(option.name, ""),
        }
        for option in fields(method)  # type: ignore[arg-type]
    ]


def _show(method: type[Method], *, with_options: bool) -> None:
    """Print a card for people."""
    card = method.card
    rows = {
        "protects": f"{card.protects} (neighbours: {card.relation})",
        "sampling": card.sampling,
        "price": card.priced,
        "paper": card.paper,
        "extra data": card.extra_data,
    }
    grid = Table.grid(padding=(0, 2))
    for label, value in rows.items():
        if value:
            grid.add_row(label, escape(value))
    for flaw in card.flaws:
        grid.add_row("flaw", escape(flaw), style=None if card.sound else "yellow")
    if with_options:
        for option in _options(method):
            default = escape(f"{option['default']}: {option['description']}")
            grid.add_row("option", f"[bold]{option['name']}[/bold] = {default}")
    screen = Console(highlight=False)
    screen.print(f"[bold]{card.name}[/bold]  {escape(card.title)}")
    screen.print(Padding(grid, (0, 0, 1, 2)))
