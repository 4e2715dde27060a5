"""``dphero report``: one page about runs, comparisons and federated runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dphero.cli._console import say
from dphero.cli._options import JsonOption, folder


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|COMPARISON|FEDERATED…",
            parser=folder,
            help="Directories of runs, comparisons and federated runs, finished or not; or folders of such.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    private_diagnostics: Annotated[
        bool,
        typer.Option(
            "--with-private-diagnostics",
            help="Also show training losses and clipped shares: computed without noise, covered by no ε.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write one page: what was promised, what an attacker could gain, how well the models do, how to reproduce it.

    The page is a single file that needs no network. What is damaged is named and skipped.
    """
    from dphero.experiments.runs.files import to_json
    from dphero.report import build, read, write

    material = read(sources)
    size = write(build(material, private_diagnostics=private_diagnostics), out)
    for problem in material.problems:
        say(f"dphero: skipped {problem.place}: {problem.what}")
    if as_json:
        skipped = [{"place": each.place, "what": each.what} for each in material.problems]
        runs = [run.name for run in material.runs]
        typer.echo(to_json({"report": str(out), "bytes": size, "runs": runs, "skipped": skipped}))
        return
    about = f"{len(material.runs)} runs" if material.runs else f"{len(material.rows)} settings"
    typer.echo(f"{out}: {about}, {size / 1e6:.1f} MB, for your eyes only: accuracies are computed without noise")
