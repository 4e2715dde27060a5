"""``dphero train``: one training run, with everything that should be kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dphero.cli._console import console, table
from dphero.cli._options import (
    AccountantOption,
    ChannelsOption,
    ClipOption,
    DataOption,
    DatasetSizeOption,
    DeltaOption,
    DeviceOption,
    EpochsOption,
    EpsilonOption,
    JsonOption,
    LearningRateOption,
    LotOption,
    MethodOption,
    ModelOption,
    NoiseOption,
    OutOption,
    PhysicalBatchOption,
    ResumeOption,
    SecureOption,
    SeedOption,
    SetOption,
    TrustOption,
    numbers_of,
    size_of,
)
from dphero.cli._progress import ProgressDisplay
from dphero.cli.privacy._price import in_words
from dphero.cli.runs import _training as training

if TYPE_CHECKING:
    from dphero import experiments
    from dphero.methods.recipe import Recipe

_SETTINGS = (
    "data", "channels", "model", "method", "epsilon", "noise_multiplier", "delta", "lot", "epochs", "lr", "momentum",
    "optimizer", "clip", "clipping", "guidance", "mechanism", "accountant", "dataset_size", "physical_batch",
    "keep_epochs", "seed", "secure", "device", "cuda_graphs", "views", "augment", "averaging", "options",
)  # fmt: skip
_KEYS = ("accuracy", "epsilon", "is_bound", "delta", "steps", "method", "run")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train")(train)


def train(
    context: typer.Context,
    data: DataOption = None,
    channels: ChannelsOption = None,
    model: ModelOption = None,
    method: MethodOption = None,
    epsilon: EpsilonOption = None,
    noise_multiplier: NoiseOption = None,
    delta: DeltaOption = None,
    lot: LotOption = None,
    epochs: EpochsOption = None,
    lr: LearningRateOption = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of sgd.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adam.")] = None,
    clip: ClipOption = None,
    clipping: Annotated[str | None, typer.Option(help="flat, per_layer, automatic or adaptive.")] = None,
    guidance: Annotated[str | None, typer.Option(help="What shapes the noise: pca, history, prior, isotropic.")] = None,
    mechanism: Annotated[str | None, typer.Option(help="ellipsoid or ball.")] = None,
    accountant: AccountantOption = None,
    dataset_size: DatasetSizeOption = None,
    physical_batch: PhysicalBatchOption = None,
    keep_epochs: Annotated[
        str | None, typer.Option(help="Epochs after which the weights are kept for dphero explain: 0,0.5,1,5.")
    ] = None,
    seed: SeedOption = None,
    secure: SecureOption = None,
    device: DeviceOption = None,
    cuda_graphs: Annotated[
        bool | None,
        typer.Option(help="Record passes on the GPU and replay them: always, or never; unasked, if it pays."),
    ] = None,
    views: Annotated[
        int | None, typer.Option(help="Views of each image in a step; their gradients are averaged before clipping.")
    ] = None,
    augment: Annotated[str | None, typer.Option(help="How views differ: crop, flip or crop-flip.")] = None,
    averaging: Annotated[str | None, typer.Option(help="Release a mean of the weights: late or ema.")] = None,
    options: SetOption = None,
    recipe: Annotated[
        Path | None, typer.Option(help="A TOML file with the same names, or a recipe by name (--list-recipes).")
    ] = None,
    list_recipes: Annotated[bool, typer.Option("--list-recipes", help="List the named recipes, and stop.")] = False,
    out: OutOption = None,
    resume: ResumeOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model with differential privacy, and keep its recipe, metrics, ledger, weights and statement."""
    if list_recipes:
        _list_recipes()
        return
    settings = {name: context.params[name] for name in _SETTINGS}
    settings["physical_batch"] = size_of(physical_batch, "physical-batch", "auto")
    given = training.given_recipe({**settings, "keep_epochs": numbers_of("keep-epochs", keep_epochs)})
    if resume is not None and (given or recipe or out):
        raise ValueError("--resume goes on with a run as it was begun; leave out all other settings")
    training.require_data(data, recipe, resume)
    directory, result = _run(given, recipe, out, resume, trust)
    if as_json:
        training.print_json(result, _KEYS)
    else:
        _show(directory.recipe, result, directory.read("statement.txt").decode())


