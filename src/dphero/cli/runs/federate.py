"""``dphero federate``: many clients train one model, each on its own data, each with its own budget and ledger."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dphero.cli._options import (
    AccountantOption,
    ChannelsOption,
    ClipOption,
    DataOption,
    DatasetSizeOption,
    DeltaOption,
    JsonOption,
    ModelOption,
    NoiseOption,
    OutOption,
    ResumeOption,
    SecureOption,
    SeedOption,
    SetOption,
    TrustOption,
)
from dphero.cli._progress import ProgressDisplay
from dphero.cli.privacy._price import in_words
from dphero.cli.runs import _training as training

if TYPE_CHECKING:
    from dphero.experiments.runs.rundir import RunDirectory
    from dphero.federated.server.app import RoundProgress

_RECIPE = (
    "data", "channels", "model", "method", "epsilon", "noise_multiplier", "delta", "lot", "lr", "momentum", "clip",
    "accountant", "dataset_size", "seed", "secure", "options",
)  # fmt: skip
_FEDERATION = (
    "clients", "rounds", "local_epochs", "partition", "alpha", "shards", "strategy", "proximal_mu", "controls",
    "shared", "sharing_budget", "unsound", "weights", "client_noise_multiplier", "client_clip", "participations",
)  # fmt: skip
_KEYS = ("accuracy", "epsilon", "epsilon_median", "delta", "rounds", "strategy", "partition", "run")

_Partition = Annotated[
    Literal["iid", "dirichlet", "shards"], typer.Option(help="How examples are dealt out to clients.")
]
_Strategy = Annotated[
    Literal["fedavg", "fedprox", "scaffold", "fednova"], typer.Option(help="How the server puts updates together.")
]
_Controls = Annotated[
    Literal["update", "gradient"],
    typer.Option(help="Of scaffold: control variates from the update (free), or a gradient of their own (charged)."),
]
_Shared = Annotated[
    Literal["none", "generated", "distilled", "distilled-published"],
    typer.Option(help="What clients give to a data set that all of them train on (FedFed)."),
]
_SharingBudget = Annotated[float, typer.Option(help="The share of each client's epsilon that goes into that.")]
_Weights = Annotated[
    Literal["records", "equal"], typer.Option(help="Weigh updates by clients' public numbers of records, or equal.")
]
_Participations = Annotated[
    int | None, typer.Option(min=1, help="Rounds that a client's budget lasts for; the average unless given.")
]
_ClientNoise = Annotated[float | None, typer.Option(help="Noise of the server, for a guarantee to whole clients.")]
_Workers = Annotated[int | None, typer.Option(min=1, help="Processes that act as clients; one for each core.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("federate")(federate)


def federate(
    context: typer.Context,
    data: DataOption = None,
    channels: ChannelsOption = None,
    model: ModelOption = None,
    method: Annotated[str | None, typer.Option(help="How clients train: dp-hero (default), dp-sgd, sgd, …")] = None,
    clients: Annotated[int, typer.Option(min=1, help="How many clients there are.")] = 10,
    sampled: Annotated[int | None, typer.Option(min=1, help="Clients in a round; half of them unless given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds.")] = 20,
    local_epochs: Annotated[float, typer.Option(help="Passes of a client over its data in a round.")] = 1.0,
    partition: _Partition = "iid",
    alpha: Annotated[float, typer.Option(help="Of dirichlet: small values give each client few classes.")] = 0.5,
    shards: Annotated[int, typer.Option(min=1, help="Of shards: pieces of one label that a client gets.")] = 2,
    strategy: _Strategy = "fedavg",
    proximal_mu: Annotated[float, typer.Option(help="Of fedprox: how strongly clients are pulled back.")] = 0.1,
    controls: _Controls = "update",
    shared: _Shared = "none",
    sharing_budget: _SharingBudget = 0.5,
    unsound: Annotated[bool, typer.Option("--unsound", help="Consent to --shared distilled-published.")] = False,
    weights: _Weights = "records",
    participations: _Participations = None,
    client_noise_multiplier: _ClientNoise = None,
    client_clip: Annotated[float, typer.Option(help="The longest update that then counts in full.")] = 1.0,
    epsilon: Annotated[float | None, typer.Option(help="Each client's budget for all rounds together.")] = None,
    noise_multiplier: NoiseOption = None,
    delta: DeltaOption = None,
    lot: Annotated[int | None, typer.Option(help="Expected examples in a client's step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the clients.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of the clients; begins anew every round.")] = None,
    clip: ClipOption = None,
    accountant: AccountantOption = None,
    dataset_size: DatasetSizeOption = None,
    seed: SeedOption = None,
    secure: SecureOption = None,
    options: SetOption = None,
    workers: _Workers = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate federated training on this machine: clients train privately on their own data, a server averages.

    The privacy loss is that of each client's examples against everybody else, the server included.
    """
    given = training.given_recipe({name: context.params[name] for name in _RECIPE})
    if resume is not None and (others := _written(context) - {"resume", "trust", "workers", "as_json"}):
        names = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in others))
        raise ValueError(f"--resume goes on with a run as it was begun; leave out all other settings: {names}")
    training.require_data(data, resume)
    federation = {name: context.params[name] for name in _FEDERATION}
    federation["sampled"] = sampled if sampled is not None else (clients + 1) // 2
    result = _run(given, federation, out, resume, trust, workers)
    if as_json:
        training.print_json(result, _KEYS)
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
    with ProgressDisplay("Preparing") as display:
        simulation = _simulation()
        from dphero.experiments import RunDirectory

        new = False
        if resume is not None:
            directory = RunDirectory.open(resume, trust=trust)
        else:
            directory, new = _begin(given, federation, out)

        def report(progress: RoundProgress) -> None:
            if progress.accuracy is not None:
                display.say(_line(progress))
            display.update("Rounds", progress.round, progress.rounds)

        display.say(_settings(directory))
        with training.leaving_nothing_halfway(directory, "federate", display, new=new):
            return simulation.simulate(directory, report=report, workers=workers)


