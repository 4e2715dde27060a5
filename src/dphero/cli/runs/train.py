"""``dphero train``: one training run, with everything that should be kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dphero.cli._channels import ChannelsOption
from dphero.cli._trust import TrustOption
from dphero.cli.privacy._dataset_size import DatasetSizeOption
from dphero.cli.privacy._price import JsonOption
from dphero.cli.runs import _training as training

if TYPE_CHECKING:
    from dphero import experiments

_KEYS = ("accuracy", "epsilon", "is_bound", "delta", "steps", "method", "run")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train")(train)


def train(
    data: training.DataOption = None,
    channels: ChannelsOption = None,
    model: training.ModelOption = None,
    method: Annotated[str | None, typer.Option(help="How to train (dphero methods); dp-hero unless given.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="The privacy loss allowed; the noise follows.")] = None,
    noise_multiplier: training.NoiseMultiplierOption = None,
    delta: training.DeltaOption = None,
    lot: Annotated[int | None, typer.Option(help="Expected examples in a step.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of sgd.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adam.")] = None,
    clip: training.ClipOption = None,
    clipping: Annotated[str | None, typer.Option(help="flat, per_layer, automatic or adaptive.")] = None,
    guidance: Annotated[str | None, typer.Option(help="What shapes the noise: pca, history, isotropic.")] = None,
    mechanism: Annotated[str | None, typer.Option(help="ellipsoid or ball.")] = None,
    accountant: training.AccountantOption = None,
    dataset_size: DatasetSizeOption = None,
    physical_batch: Annotated[int | None, typer.Option(help="The most examples in memory at a time.")] = None,
    seed: training.SeedOption = None,
    secure: training.SecureOption = False,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    cuda_graphs: Annotated[
        bool | None,
        typer.Option(
            "--cuda-graphs/--no-cuda-graphs",
            help="Record each pass on the GPU once and replay it. Built-in networks do, unless told not to.",
        ),
    ] = None,
    options: training.MethodOptions = None,
    recipe: Annotated[Path | None, typer.Option(help="A TOML file with the same names.")] = None,
    out: training.OutOption = None,
    resume: training.ResumeOption = None,
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
        "dataset_size": dataset_size,
        "physical_batch": physical_batch,
        "seed": seed,
        "secure": secure,
        "device": device,
        "cuda_graphs": cuda_graphs,
        "options": options,
    }
    given = training.given_recipe(settings)
    if resume is not None and (given or recipe or out):
        raise ValueError("--resume goes on with a run as it was begun; leave out all other settings")
    training.require_data(data, recipe, resume)
    result, statement = _run(given, recipe, out, resume, trust)
    if as_json:
        training.print_json(result, _KEYS)
    else:
        _show(result, statement)


def _run(
    given: dict[str, Any], recipe: Path | None, out: Path | None, resume: Path | None, trust: bool
) -> tuple[dict[str, Any], str]:
    """Train under a progress display on stderr; return result and statement."""
    with training.progress_bar() as bar:
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
            place = out or training.new_folder(chosen)
            new = not place.exists()
            directory = experiments.RunDirectory.create(place, chosen)

        def report(progress: experiments.Progress) -> None:
            bar.update(
                task,
                description="Training" if progress.prepared is None else f"Preparing {progress.prepared:.0%}",
                completed=progress.step,
                total=progress.steps,
                figures=_figures(progress),
            )

        with training.leaving_nothing_halfway(directory, "train", bar, new=new):
            result = experiments.train(directory, report=report)
            return result, directory.read("statement.txt").decode()


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
    rows = {
        "method": result["method"],
        "steps": f"{result['steps']:,} in {result['seconds']:.0f} s",
        "kept in": result["run"],
    }
    screen = training.show_outcome(result["accuracy"], rows, statement)
    for name, other in result["other_prices"].items():
        screen.print(f"For comparison, {name}: epsilon = {'infinite' if other is None else f'{other:.4g}'}.")
    screen.print(
        "\nLosses and accuracies were computed without noise: they are for the owner of the data. checkpoint.pt holds "
        "the key of the noise: keep it as secret as the data, or delete it."
    )
