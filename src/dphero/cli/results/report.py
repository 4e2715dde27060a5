"""``dphero report``: one page about runs, comparisons and federated runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dphero.cli._console import say
from dphero.cli._options import JsonOption, folder

if TYPE_CHECKING:
    from dphero.report import Problem


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|COMPARISON|FEDERATED…",
            parser=folder,
            help="Directories of runs, comparisons and federated runs, finished or not; or folders of such. Also what "
            "dphero explain and dphero reproduce have written.",
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The page; report.html unless given.")] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show the page at a local address instead, and keep it up to date.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of --serve, on 127.0.0.1; a free one unless given.")
    ] = None,
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

    The page is a single file that needs no network. What is damaged is named and skipped. With --serve the page follows
    runs while they train.
    """
    if serve and (out is not None or as_json):
        raise ValueError("--serve shows the page and writes no file: leave out --out and --json")
    if port is not None and not serve:
        raise ValueError("--port belongs to --serve")
    if serve:
        _serve(sources, port or 0, private_diagnostics)
        return
    from dphero.experiments.runs.files import to_json
    from dphero.report import build, read, write

    out = Path("report.html") if out is None else out
    if out.is_dir():
        raise ValueError(f"{out} is a directory: name a file for the page, such as {out / 'report.html'}")
    material = read(sources)
    if not (material.rows or material.explained or material.reproduced):
        _tell(material.problems)
        raise ValueError("nothing of it could be read: no page was written")
    size = write(build(material, private_diagnostics=private_diagnostics), out)
    _tell(material.problems)
    if as_json:
        skipped = [{"place": each.place, "what": each.what} for each in material.problems]
        runs = [run.name for run in material.runs]
        typer.echo(to_json({"report": str(out), "bytes": size, "runs": runs, "skipped": skipped}))
        return
    counts = {
        "run": material.runs, "setting": () if material.runs else material.rows, "explanation": material.explained,
        "reproduced item": material.reproduced,
    }  # fmt: skip
    about = ", ".join(_count(len(found), what) for what, found in counts.items() if found)
    typer.echo(f"{out}: {about}, {size / 1e6:.1f} MB, for your eyes only: accuracies are computed without noise")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _tell(problems: tuple[Problem, ...]) -> None:
    for problem in problems:
        say(f"dphero: skipped {problem.place}: {problem.what}")


def _serve(sources: list[Path], port: int, private_diagnostics: bool) -> None:
    from dphero.report import read
    from dphero.report.serve import LiveServer

    _tell(read(sources).problems)
    with LiveServer(sources, port, private_diagnostics=private_diagnostics) as server:
        typer.echo(f"{server.address}\nfollows {', '.join(map(str, sources))}; Ctrl-C stops it")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
