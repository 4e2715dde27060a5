"""What ``train`` and ``federate`` have in common: the recipe, the folder, the outcome."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dphero.cli._console import console, print_text, say
from dphero.cli._options import size_of, values_of
from dphero.cli._progress import ProgressDisplay

if TYPE_CHECKING:
    from dphero.experiments import RunDirectory

_RUNS = Path("runs")


def given_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe that the user gave, as a recipe takes them."""
    read = {
        **settings,
        "dataset_size": size_of(settings["dataset_size"]),
        "secure": settings["secure"] or None,
        "options": values_of(settings["options"]),
    }
    return {name: value for name, value in read.items() if value not in (None, {})}


def require_data(data: str | None, *instead: Path | None) -> None:
    """Ask for data where none is named; said before torch is imported, which takes seconds."""
    if data is None and all(path is None for path in instead):
        raise ValueError("which data? Give --data NAME (see: dphero data list), a folder, an .npz or package:function")


def new_folder(recipe: Any, prefix: str = "") -> Path:
    """Return a name under runs/ that tells what and when, and is free."""
    stem = f"{prefix}{Path(recipe.data.replace(':', '-')).stem}-{recipe.method}-{datetime.now():%Y%m%d-%H%M%S}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(path for path in (_RUNS / name for name in names) if not path.exists())


@contextmanager
def leaving_nothing_halfway(
    directory: RunDirectory, command: str, display: ProgressDisplay, *, new: bool
) -> Iterator[None]:
    """Say how to go on with a run that was stopped; remove the folder of one that could not begin.

    What clients of a federation kept, their ledgers above all, stays.

    Args:
        directory: Of the run.
        command: That goes on with it.
        display: It ends before anything is said.
        new: Whether the folder was made for this run.
    """
    from dphero.experiments import Interrupted
    from dphero.methods.recipe import code_named

    again = f"dphero {command} --resume {directory.path}{' --trust' * bool(code_named(directory.recipe.as_dict()))}"
    try:
        yield
    except (ValueError, OSError, ImportError):
        if new and not directory.checkpoint.exists() and not (directory.path / "clients").exists():
            shutil.rmtree(directory.path, ignore_errors=True)
            if directory.path.parent == _RUNS and not any(_RUNS.iterdir()):
                _RUNS.rmdir()
        raise
    except Interrupted as error:
        display.stop()
        say(f"dphero: {error}; go on with: {again}")
        raise typer.Exit(130) from error
    except KeyboardInterrupt as error:
        display.stop()
        say(f"dphero: stopped at once; nothing was saved after the last checkpoint; go on from that with: {again}")
        raise typer.Exit(130) from error


def show_outcome(accuracy: float, rows: Mapping[str, str], *statements: str) -> Console:
    """Print the outcome for people; return the console for what is to be said besides."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")  # a path must not be cut short
    for name, value in rows.items():
        table.add_row(name, value)
    screen, title = console(), Text(f"Test accuracy {accuracy:.2%}", style="bold")
    screen.print(Panel(table, title=title, title_align="left", expand=False))
    for statement in statements:
        print_text(screen, statement)
    return screen


def print_json(result: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Print chosen figures of an outcome on one line."""
    from dphero.experiments.runs.files import to_json

    typer.echo(to_json({name: result[name] for name in keys}))