def _run(
    given: dict[str, Any], recipe: Path | None, out: Path | None, resume: Path | None, trust: bool
) -> tuple[experiments.RunDirectory, dict[str, Any]]:
    """Train under a progress display on stderr; return the run's directory and result."""
    with ProgressDisplay("Preparing") as display:
        from dphero import experiments  # torch takes seconds: something should be seen before it
        from dphero.methods import recipe as recipes

        new = False
        if resume is not None:
            directory = experiments.RunDirectory.open(resume, trust=trust)
        else:
            in_file = _settings_of(recipe) if recipe else {}
            recipes.require_trust(in_file, recipe or "", trust, instead=given)
            chosen = experiments.resolve(in_file, given)
            place = out or training.new_folder(chosen)
            new = not place.exists()
            directory = experiments.RunDirectory.create(place, chosen)

        def report(progress: experiments.Progress) -> None:
            what = "Training" if progress.prepared is None else f"Preparing {progress.prepared:.0%}"
            display.update(what, progress.step, progress.steps, _figures(progress))

        with training.leaving_nothing_halfway(directory, "train", display, new=new):
            return directory, experiments.train(directory, report=report)


def _settings_of(recipe: Path) -> dict[str, Any]:
    """Read a recipe: a file, or else one that has a name."""
    from dphero.experiments import frontier
    from dphero.methods import recipe as recipes

    by_name = not recipe.exists() and len(recipe.parts) == 1 and not recipe.suffix
    return frontier.named(str(recipe)) if by_name else recipes.load(recipe)


def _list_recipes() -> None:
    from dphero.experiments import frontier

    shown = table("recipe", "what it does")
    for name in frontier.NAMES:
        shown.add_row(name, frontier.described(name))
    console().print(shown)
    console().print("To use one: dphero train --recipe NAME --seed SECRET. What they reach: dphero frontier.")


def _figures(progress: experiments.Progress) -> list[str]:
    parts = {
        "accuracy": None if progress.accuracy is None else f"{progress.accuracy:.2%}",
        "ε": None if progress.epsilon is None else f"{progress.epsilon:.3f}",
        "loss": None if progress.loss is None else f"{progress.loss:.3f}",
        "clipped": None if progress.clipped is None else f"{progress.clipped:.0%}",
        "signal/noise": None if progress.signal_to_noise is None else f"{progress.signal_to_noise:.2f}",
    }
    return [f"{name} {value}" for name, value in parts.items() if value is not None]


def _show(recipe: Recipe, result: dict[str, Any], statement: str) -> None:
    """Print the outcome for people: what it reached, what it cost, and with which settings."""
    unsound = "" if result.get("sound", True) else ", UNSOUND AS PUBLISHED"
    sigma = result.get("noise_multiplier")
    rows = {
        "privacy": in_words(result["epsilon"], result["delta"], is_bound=result["is_bound"]) + unsound,
        "method": f"{result['method']}" + ("" if sigma is None else f", noise multiplier {sigma:.4g}"),
        "model": f"{recipe.model} on {recipe.data}",
        "settings": _settings(recipe),
        "steps": f"{result['steps']:,} in {result['seconds']:,.1f} s",
        "kept in": result["run"],
    }
    screen = training.show_outcome(result["accuracy"], rows, statement)
    for name, other in result["other_prices"].items():
        screen.print(f"For comparison, {name}: epsilon = {'infinite' if other is None else f'{other:.4g}'}.")
    screen.print(
        "\nLosses and accuracies were computed without noise: they are for the owner of the data. checkpoint.pt holds "
        "the key of the noise: keep it as secret as the data, or delete it."
    )


def _settings(recipe: Recipe) -> str:
    """The settings that decide most, in the words of the options."""
    optimizer = f"momentum {recipe.momentum:g}" if recipe.optimizer == "sgd" else recipe.optimizer
    clip = "" if recipe.method == "sgd" else f", clip {recipe.clip:g}"
    return f"lot {recipe.lot:,}, {recipe.epochs:g} epochs, lr {recipe.lr:g}, {optimizer}{clip}"
