"""``dphero demo``: train a small private model and say what it cost."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dphero.cli._console import console, print_text
from dphero.cli._options import JsonOption, SeedOption
from dphero.cli._progress import ProgressDisplay
from dphero.cli.privacy._price import in_words

if TYPE_CHECKING:
    from dphero.experiments import demo as digits


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(
    epsilon: Annotated[float, typer.Option(help="The privacy loss allowed.")] = 3.0,
    delta: Annotated[float, typer.Option(help="The probability left out of account, below 1 / 1437.")] = 1e-4,
    epochs: Annotated[int, typer.Option(min=1, help="How long to train; longer training needs more noise.")] = 40,
    seed: SeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train on scikit-learn's handwritten digits with differential privacy, and print what it cost."""
    started = time.perf_counter()
    result = _train(epsilon, delta, epochs, seed)
    if as_json:
        price = result.statement.price
        record = {
            "accuracy": result.accuracy,
            "epsilon": price.epsilon,
            "delta": price.delta,
            "steps": result.steps,
            "noise_multiplier": result.noise_multiplier,
        }
        typer.echo(json.dumps(record))
    else:
        _show(result, time.perf_counter() - started, seeded=seed is not None)


def _train(epsilon: float, delta: float, epochs: int, seed: int | None) -> digits.Result:
    """Train under a progress bar on stderr."""
    with ProgressDisplay("Choosing the noise") as display:
        from dphero.experiments import demo as digits  # torch takes seconds to load: something should be seen before it

        def report(progress: digits.Progress) -> None:
            figures = [f"ε {progress.epsilon:.2f} of {epsilon:g}", f"loss {progress.loss:.2f}"]
            display.update("Training privately", progress.step, progress.steps, figures)

        return digits.train(epsilon=epsilon, delta=delta, epochs=epochs, seed=seed, report=report)


def _show(result: digits.Result, seconds: float, *, seeded: bool) -> None:
    """Print accuracy, price and statement for people."""
    price = result.statement.price
    table = Table.grid(padding=(0, 2))
    table.add_row("privacy", in_words(price.epsilon, price.delta, is_bound=price.is_bound))
    table.add_row("trained on", f"{result.train_images:,} images, {result.steps} steps, {seconds:.1f} s")
    table.add_row("noise", f"multiplier {result.noise_multiplier:.3f}, shaped by the weights' principal directions")
    table.add_row("tested on", f"{result.test_images} other images")
    screen, title = console(), Text(f"Test accuracy {result.accuracy:.1%}", style="bold")
    screen.print(Panel(table, title=title, title_align="left", expand=False))
    print_text(screen, result.statement.text)
    screen.print(
        "\nThe loss in the progress bar and the accuracy above were computed without noise. They are for the owner of "
        "the data; to publish them would cost privacy of its own."
        + ("" if seeded else " Every run draws new noise; --seed makes one repeatable, if the seed is kept secret.")
    )
