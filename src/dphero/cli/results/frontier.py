"""``dphero frontier``: the best honest figures beside the best published ones."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dphero.cli._console import console, table
from dphero.cli._options import JsonOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("frontier")(frontier)


def frontier(
    plot: Annotated[Path | None, typer.Option(help="Draw it to this file: .png or .svg.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the best test accuracies measured here with an epsilon that holds, and the best that were published."""
    from dphero.experiments.frontier import figures

    if plot is not None:
        from dphero.experiments.frontier.picture import draw

        draw(plot)
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in figures()], ensure_ascii=False))
        return
    shown = table("data", "epsilon", "measured here", "published", "by")
    for each in figures():
        ours = "not measured" if each.ours is None else f"{each.ours.accuracy:.2f} ± {each.ours.spread:.2f}"
        seeds = "" if each.ours is None else f" ({each.ours.seeds})"
        prior = " + synthetic prior" if each.prior else ""
        shown.add_row(f"{each.data}{prior}", f"{each.epsilon:g}", f"{ours}{seeds}", f"{each.published:g}", each.by)
    screen = console()
    screen.print(shown)
    screen.print(
        "Test accuracy in %, mean ± sample standard deviation (seeds), at delta = 1e-5. Published figures mostly come "
        "from shuffled batches at the price of Poisson lots. Recipes: dphero train --list-recipes."
    )
