"""``dphero predict``: use the model of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dphero.cli._console import console, table
from dphero.cli._options import JsonOption, TrustOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("predict")(predict)


def predict(
    run: Annotated[Path, typer.Argument(help="Directory of a finished run.")],
    file: Annotated[Path, typer.Argument(help="An image, a folder of images, an .npy or .npz array, or an idx file.")],
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let a trained model say what it sees, with the probability that it gives."""
    from dphero.experiments.runs.files import to_json
    from dphero.experiments.runs.prediction import Predictor

    predictor = Predictor(run, trust=trust)
    found = predictor.predict(file)
    if as_json:
        predictions = [
            {"input": each.name, "class": each.label, "probability": each.probability, "converted": each.converted}
            for each in found
        ]
        typer.echo(to_json({"run": str(run), "classes": predictor.classes, "predictions": predictions}))
        return
    headings = ["input", "class", "probability"]
    converted = any(each.converted for each in found)
    shown = table(*headings, *(["converted"] if converted else []))
    for each in found:
        row = [each.name, each.label, f"{each.probability:.1%}"]
        shown.add_row(*row, *([each.converted] if converted else []))
    console().print(shown)
