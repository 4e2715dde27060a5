"""``dphero audit``: attack what was promised, and say how much of it holds."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from dphero.cli._console import console
from dphero.cli._options import DatasetSizeOption, JsonOption, TrustOption, folder, size_of
from dphero.cli._progress import ProgressDisplay

if TYPE_CHECKING:
    from dphero.audit.report import Report

_PUBLISHED = "published"
_RELEASES, _QUICK_RELEASES = 1000, 200

_Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN|published]",
        help="The directory of a finished run; or 'published', the paper's recipe on trial (a run of that name: "
        "./published).",
    ),
]
_Data = Annotated[str | None, typer.Option(help="The data for --method: a name, folder, .npz, or package:function.")]
_Noise = Annotated[float | None, typer.Option(help="Noise over clip bound, for --method and 'published'.")]
_Releases = Annotated[
    int | None,
    typer.Option(
        min=40,
        max=10**7,
        help="Releases with the canary, and as many without, for each attack; more give tighter bounds. Default "
        "1000, with --quick 200.",
    ),
]
_Out = Annotated[
    Path | None,
    typer.Option(parser=folder, metavar="FOLDER", help="Write audit.json and pictures here; RUN/audit for a run."),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("audit")(audit)


def audit(
    target: _Target = None,
    method: Annotated[str | None, typer.Option(help="Audit a method (dphero methods) without a run.")] = None,
    data: _Data = None,
    dataset_size: DatasetSizeOption = None,
    noise_multiplier: _Noise = None,
    epsilon: Annotated[float | None, typer.Option(help="The privacy loss allowed, for --method.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out whole trainings: about a minute.")] = False,
    releases: _Releases = None,
    delta: Annotated[float | None, typer.Option(help="The probability left out of account.")] = None,
    confidence: Annotated[float, typer.Option(help="The probability with which each bound holds.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Decides canaries, noise and lots of the audit.")] = 0,
    out: _Out = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Test the ε that was printed: attack the mechanism, the training and the released model.

    Prints a lower bound on ε with its confidence beside the claimed one. Exit code 1 if a claim is refuted, except for
    'published', whose claim is known to be wrong.
    """
    if (target is None) == (method is None):
        raise ValueError("give a run directory, or 'published', or --method NAME with --data NAME")
    if not 0 < confidence < 1:
        raise ValueError(f"--confidence must lie between 0 and 1, got {confidence:g}: for example 0.95")
    if target is not None and not (data is None and epsilon is None and dataset_size is None):
        raise ValueError("--data, --epsilon and --dataset-size belong to --method: a run has its own")
    if target not in (None, _PUBLISHED) and not (noise_multiplier is None and delta is None):
        raise ValueError("--noise-multiplier and --delta are the run's own: leave them out")
    releases = releases or (_QUICK_RELEASES if quick else _RELEASES)
    folder = out or (Path(target) / "audit" if target not in (None, _PUBLISHED) else None)
    if folder is not None:
        if out is None and folder.is_symlink():
            raise ValueError(f"{folder} is a symbolic link, which is not followed here: remove it, or give --out")
        _require_writable(folder)
    with ProgressDisplay("Preparing") as display:
        try:
            report = _report(
                target, method, data, size_of(dataset_size), noise_multiplier, epsilon, quick, releases, delta,
                confidence, seed, display.update, trust,
            )  # fmt: skip
        except KeyboardInterrupt as error:
            display.stop()
            typer.echo("dphero: interrupted; the audit is not finished, and nothing was written", err=True)
            raise typer.Exit(130) from error
    if as_json:
        _print_json(report, one_line_each=target == _PUBLISHED)
    else:
        _show(report)
    failed = report.refuted and target != _PUBLISHED
    if folder is not None:
        try:
            _save(report, folder)
        except OSError as error:
            if not failed:
                raise
            typer.echo(f"dphero: {error}", err=True)  # the verdict is what the exit code tells
    if failed:
        raise typer.Exit(1)


def _report(
    target: str | None,
    method: str | None,
    data: str | None,
    dataset_size: int | str | None,
    noise_multiplier: float | None,
    epsilon: float | None,
    quick: bool,
    releases: int,
    delta: float | None,
    confidence: float,
    seed: int,
    tell: Any,
    trust: bool,
) -> Report:
    """Do what was asked for."""
    from dphero.audit.report import Report

    if target == _PUBLISHED:
        from dphero.audit.published import NOISE_MULTIPLIER, audit_published

        sigma = NOISE_MULTIPLIER if noise_multiplier is None else noise_multiplier
        audits = audit_published(
            noise_multiplier=sigma, releases=releases, delta=1e-5 if delta is None else delta, confidence=confidence,
            seed=seed, report=lambda done: tell("Releasing", done, 4 * releases),
        )  # fmt: skip
        return Report(f"the published recipe, one step of LeNet, σ = {sigma:g}", audits)
    from dphero.audit.runs import audit_recipe, audit_run

    if target is not None:
        if not Path(target).exists():
            raise ValueError(f"there is no run directory {target}: give one that dphero train has made, or 'published'")
        return audit_run(
            target, quick=quick, releases=releases, confidence=confidence, seed=seed, tell=tell, trust=trust
        )
    from dphero.experiments import resolve

    given = {
        "data": data, "method": method, "dataset_size": dataset_size, "noise_multiplier": noise_multiplier,
        "epsilon": epsilon, "delta": delta,
    }  # fmt: skip
    chosen = {name: value for name, value in given.items() if value is not None}
    if noise_multiplier is None and epsilon is None:
        chosen["noise_multiplier"] = 1.0
    return audit_recipe(
        resolve(chosen), quick=quick, releases=releases, confidence=confidence, seed=seed, tell=tell
    )  # fmt: skip


