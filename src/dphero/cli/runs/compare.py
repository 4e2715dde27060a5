"""``dphero compare``: methods, budgets, seeds and settings side by side."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dphero.cli._console import console, print_text, say, table
from dphero.cli._options import (
    ChannelsOption,
    DataOption,
    DatasetSizeOption,
    DeltaOption,
    DeviceOption,
    EpochsOption,
    JsonOption,
    LotOption,
    ModelOption,
    TrustOption,
    WorkersOption,
    folder,
    size_of,
)
from dphero.cli._progress import ProgressDisplay

if TYPE_CHECKING:
    from dphero.experiments.comparison.plan import Planned
    from dphero.experiments.comparison.sweep import Standing
    from dphero.experiments.comparison.table import Row

_SETTINGS = ("data", "model", "delta", "lot", "epochs", "dataset_size", "channels", "device")

_Methods = Annotated[
    str | None, typer.Option(help="Separated by commas (dphero methods); dp-sgd,dp-hero unless given.")
]
_Seeds = Annotated[
    str | None,
    typer.Option(help="How many runs of each kind (seeds 0, 1, …), or which seeds: 4,7. 3 unless given."),
]
_Variations = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE,…",
        help="Values of anything in the recipe, options.NAME for an option of a method; may be repeated.",
    ),
]
_Out = Annotated[
    Path | None,
    typer.Option(
        parser=folder, metavar="FOLDER", help="Where to keep it all; a new folder under comparisons/ unless given."
    ),
]
_Resume = Annotated[
    Path | None, typer.Option(parser=folder, metavar="FOLDER", help="Go on with a comparison that was stopped.")
]
_Ray = Annotated[str | None, typer.Option(metavar="ADDRESS", help='Run on a Ray cluster; "local" starts one here.')]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare")(compare)


def compare(
    context: typer.Context,
    data: DataOption = None,
    methods: _Methods = None,
    epsilons: Annotated[str | None, typer.Option(help="Privacy losses allowed, separated by commas.")] = None,
    seeds: _Seeds = None,
    vary: _Variations = None,
    model: ModelOption = None,
    delta: DeltaOption = None,
    lot: LotOption = None,
    epochs: EpochsOption = None,
    dataset_size: DatasetSizeOption = None,
    channels: ChannelsOption = None,
    device: DeviceOption = None,
    recipe: Annotated[Path | None, typer.Option(help="A TOML file with settings for all runs.")] = None,
    out: _Out = None,
    resume: _Resume = None,
    trust: TrustOption = False,
    workers: WorkersOption = None,
    ray: _Ray = None,
    as_json: JsonOption = False,
) -> None:
    """Train by several methods, at several budgets, with several seeds; print one table and draw the curves."""
    settings = {name: context.params[name] for name in _SETTINGS} | {"dataset_size": size_of(dataset_size)}
    given = {name: value for name, value in settings.items() if value is not None}
    for name, text in (("--epsilons", epsilons), ("--seeds", seeds)):
        if text is not None and not _words(text):
            raise ValueError(f"{name} is empty: give values separated by commas, or leave it out")
    if resume is not None and (given or methods or epsilons or seeds or vary or recipe or out):
        raise ValueError("--resume goes on with a comparison as it was planned; leave out all other settings")
    with ProgressDisplay("Planning", speed_seconds=600) as display:
        from dphero.experiments.comparison import plan as plans  # torch takes seconds: something should be seen first
        from dphero.methods import recipe as recipes

        if resume is not None:
            directory, plan = resume, plans.load_plan(resume, trust=trust)
        else:
            in_file = recipes.load(recipe) if recipe else {}
            recipes.require_trust(in_file, recipe or "", trust, instead=given)
            plan = _plan([in_file, given], methods, epsilons, seeds, vary)
            directory = out or _new_folder(plan)
        rows = _carry_out(plan, directory, display, workers, ray)
    if as_json:
        _print_json(rows, directory)
    else:
        _show(rows, directory, _trust(plan))
    if any(row.failed for row in rows):
        raise typer.Exit(1)


def _plan(
    layers: list[dict[str, Any]], methods: str | None, epsilons: str | None, seeds: str | None, vary: list[str] | None
) -> list[Planned]:
    """Turn what was written on the command line into a plan that can be carried out."""
    from dphero.experiments.comparison import grid

    in_file = [str(layer["method"]) for layer in layers if "method" in layer]
    plan = grid.grid(
        *layers,
        methods=_words(methods) if methods is not None else in_file[-1:] or ["dp-sgd", "dp-hero"],
        epsilons=[_number("--epsilons", word) for word in _words(epsilons or "")],
        seeds=_seeds(seeds or "3"),
        vary=grid.parse_variations(vary or []),
    )
    grid.check(plan)
    return plan


def _carry_out(
    plan: list[Planned], directory: Path, display: ProgressDisplay, workers: int | None, ray: str | None
) -> list[Row]:
    """Train what is missing; say how to go on with a comparison that was stopped."""
    from dphero import experiments
    from dphero.experiments.comparison import compare as comparing

    go_on = f"go on with: dphero compare --resume {directory}{_trust(plan)}"
    try:
        return comparing.compare(plan, directory, workers=workers, ray=ray, report=_Reporter(display))
    except experiments.Interrupted as error:
        display.stop()
        say(f"dphero: {error}; {go_on}")
        raise typer.Exit(130) from error
    except KeyboardInterrupt as error:
        display.stop()
        say(f"dphero: stopped at once; runs at work keep their last checkpoint; {go_on}")
        raise typer.Exit(130) from error


class _Reporter:
    """Shows a sweep: one bar for all runs, one for each run at work."""

    def __init__(self, display: ProgressDisplay) -> None:
        self._display = display
        self._failed: set[str] = set()

    def __call__(self, standing: Standing) -> None:
        done, running, failed = (len(each) for each in (standing.done, standing.running, standing.failed))
        counts = {"failed": failed, "running": running, "waiting": standing.runs - done - failed - running}
        figures = [f"{count} {name}" for name, count in counts.items() if count]
        counter = f"{done} of {standing.runs} done"
        self._display.update("All runs", standing.completed, standing.runs, figures, counter)
        self._display.keep_parts(list(standing.running))
        for name, state in standing.running.items():
            known = bool(state.get("steps"))
            figures = _run_figures(state) if known else ["starting"]
            self._display.update_part(name, state["step"] if known else None, state.get("steps"), figures)
        for name in set(standing.failed) - self._failed:
            self._failed.add(name)
            self._display.say(f"{name} failed: {standing.failed[name]}")


def _run_figures(state: Any) -> list[str]:
    figures = []
    if state.get("accuracy") is not None:
        figures.append(f"accuracy {state['accuracy']:.2%}")
    if state.get("epsilon") is not None:
        figures.append(f"ε {state['epsilon']:.3g}")
    return figures


def _new_folder(plan: list[Planned]) -> Path:
    """Return a name under comparisons/ that tells what and when, and is free."""
    data = Path(plan[0].recipe.data.replace(":", "-")).stem
    stem = f"{data}-{datetime.now():%Y%m%d-%H%M%S}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(path for path in (Path("comparisons") / name for name in names) if not path.exists())


def _print_json(rows: list[Row], directory: Path) -> None:
    from dphero.experiments.comparison.table import as_dicts, notes
    from dphero.experiments.runs.files import to_json

    typer.echo(to_json({"comparison": str(directory), "rows": as_dicts(rows), "notes": notes(rows)}))


def _show(rows: list[Row], directory: Path, trust: str) -> None:
    """Print table, methods and notes for people."""
    from dphero.experiments.comparison.table import cells, method_cells, notes

    screen = console()
    for headings, texts in (cells(rows), method_cells(rows)):
        shown = table(*headings)
        for line in texts:
            shown.add_row(*line, style="red" if "UNSOUND AS PUBLISHED" in line else None)
        screen.print(shown)
    for note in notes(rows):
        print_text(screen, f"- {note}")
    for row in rows:
        for name, error in row.errors.items():
            screen.print(f"{name} failed: {error}", style="red")
    if any(row.errors for row in rows):
        screen.print(f"Try the failed runs again with: dphero compare --resume {directory}{trust}")
    screen.print(f"Tables, plots and runs are in {directory}.")


def _trust(plan: list[Planned]) -> str:
    """What has to be added to a command that goes on with a plan."""
    from dphero.methods.recipe import code_named

    return " --trust" if any(code_named(planned.recipe.as_dict()) for planned in plan) else ""


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} takes numbers separated by commas, got {text!r}") from None


def _seeds(text: str) -> list[int]:
    words = _words(text)
    if not words or not all(word.isdecimal() for word in words) or text.strip() == "0":
        raise ValueError(f"--seeds takes a number of seeds, or seeds separated by commas, got {text!r}")
    return list(map(int, words)) if "," in text else list(range(int(words[0])))
