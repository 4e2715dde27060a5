"""``dphero train``: one training run, with everything that should be kept of it."""

from __future__ import annotations

import ast
import shutil
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dphero.cli._channels import ChannelsOption
from dphero.cli._console import console, say
from dphero.cli._paths import folder
from dphero.cli._trust import TrustOption
from dphero.cli.privacy._dataset_size import DatasetSizeOption, size_of
from dphero.cli.privacy._price import Accountant, JsonOption

if TYPE_CHECKING:
    from dphero import experiments

_KEYS = ("accuracy", "epsilon", "is_bound", "delta", "steps", "method", "run")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train")(train)


def train(
    data: Annotated[
        str | None, typer.Option(help="A data set (dphero data list), package:function, a folder of images, or .npz.")
    ] = None,
    channels: ChannelsOption = None,
    model: Annotated[str | None, typer.Option(help="A network by name, or package:function.")] = None,
    method: Annotated[str | None, typer.Option(help="How to train (dphero methods); dp-hero unless given.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="The privacy loss allowed; the noise follows.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="The noise; the privacy loss follows.")] = None,
    delta: Annotated[float | None, typer.Option(help="The probability left out of account.")] = None,
    lot: Annotated[int | None, typer.Option(help="Expected examples in a step.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of sgd.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adam.")] = None,
    clip: Annotated[float | None, typer.Option(help="Clip norm.")] = None,
    clipping: Annotated[str | None, typer.Option(help="flat, per_layer, automatic or adaptive.")] = None,
    guidance: Annotated[str | None, typer.Option(help="What shapes the noise: pca, history, isotropic.")] = None,
    mechanism: Annotated[str | None, typer.Option(help="ellipsoid or ball.")] = None,
    accountant: Annotated[Accountant | None, typer.Option(help="How to price.")] = None,
    dataset_size: DatasetSizeOption = None,
    physical_batch: Annotated[int | None, typer.Option(help="The most examples in memory at a time.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Make the run repeatable; privacy then rests on keeping the seed secret.")
    ] = None,
    secure: Annotated[bool, typer.Option("--secure", help="Noise and lots from a cryptographic generator.")] = False,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    cuda_graphs: Annotated[
        bool | None,
        typer.Option(
            "--cuda-graphs/--no-cuda-graphs",
            help="Record each pass on the GPU once and replay it. Built-in networks do, unless told not to.",
        ),
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An option of the method; may be repeated.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="A TOML file with the same names.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=folder, metavar="FOLDER", help="Where to keep the run; a new folder under runs/ unless given."
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(parser=folder, metavar="FOLDER", help="Go on with a run that was stopped.")
    ] = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model with differential privacy, and keep its recipe, metrics, ledger, weights and statement."""
    settings = {
        "data": data,
        "channels": channels,
        "model": model,
        "method": method,
        "epsilon": epsilon,
        "noise_multiplier": noise_multiplier,
        "delta": delta,
        "lot": lot,
        "epochs": epochs,
        "lr": lr,
        "momentum": momentum,
        "optimizer": optimizer,
        "clip": clip,
        "clipping": clipping,
        "guidance": guidance,
        "mechanism": mechanism,
        "accountant": accountant,
        "dataset_size": size_of(dataset_size),
        "physical_batch": physical_batch,
        "seed": seed,
        "secure": secure or None,
        "device": device,
        "cuda_graphs": cuda_graphs,
        "options": _options(options),
    }
    given = {name: value for name, value in settings.items() if value not in (None, {})}
    if resume is not None and (given or recipe or out):
        raise ValueError("--resume goes on with a run as it was begun; leave out all other settings")
    if data is None and recipe is None and resume is None:  # said before torch is imported, which takes seconds
        raise ValueError("which data? Give --data NAME (see: dphero data list), a folder, an .npz or package:function")
    result, statement = _run(given, recipe, out, resume, trust)
    if as_json:
        from dphero.experiments.runs.files import to_json

        typer.echo(to_json({name: result[name] for name in _KEYS}))
    else:
        _show(result, statement)


def _run(
    given: dict[str, Any], recipe: Path | None, out: Path | None, resume: Path | None, trust: bool
) -> tuple[dict[str, Any], str]:
    """Train under a progress display on stderr; return result and statement."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task("Preparing", total=None, figures="")
        from dphero import experiments  # torch takes seconds: something should be seen before it
        from dphero.methods import recipe as recipes

        new = False
        if resume is not None:
            directory = experiments.RunDirectory.open(resume, trust=trust)
        else:
            in_file = recipes.load(recipe) if recipe else {}
            recipes.require_trust(in_file, recipe or "", trust, instead=given)
            chosen = experiments.resolve(in_file, given)
            place = out or _new_folder(chosen)
            new = not place.exists()
            directory = experiments.RunDirectory.create(place, chosen)

        again = f"dphero train --resume {directory.path}"
        if recipes.code_named(directory.recipe.as_dict()):
            again += " --trust"

        def report(progress: experiments.Progress) -> None:
            bar.update(
                task,
                description="Training" if progress.prepared is None else f"Preparing {progress.prepared:.0%}",
                completed=progress.step,
                total=progress.steps,
                figures=_figures(progress),
            )

        try:
            result = experiments.train(directory, report=report)
            return result, directory.read("statement.txt").decode()
        except (ValueError, OSError, ImportError):
            if new and not directory.checkpoint.exists():
                shutil.rmtree(directory.path, ignore_errors=True)  # nothing was begun: leave no folder behind
            raise
        except experiments.Interrupted as error:
            bar.stop()
            say(f"dphero: {error}; go on with: {again}")
            raise typer.Exit(130) from error
        except KeyboardInterrupt as error:
            bar.stop()
            say(f"dphero: stopped at once; nothing was saved after the last checkpoint; go on from that with: {again}")
            raise typer.Exit(130) from error


def _new_folder(recipe: Any) -> Path:
    """Return a name under runs/ that tells what and when, and is free."""
    stem = f"{Path(recipe.data.replace(':', '-')).stem}-{recipe.method}-{datetime.now():%Y%m%d-%H%M%S}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(path for path in (Path("runs") / name for name in names) if not path.exists())


def _figures(progress: experiments.Progress) -> str:
    parts = {
        "accuracy": None if progress.accuracy is None else f"{progress.accuracy:.2%}",
        "loss": None if progress.loss is None else f"{progress.loss:.3f}",
        "ε": None if progress.epsilon is None else f"{progress.epsilon:.3f}",
        "clipped": None if progress.clipped is None else f"{progress.clipped:.0%}",
        "signal/noise": None if progress.signal_to_noise is None else f"{progress.signal_to_noise:.2f}",
    }
    return "  ".join(f"{name} {value}" for name, value in parts.items() if value is not None)


def _show(result: dict[str, Any], statement: str) -> None:
    """Print the outcome for people."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")  # a path must not be cut short
    table.add_row("method", result["method"])
    table.add_row("steps", f"{result['steps']:,} in {result['seconds']:.0f} s")
    table.add_row("kept in", result["run"])
    screen, title = console(), Text(f"Test accuracy {result['accuracy']:.2%}", style="bold")
    screen.print(Panel(table, title=title, title_align="left", expand=False))
    screen.print(statement, end="")
    for name, other in result["other_prices"].items():
        screen.print(f"For comparison, {name}: epsilon = {'infinite' if other is None else f'{other:.4g}'}.")
    screen.print(
        "\nLosses and accuracies were computed without noise: they are for the owner of the data. checkpoint.pt holds "
        "the key of the noise: keep it as secret as the data, or delete it."
    )


def _options(given: list[str] | None) -> dict[str, Any]:
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
