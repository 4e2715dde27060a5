"""``dphero federate``: many clients train one model, each on its own data, each with its own budget and ledger."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dphero.cli._channels import ChannelsOption
from dphero.cli._console import console
from dphero.cli._trust import TrustOption
from dphero.cli.privacy._dataset_size import DatasetSizeOption, size_of
from dphero.cli.privacy._price import Accountant, JsonOption
from dphero.cli.runs.train import _options

if TYPE_CHECKING:
    from dphero.experiments.runs.rundir import RunDirectory
    from dphero.federated.server.app import RoundProgress

_KEYS = ("accuracy", "epsilon", "epsilon_median", "delta", "rounds", "strategy", "partition", "run")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("federate")(federate)


def federate(
    context: typer.Context,
    data: Annotated[
        str | None, typer.Option(help="A data set (dphero data list), package:function, a folder of images, or .npz.")
    ] = None,
    channels: ChannelsOption = None,
    model: Annotated[str | None, typer.Option(help="A network by name, or package:function.")] = None,
    method: Annotated[str | None, typer.Option(help="How clients train: dp-hero (default), dp-sgd, sgd, …")] = None,
    clients: Annotated[int, typer.Option(min=1, help="How many clients there are.")] = 10,
    sampled: Annotated[int | None, typer.Option(min=1, help="Clients in a round; half of them unless given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds.")] = 20,
    local_epochs: Annotated[float, typer.Option(help="Passes of a client over its data in a round.")] = 1.0,
    partition: Annotated[
        Literal["iid", "dirichlet", "shards"], typer.Option(help="How examples are dealt out to clients.")
    ] = "iid",
    alpha: Annotated[float, typer.Option(help="Of dirichlet: small values give each client few classes.")] = 0.5,
    shards: Annotated[int, typer.Option(min=1, help="Of shards: pieces of one label that a client gets.")] = 2,
    strategy: Annotated[
        Literal["fedavg", "fedprox", "scaffold", "fednova"], typer.Option(help="How the server puts updates together.")
    ] = "fedavg",
    proximal_mu: Annotated[float, typer.Option(help="Of fedprox: how strongly clients are pulled back.")] = 0.1,
    controls: Annotated[
        Literal["update", "gradient"],
        typer.Option(
            help="Of scaffold: control variates from the update (free), or a gradient of their own (charged)."
        ),
    ] = "update",
    shared: Annotated[
        Literal["none", "generated", "distilled", "distilled-published"],
        typer.Option(help="What clients give to a data set that all of them train on (FedFed)."),
    ] = "none",
    sharing_budget: Annotated[
        float, typer.Option(help="The share of each client's epsilon that goes into that.")
    ] = 0.5,
    unsound: Annotated[bool, typer.Option("--unsound", help="Consent to --shared distilled-published.")] = False,
    weights: Annotated[
        Literal["records", "equal"], typer.Option(help="Weigh updates by clients' public numbers of records, or equal.")
    ] = "records",
    participations: Annotated[
        int | None, typer.Option(min=1, help="Rounds that a client's budget lasts for; the average unless given.")
    ] = None,
    client_noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise of the server, for a guarantee to whole clients.")
    ] = None,
    client_clip: Annotated[float, typer.Option(help="The longest update that then counts in full.")] = 1.0,
    epsilon: Annotated[float | None, typer.Option(help="Each client's budget for all rounds together.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="The noise; the privacy loss follows.")] = None,
    delta: Annotated[float | None, typer.Option(help="The probability left out of account.")] = None,
    lot: Annotated[int | None, typer.Option(help="Expected examples in a client's step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the clients.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of the clients; begins anew every round.")] = None,
    clip: Annotated[float | None, typer.Option(help="Clip norm.")] = None,
    accountant: Annotated[Accountant | None, typer.Option(help="How to price.")] = None,
    dataset_size: DatasetSizeOption = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Make the run repeatable; privacy then rests on keeping the seed secret.")
    ] = None,
    secure: Annotated[bool, typer.Option("--secure", help="Noise and lots from a cryptographic generator.")] = False,
    options: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An option of the method; may be repeated.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that act as clients; one for each core.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to keep the run; a new folder under runs/ unless given.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with a run that was stopped.")] = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate federated training on this machine: clients train privately on their own data, a server averages.

    The privacy loss is that of each client's examples against everybody else, the server included.
    """
    recipe = {
        "data": data,
        "channels": channels,
        "model": model,
        "method": method,
        "epsilon": epsilon,
        "noise_multiplier": noise_multiplier,
        "delta": delta,
        "lot": lot,
        "lr": lr,
        "momentum": momentum,
        "clip": clip,
        "accountant": accountant,
        "dataset_size": size_of(dataset_size),
        "seed": seed,
        "secure": secure or None,
        "options": _options(options),
    }
    given = {name: value for name, value in recipe.items() if value not in (None, {})}
    if resume is not None and (others := _written(context) - {"resume", "trust", "workers", "as_json"}):
        names = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in others))
        raise ValueError(f"--resume goes on with a run as it was begun; leave out all other settings: {names}")
    federation = {
        "clients": clients,
        "sampled": sampled if sampled is not None else (clients + 1) // 2,
        "rounds": rounds,
        "local_epochs": local_epochs,
        "partition": partition,
        "alpha": alpha,
        "shards": shards,
        "strategy": strategy,
        "proximal_mu": proximal_mu,
        "controls": controls,
        "shared": shared,
        "sharing_budget": sharing_budget,
        "unsound": unsound,
        "weights": weights,
        "client_noise_multiplier": client_noise_multiplier,
        "client_clip": client_clip,
        "participations": participations,
    }
    result = _run(given, federation, out, resume, trust, workers)
    if as_json:
        from dphero.experiments.runs.files import to_json

        typer.echo(to_json({name: result[name] for name in _KEYS}))
    else:
        _show(result)


