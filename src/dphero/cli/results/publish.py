"""``dphero publish``: copy what may be published of a run, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dphero.cli._console import console, table
from dphero.cli._options import JsonOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("publish")(publish)


def publish(
    run: Annotated[Path, typer.Argument(help="Directory of a finished run.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A new directory for what may be published.")],
    as_json: JsonOption = False,
) -> None:
    """Copy what may be published of a run: weights, statement, ledger, and a manifest with their digests.

    The seed, the key of the noise, losses and accuracies stay behind. A run that guarantees nothing is refused.
    """
    from dphero.experiments.runs.files import to_json
    from dphero.experiments.runs.publishing import publish as copy

    files = copy(run, out)
    if as_json:
        typer.echo(to_json({"run": str(run), "published": str(out), "files": files}))
        return
    shown = table("file", "why it may be published")
    for name, why in files.items():
        shown.add_row(name, why)
    screen = console()
    screen.print(shown)
    screen.print(f"All of it is in {out}; nothing else of the run may be published.")
