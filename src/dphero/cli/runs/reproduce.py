"""``dphero reproduce``: the paper's table and figures, run anew with honest prices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dphero.cli._console import console, print_text, say, table
from dphero.cli._options import JsonOption, WorkersOption, folder
from dphero.cli._progress import ProgressDisplay

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
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the DP-Hero paper's table and figures anew: the sound mechanism, and the published recipe at its true price.

    Stopped in the middle, the same command goes on: finished runs are kept.
    """
    if data == "digits" and full:
        raise ValueError("--data digits tries the commands out within seconds; leave out --full")
    with ProgressDisplay("Planning", speed_seconds=600) as display:
        from dphero import experiments  # torch takes seconds: something should be seen before it
        from dphero.experiments.reproduction.items import ITEMS, find
        from dphero.experiments.reproduction.running import reproduce as reproduce_item

        if item == "list":
            display.stop()
            _list(as_json)
            return
        names = list(ITEMS) if item == "all" else [find(item).name]
        size: Any = "tiny" if data == "digits" else "full" if full else "quick"
        found: list[Reproduced] = []
        try:
            for number, name in enumerate(names, 1):
                title = f"{name} ({number} of {len(names)})" if len(names) > 1 else name
                display.update(title, figures=["planning"])
                report = _Reporter(display, title)
                found.append(reproduce_item(name, out, size=size, runs=runs, workers=workers, report=report))
        except experiments.Interrupted as error:
            display.stop()
            say(f"dphero: {error}; the same command goes on")
            raise typer.Exit(130) from error
    if as_json:
        from dphero.experiments.runs.files import to_json

        typer.echo(to_json({"out": str(out), "items": [each.as_dict() for each in found]}))
    else:
        for each in found:
            _show(each)
    if any(each.failed for each in found):
        raise typer.Exit(1)


class _Reporter:
    """Shows where the runs of an item stand."""

    def __init__(self, display: ProgressDisplay, title: str) -> None:
        self._display, self._title = display, title
        self._failed: set[str] = set()

    def __call__(self, standing: Standing) -> None:
        counter = f"{len(standing.done)} of {standing.runs} runs done"
        self._display.update(self._title, standing.completed, standing.runs, list(standing.running), counter)
        for name in set(standing.failed) - self._failed:
            self._failed.add(name)
            self._display.say(f"{name} failed: {standing.failed[name]}")


def _list(as_json: bool) -> None:
    from dphero.experiments.reproduction.items import ITEMS

    if as_json:
        from dphero.experiments.runs.files import to_json

        names = ("name", "title", "paper", "shows", "minutes")
        typer.echo(to_json([{name: getattr(item, name) for name in names} for item in ITEMS.values()]))
        return
    headings = ("item", "in the paper", "--quick", "--full")
    lines = [(each.name, each.paper, each.minutes["quick"], each.minutes["full"]) for each in ITEMS.values()]
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    screen = console()
    for line, shows in zip(
        (headings, *lines), ("what ours shows", *(each.shows for each in ITEMS.values())), strict=True
    ):
        print_text(screen, "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        print_text(screen, f"    {shows}")
    screen.print("")
    print_text(screen, "Times are rough, for one run at a time on one CPU core. dphero reproduce all does everything.")


def _show(done: Reproduced) -> None:
    """Print the part of an item's table that fits a terminal, and say where the rest is."""
    from dphero.experiments.reproduction.report import brief
    from dphero.experiments.reproduction.settings import UNSOUND

    lines = brief(done.report.rows)
    found = table(*(lines[0] if lines else ()))
    found.title = f"{done.item} ({done.size})"
    for name, column in zip(lines[0] if lines else (), found.columns, strict=True):  # no word is broken
        column.min_width = max(len(word) for text in (name, *(each[name] for each in lines)) for word in text.split())
    for line in lines:
        found.add_row(*line.values(), style="red" if any(UNSOUND in text for text in line.values()) else None)
    screen = console()
    screen.print(found)
    for note in done.report.notes:
        print_text(screen, f"- {note}")
    for name, error in done.failed.items():
        screen.print(f"{name} failed: {error}", style="red")
    if done.failed:
        screen.print("The same command tries the failed runs again.")
    whole = next((path for path in done.files if path.suffix == ".md"), None)
    columns = dict.fromkeys(name for row in done.report.rows for name in row)
    if whole is not None:
        rows = f"{len(done.report.rows)} rows of " if len(lines) < len(done.report.rows) else ""
        screen.print(f"The whole table, {rows}{len(columns)} columns, is in {whole}.", soft_wrap=True)
    screen.print(f"Written: {', '.join(map(str, done.files))}")
