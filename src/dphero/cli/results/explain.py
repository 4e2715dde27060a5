"""``dphero explain``: heat maps of runs, and numbers on how far privacy moves them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box

from dphero.cli._console import console, say, table
from dphero.cli._options import JsonOption, TrustOption, folder, numbers_of
from dphero.cli._progress import ProgressDisplay

if TYPE_CHECKING:
    from dphero.explain import Explanation


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain)


def explain(
    runs: Annotated[list[Path], typer.Argument(help="Directories of finished runs, or of comparisons.")],
    images: Annotated[
        str | None,
        typer.Option(
            help="Public images: a built-in data set (its test images), test (those of the run's own data), or a file "
            "or folder. Unless given, the test images of the run's data, if that is built in."
        ),
    ] = None,
    per_class: Annotated[int, typer.Option(min=1, help="Images of each class that are scored.")] = 10,
    shown: Annotated[int, typer.Option(min=1, max=30, help="Images that are drawn.")] = 6,
    epochs: Annotated[
        str | None, typer.Option(help="Kept epochs to look at, separated by commas; all that every run has kept.")
    ] = None,
    layer: Annotated[str | None, typer.Option(help="Whose feature maps; the last convolution's unless given.")] = None,
    private_images_unprotected: Annotated[
        bool,
        typer.Option(
            "--private-images-unprotected",
            help="Consent to show training images (--images train): a release that no ε covers.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", parser=folder, metavar="FOLDER", help="Where to write; RUN/explain for one RUN."),
    ] = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what networks look at, by Grad-CAM heat maps of public images, and how far privacy moves that.

    Give runs with and without privacy, several seeds of each: what privacy changes is told beside what another seed
    changes. Runs that were trained with --keep-epochs are also compared during their training.
    """
    place, epoch_numbers = _place(runs, out), numbers_of("epochs", epochs)
    from dphero.experiments.runs.files import to_json
    from dphero.explain import explain as find

    with ProgressDisplay("Reading") as display:
        found = find(
            [*runs],
            images=images,
            per_class=per_class,
            epochs=epoch_numbers,
            layer=layer,
            private_images_unprotected=private_images_unprotected,
            trust=trust,
            note=lambda what, done, total: display.update(what, done, total),
        )
        files = found.save(place, shown)
    if found.numbers["stamp"]:
        say(f"dphero: {found.numbers['stamp']}")
    if as_json:
        typer.echo(to_json({"out": str(place), "files": [each.name for each in files], **found.numbers}))
    else:
        _show(found, files)


def _place(runs: list[Path], out: Path | None) -> Path:
    if out is None and len(runs) > 1:
        raise ValueError("where to? With several runs, give -o FOLDER for what explains them together")
    return runs[0] / "explain" if out is None else out


def _show(found: Explanation, files: list[Path]) -> None:
    """Print the outcome for people, within 80 columns."""
    numbers, screen = found.numbers, console()
    screen.print(f"{numbers['images']['count']} images ({numbers['images']['source']}), at the end of each training:")
    shown = table("training", "accuracy", "Spearman", "IoU top 20 %", "faithful")
    shown.box = box.SIMPLE_HEAD  # narrow enough for 80 columns
    for group, rows in _by_group(numbers).items():
        shown.add_row(group.replace(" (", "\n("), *rows)
    screen.print(shown)
    reference = numbers["reference"]
    if reference is None:
        screen.print("No run without privacy was given: add some (--method sgd) to see what privacy changes.")
    else:
        screen.print(f"Spearman and IoU: agreement with the maps of {reference}; lowest to highest pair of runs.")
        for group in dict.fromkeys(each["group"] for each in numbers["verdicts"]):
            mine = {each["score"]: each["verdict"] for each in numbers["verdicts"] if each["group"] == group}
            same = len(set(mine.values())) == 1
            words = [mine["spearman"]] if same else [f"by {name}, {verdict}" for name, verdict in mine.items()]
            screen.print(f"{group}: {'; '.join(words)}.")
    screen.print(f"Pictures and numbers are in {files[0].parent}: {', '.join(each.name for each in files)}.")


def _by_group(numbers: dict[str, Any]) -> dict[str, list[str]]:
    """Return the cells of each group's row."""
    last = [each for each in numbers["agreement"] if each["epoch"] == each["to"] == "last"]
    found = {}
    names = [*dict.fromkeys(run["group"] for run in numbers["runs"]), "random weights"]
    for group in names:
        runs = {run["name"] for run in numbers["runs"] if run["group"] == group}
        facts = [
            each
            for each in numbers["maps"]
            if each["epoch"] == "last" and (each["run"] in runs or (not runs and each["run"].startswith(group)))
        ]
        pair = {group, numbers["reference"]}
        agreed: dict[str, Any] = next((each for each in last if {each["a"], each["b"]} == pair), {})
        accuracies = [each["accuracy"] for each in facts if each["accuracy"] is not None]
        faithful = [each["faithfulness"] for each in facts if each["faithfulness"] is not None]
        found[group] = [
            f"{sum(accuracies) / len(accuracies):.1%}" if accuracies else "–",
            _range(agreed.get("spearman")),
            _range(agreed.get("iou")),
            f"{sum(faithful) / len(faithful):+.3f}" if faithful else "–",
        ]
    return found


def _range(value: dict[str, float | None] | None) -> str:
    if not value or value["mean"] is None:
        return "–"
    one = value["low"] == value["high"]
    return f"{value['mean']:.2f}" if one else f"{value['mean']:.2f} ({value['low']:.2f}–{value['high']:.2f})"