def _print_json(report: Report, *, one_line_each: bool) -> None:
    from dphero.experiments.runs.files import to_json

    if one_line_each:
        for each in report.audits:
            typer.echo(to_json(each.as_dict()))
    else:
        typer.echo(to_json(report.as_dict()))


def _require_writable(folder: Path) -> None:
    """Raise if the findings could not be written: better known before the audit."""
    place = folder
    while not os.path.exists(place):
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        what = "is no folder" if not place.is_dir() else "cannot be written to"
        raise ValueError(f"the audit cannot be saved in {folder}: {place} {what}; give another --out")


def _save(report: Report, folder: Path) -> None:
    """Write the files; without matplotlib, those that need none."""
    from dphero.audit.report import save

    try:
        save(report, folder)
    except ImportError as error:
        typer.echo(f"dphero: {error}; {folder / 'audit.json'} was written without pictures", err=True)
    else:
        typer.echo(f"dphero: audit.json and pictures are in {folder}", err=True)


def _show(report: Report) -> None:
    """Print the findings for people: the conclusion first."""
    screen = console()
    screen.print(Text(f"{report.conclusion}.", style="bold red" if report.refuted else "bold green"))
    known = any(each.true_epsilon is not None for each in report.audits)
    table = Table(title=f"Audit of {report.title}", title_justify="left", title_style="bold")
    for name in ("audited", "σ", "claimed ε", *(["true ε"] if known else []), "ε ≥, any", "ε ≥, Gaussian", "verdict"):
        table.add_column(name, justify="left" if name in ("audited", "verdict") else "right", no_wrap=name == "verdict")
    for name, sigma, claimed, true, least, fitted, verdict in _rows(report):
        table.add_row(name, sigma, claimed, *([true] if known else []), least, fitted, verdict)
    screen.print(table)
    for line in _lines(report):
        screen.print(line)
    first = report.audits[0]
    hold = "All lower bounds hold together" if report.confidence else "Each lower bound holds"
    screen.print(
        f"{hold} with confidence {report.confidence or first.confidence:g}, at δ = {first.claim.delta:g}. 'Gaussian' "
        "assumes that the noise is what it claims to be up to its size; 'any' (mechanism) and the verdict assume "
        "nothing. An audit can refute a claim, never prove one."
    )


def _rows(report: Report) -> list[tuple[str, str, str, str, str, str, Text]]:
    """Return the rows of the table, with the column of the true ε."""
    rows: list[tuple[str, str, str, str, str, str, Text]] = []
    for each in report.audits:
        true = "–" if each.true_epsilon is None else _up(each.true_epsilon)
        bounds = (f"{each.epsilon_any:.2f}", _number(each.epsilon_fitted))
        sigma, claimed = _sigma(each.noise_multiplier), _up(each.claim.epsilon)
        rows.append((each.name, sigma, claimed, true, *bounds, _verdict(each.refuted)))
    for run in report.one_runs:
        name, sigma = run.name.removeprefix("one training, "), _sigma(run.noise_multiplier)
        fitted = next((each.epsilon for each in run.bounds if each.name == "trade-off curve"), None)
        bounds = (f"{run.audited_epsilon:.2f}", _number(fitted))
        rows.append((name, sigma, _up(run.claimed_epsilon), "", *bounds, _verdict(run.refuted)))
    if report.checks:
        broken = any(each.refuted for each in report.checks)
        rows.append(
            (f"{len(report.checks)} checks of noise, lots, geometry, price", "", "", "", "", "", _verdict(broken))
        )
    if report.ledger is not None:
        printed = _up(report.ledger.printed_epsilon)
        rows.append(("its own ledger", "", printed, "", "–", "–", _verdict(report.ledger.refuted)))
    return rows


def _lines(report: Report) -> list[str]:
    """Return what is said below the table."""
    lines = []
    if report.ledger is not None and report.audits:
        lines.append(
            "The claim of a single release or small training is about two lots, at the σ beside it; that of the run is "
            f"its own ledger's, ε = {_up(report.ledger.printed_epsilon)}."
        )
    for check in report.checks:
        if check.refuted:
            lines.append(f"REFUTED, {check.name}: {check.finding} (p = {check.p_value:.2g}).")
    for run in report.one_runs:
        guessed = f"{run.correct} of {run.guesses} guesses about the {run.canaries} coins were right"
        lines.append(f"{run.name[0].upper()}{run.name[1:]}: {guessed}")
        lines += [
            f"  ε ≥ {each.epsilon:.2f} ({each.name}), assuming {each.assumes}; at {each.confidence:.1%} by itself"
            for each in run.bounds
        ]
        if run.curve_refuted:
            lines.append("  So many right guesses refute the claimed trade-off curve, whatever the mechanism.")
    for each in report.audits:
        if each.uncharged:
            lines.append(f"{each.name}: {each.uncharged} releases are not on the ledger")
    for attack in report.attacks:
        lines.append(
            f"Membership inference, {attack.name}: AUC {attack.area:.3f} (0.5 is chance), true positive rate "
            f"{attack.true_rate(0.001):.2%} at 0.1 % false positives"
        )
    return lines + [f"Note: {note}." for note in report.notes]


def _sigma(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _verdict(refuted: bool) -> Text:
    return Text("REFUTED", style="bold red") if refuted else Text("not refuted", style="green")


def _up(value: float) -> str:
    """Return a price, rounded up."""
    return "∞" if math.isinf(value) else f"{math.ceil(value * 100) / 100:.2f}"
