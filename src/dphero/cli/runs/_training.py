"""What ``train`` and ``federate`` have in common: the options of a recipe, the display, the folder, the outcome."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dphero.cli._console import console, say
from dphero.cli._paths import folder
from dphero.cli.privacy._dataset_size import size_of
from dphero.cli.privacy._price import Accountant

if TYPE_CHECKING:
    from dphero.experiments import RunDirectory

DataOption = Annotated[
    str | None, typer.Option(help="A data set (dphero data list), package:function, a folder of images, or .npz.")
]
ModelOption = Annotated[str | None, typer.Option(help="A network by name, or package:function.")]
NoiseMultiplierOption = Annotated[float | None, typer.Option(help="The noise; the privacy loss follows.")]
DeltaOption = Annotated[float | None, typer.Option(help="The probability left out of account.")]
ClipOption = Annotated[float | None, typer.Option(help="Clip norm.")]
AccountantOption = Annotated[Accountant | None, typer.Option(help="How to price.")]
SeedOption = Annotated[
    int | None, typer.Option(min=0, help="Make the run repeatable; privacy then rests on keeping the seed secret.")
]
SecureOption = Annotated[bool, typer.Option("--secure", help="Noise and lots from a cryptographic generator.")]
MethodOptions = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An option of the method; may be repeated.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(parser=folder, metavar="FOLDER", help="Where to keep the run; a new folder under runs/ unless given."),
]
ResumeOption = Annotated[
    Path | None, typer.Option(parser=folder, metavar="FOLDER", help="Go on with a run that was stopped.")
]


def given_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe that the user gave, as a recipe takes them."""
    read = {
        **settings,
        "dataset_size": size_of(settings["dataset_size"]),
        "secure": settings["secure"] or None,
        "options": _method_options(settings["options"]),
    }
    return {name: value for name, value in read.items() if value not in (None, {})}


def _method_options(given: list[str] | None) -> dict[str, Any]:
    """Read NAME=VALUE pairs; a value is a number, true, false, a list, or text."""
    found: dict[str, Any] = {}
    for pair in given or []:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"--set takes NAME=VALUE, got {pair!r}")
        words = {"true": True, "false": False}
        try:
            found[name] = words[text] if text in words else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def require_data(data: str | None, *instead: Path | None) -> None:
    """Ask for data where none is named; said before torch is imported, which takes seconds."""
    if data is None and all(path is None for path in instead):
        raise ValueError("which data? Give --data NAME (see: dphero data list), a folder, an .npz or package:function")


def new_folder(recipe: Any, prefix: str = "") -> Path:
    """Return a name under runs/ that tells what and when, and is free."""
    stem = f"{prefix}{Path(recipe.data.replace(':', '-')).stem}-{recipe.method}-{datetime.now():%Y%m%d-%H%M%S}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(path for path in (Path("runs") / name for name in names) if not path.exists())


def progress_bar() -> Progress:
    """Return the display of a run, on stderr; a task of it has ``figures``."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=console(stderr=True),
    )


@contextmanager
def leaving_nothing_halfway(directory: RunDirectory, command: str, bar: Progress, *, new: bool) -> Iterator[None]:
    """Say how to go on with a run that was stopped; remove the folder of one that could not begin.

    Args:
        directory: Of the run.
        command: That goes on with it.
        bar: The display; it ends before anything is said.
        new: Whether the folder was made for this run.
    """
    from dphero.experiments import Interrupted
    from dphero.methods.recipe import code_named

    again = f"dphero {command} --resume {directory.path}{' --trust' * bool(code_named(directory.recipe.as_dict()))}"
    try:
        yield
    except (ValueError, OSError, ImportError):
        if new and not directory.checkpoint.exists():
            shutil.rmtree(directory.path, ignore_errors=True)
        raise
    except Interrupted as error:
        bar.stop()
        say(f"dphero: {error}; go on with: {again}")
        raise typer.Exit(130) from error
    except KeyboardInterrupt as error:
        bar.stop()
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
        screen.print(statement, end="")
    return screen


def print_json(result: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Print chosen figures of an outcome on one line."""
    from dphero.experiments.runs.files import to_json

    typer.echo(to_json({name: result[name] for name in keys}))
