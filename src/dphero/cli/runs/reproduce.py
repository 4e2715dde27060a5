"""``dphero reproduce``: the paper's table and figures, run anew with honest prices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dphero.cli._console import console, table
from dphero.cli._paths import folder
from dphero.cli.privacy._price import JsonOption

if TYPE_CHECKING:
    from dphero.experiments.comparison.sweep import Standing
    from dphero.experiments.reproduction.running import Reproduced


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("reproduce")(reproduce)


def reproduce(
    item: Annotated[str, typer.Argument(help="What to reproduce (see: dphero reproduce list), or all.")],
    full: Annotated[
        bool, typer.Option("--full/--quick", help="As long as the paper's, or a matter of minutes.")
    ] = False,
    out: Annotated[Path, typer.Option(parser=folder, metavar="FOLDER", help="Where pictures and tables go.")] = Path(
        "reproduction"
    ),
    runs: Annotated[
        Path | None,
        typer.Option(
            parser=folder, metavar="FOLDER", help="Where the runs are kept, for going on; OUT/runs unless given."
        ),
    ] = None,
    data: Annotated[
        Literal["paper", "digits"],
        typer.Option(help="digits: small built-in images for seconds of training, to try the command."),
    ] = "paper",
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at a time; by cores and GPU unless given.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the DP-Hero paper's table and figures anew: the sound mechanism, and the published recipe at its true price.

    Stopped in the middle, the same command goes on: finished runs are kept.
    """
    if data == "digits" and full:
        raise ValueError("--data digits tries the commands out within seconds; leave out --full")
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeElapsedColumn(),
        console=console(stderr=True),
    ) as bar:
        task = bar.add_task("Planning", total=None, figures="")
        from dphero import experiments  # torch takes seconds: something should be seen before it
        from dphero.experiments.reproduction.items import ITEMS, find
        from dphero.experiments.reproduction.running import reproduce as reproduce_item

        if item == "list":
            bar.update(task, visible=False)
            bar.stop()
            _list(as_json)
            return
        names = list(ITEMS) if item == "all" else [find(item).name]
        size: Any = "tiny" if data == "digits" else "full" if full else "quick"
        found: list[Reproduced] = []
        try:
            for number, name in enumerate(names, 1):
                title = f"{name} ({number} of {len(names)})" if len(names) > 1 else name
                bar.update(task, description=title, completed=0, total=None, figures="planning")
                report = _Display(bar, task)
                found.append(reproduce_item(name, out, size=size, runs=runs, workers=workers, report=report))
        except experiments.Interrupted as error:
            bar.stop()
            typer.echo(f"dphero: {error}; the same command goes on", err=True)
            raise typer.Exit(130) from error
        bar.update(task, description="Done", completed=1, total=1, figures="")
    if as_json:
        from dphero.experiments.runs.files import to_json

        typer.echo(to_json({"out": str(out), "items": [each.as_dict() for each in found]}))
    else:
        for each in found:
            _show(each)
    if any(each.failed for each in found):
        raise typer.Exit(1)


class _Display:
    """Shows where the runs of an item stand."""

    def __init__(self, bar: Progress, task: Any) -> None:
        self._bar, self._task = bar, task
        self._failed: set[str] = set()

    def __call__(self, standing: Standing) -> None:
        running = ", ".join(standing.running)
        figures = f"{len(standing.done)} of {standing.runs} runs done; {running}"
        self._bar.update(self._task, completed=standing.completed, total=standing.runs, figures=figures)
        for name in set(standing.failed) - self._failed:
            self._failed.add(name)
            self._bar.console.print(f"{name} failed: {standing.failed[name]}")


def _list(as_json: bool) -> None:
    from dphero.experiments.reproduction.items import ITEMS

    if as_json:
        from dphero.experiments.runs.files import to_json

        names = ("name", "title", "paper", "shows", "minutes")
        typer.echo(to_json([{name: getattr(item, name) for name in names} for item in ITEMS.values()]))
        return
    shown = table("item", "in the paper", "what is shown", "--quick", "--full")
    shown.columns[0].no_wrap = True  # it is there to be typed
    for item in ITEMS.values():
        shown.add_row(item.name, item.paper, item.shows, item.minutes["quick"], item.minutes["full"])
    screen = console()
    screen.print(shown)
    screen.print("Times are rough, for two CPU cores. dphero reproduce all does everything.")


def _show(done: Reproduced) -> None:
    """Print an item's table for people."""
    from dphero.experiments.reproduction.report import shown
    from dphero.experiments.reproduction.settings import UNSOUND

    rows = done.report.rows
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    found = table(*names)
    found.title = f"{done.item} ({done.size})"
    for row in rows:
        texts = [shown(name, row.get(name)) for name in names]
        found.add_row(*texts, style="red" if any(UNSOUND in text for text in texts) else None)
    screen = console()
    screen.print(found)
    for note in done.report.notes:
        screen.print(f"- {note}")
    for name, error in done.failed.items():
        screen.print(f"{name} failed: {error}", style="red")
    if done.failed:
        screen.print("The same command tries the failed runs again.")
    screen.print(f"Written: {', '.join(map(str, done.files))}")