def _simulation() -> Any:
    try:
        from dphero.federated import simulation
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("flwr", "ray"):
            raise
        raise ImportError(f"federated training needs Flower ({error}): pip install 'dphero[federated]'") from error
    return simulation


def _begin(given: dict[str, Any], settings: dict[str, Any], out: Path | None) -> tuple[RunDirectory, bool]:
    """Return the directory of a new run, and whether it was made just now."""
    from dphero import experiments
    from dphero.federated.client.training_round import require_federable
    from dphero.federated.defaults import DEFAULTS
    from dphero.federated.directory import create
    from dphero.federated.settings import Federation, public_seed

    recipe = experiments.resolve(DEFAULTS.get(str(given.get("data")), {}), given)
    federation = Federation(**settings, seed=public_seed(recipe.seed))
    require_federable(recipe, federation)
    place = out or training.new_folder(recipe, "federated-")
    new = not place.exists()
    return create(place, recipe, federation), new


def _settings(directory: RunDirectory) -> str:
    """What is said before the first round, which takes a while to begin."""
    from dphero.federated.directory import federation_of
    from dphero.federated.settings import partition_name

    federation, recipe = federation_of(directory), directory.recipe
    return (
        f"{recipe.data} among {federation.clients} clients ({partition_name(federation)}), {federation.sampled} of "
        f"them in each of {federation.rounds} rounds; kept in {directory.path}"
    )


def _line(progress: RoundProgress) -> str:
    """What is said of a round."""
    width = len(str(progress.rounds))
    parts = [
        f"round {progress.round:{width}d}",
        None if progress.accuracy is None else f"accuracy {progress.accuracy:.2%}",
        _spent(progress),
        f"{progress.averaged} averaged",
        f"{progress.declined} declined so far" if progress.declined else None,
        f"rejected: {', '.join(progress.rejected)}" if progress.rejected else None,
        f"failed: {', '.join(progress.failed)}" if progress.failed else None,
    ]
    return "  ".join(part for part in parts if part)


def _spent(progress: RoundProgress) -> str | None:
    """The clients' prices so far; an infinite one says nothing more in the next round."""
    largest, median = progress.epsilon, progress.epsilon_median
    if largest is None or median is None:
        return None
    if math.isinf(largest):
        return "ε unbounded"
    return f"ε largest {largest:.3f}, median {median:.3f}"


def _show(result: dict[str, Any]) -> None:
    """Print the outcome for people."""
    run = Path(result["run"])
    sigma, median = result["noise_multiplier"], result["epsilon_median"]
    rows = {
        "privacy": in_words(result["epsilon"], result["delta"], is_bound=result["is_bound"])
        + ("" if result["worst_client"] is None else f" for the examples of client {result['worst_client']}, the most")
        + ("" if median is None else f"; median of all clients {median:.4g}"),
        "method": f"{result['method']}" + ("" if sigma is None else f", noise multiplier {sigma:.4g} there"),
        "federation": f"{result['strategy']}, {result['partition']}",
        "rounds": f"{result['rounds']:,} in {result['seconds']:,.1f} s",
        "declined": ", ".join(f"client {name}" for name in result["declined"]) or "nobody",
        "kept in": result["run"],
    }
    statements = [run / name for name in ("statement.txt", "statement-clients.txt")]
    screen = training.show_outcome(
        result["accuracy"], rows, *(path.read_text(encoding="utf-8") for path in statements if path.exists())
    )
    screen.print(
        "\nAccuracies are those of the server's own test data. The directory holds a whole simulation, the clients' "
        "secrets included: dphero publish copies what may leave it."
    )