def _written(context: typer.Context) -> set[str]:
    """The settings that the user wrote himself."""
    return {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}


def _run(
    given: dict[str, Any],
    federation: dict[str, Any],
    out: Path | None,
    resume: Path | None,
    trust: bool,
    workers: int | None,
) -> dict[str, Any]:
    """Run under a display of the rounds on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task("Preparing", total=None, figures="")
        simulation = _simulation()
        from dphero.experiments import RunDirectory
        from dphero.experiments.stopping import Interrupted

        directory = RunDirectory.open(resume, trust=trust) if resume is not None else _begin(given, federation, out)

        def report(progress: RoundProgress) -> None:
            figures = _figures(progress)
            bar.console.print(f"round {progress.round:3d}  {figures}")
            bar.update(task, description="Rounds", completed=progress.round, total=progress.rounds, figures="")

        try:
            return simulation.simulate(directory, report=report, workers=workers)
        except Interrupted as error:
            bar.stop()
            typer.echo(f"dphero: {error}; go on with: dphero federate --resume {directory.path}", err=True)
            raise typer.Exit(130) from error


def _simulation() -> Any:
    try:
        from dphero.federated import simulation
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("flwr", "ray"):
            raise
        raise ImportError(f"federated training needs Flower ({error}): pip install 'dphero[federated]'") from error
    return simulation


def _begin(given: dict[str, Any], settings: dict[str, Any], out: Path | None) -> RunDirectory:
    from dphero import experiments
    from dphero.federated.client.training_round import require_federable
    from dphero.federated.defaults import DEFAULTS
    from dphero.federated.directory import create
    from dphero.federated.settings import Federation, public_seed

    recipe = experiments.resolve(DEFAULTS.get(str(given.get("data")), {}), given)
    federation = Federation(**settings, seed=public_seed(recipe.seed))
    require_federable(recipe, federation)
    return create(out or _new_folder(recipe), recipe, federation)


def _new_folder(recipe: Any) -> Path:
    stem = f"federated-{Path(recipe.data.replace(':', '-')).stem}-{recipe.method}-{datetime.now():%Y%m%d-%H%M%S}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(path for path in (Path("runs") / name for name in names) if not path.exists())


def _figures(progress: RoundProgress) -> str:
    parts = [
        None if progress.accuracy is None else f"accuracy {progress.accuracy:.2%}",
        f"ε largest {progress.epsilon:.3f}, median {progress.epsilon_median:.3f}",
        f"{progress.averaged} averaged",
        f"{progress.declined} declined" if progress.declined else None,
        f"rejected: {', '.join(progress.rejected)}" if progress.rejected else None,
        f"failed: {', '.join(progress.failed)}" if progress.failed else None,
    ]
    return "  ".join(part for part in parts if part)


def _show(result: dict[str, Any]) -> None:
    """Print the outcome for people."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")  # a path must not be cut short
    table.add_row("method", f"{result['method']}, {result['strategy']}, {result['partition']}")
    table.add_row("rounds", f"{result['rounds']:,} in {result['seconds']:.0f} s")
    table.add_row("declined", ", ".join(result["declined"]) or "nobody")
    table.add_row("kept in", result["run"])
    screen, title = console(), Text(f"Test accuracy {result['accuracy']:.2%}", style="bold")
    screen.print(Panel(table, title=title, title_align="left", expand=False))
    for name in ("statement.txt", "statement-clients.txt"):
        path = Path(result["run"]) / name
        if path.exists():
            screen.print(path.read_text(encoding="utf-8"))
