"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

_DEEPEST = 200


def size_of(text: str | None, option: str = "dataset-size", word: str = "public") -> int | str | None:
    """Read ``--dataset-size``: a whole number, or the word ``public``; or another option, with a word of its own."""
    if text is None or text == word:
        return text
    if not text.isdecimal():
        raise ValueError(f'--{option} must be a whole number or "{word}", got {text!r}')
    return int(text)


def values_of(given: list[str] | None) -> dict[str, Any]:
    """Read ``--set NAME=VALUE`` pairs: a value is a number, true, false, a list, or text."""
    found: dict[str, Any] = {}
    for pair in given or []:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"--set takes NAME=VALUE, got {pair!r}")
        words = {"true": True, "false": False}
        try:
            found[name] = words[text] if text in words else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def numbers_of(option: str, text: str | None) -> list[float] | None:
    """Read numbers that are separated by commas."""
    if text is None:
        return None
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"--{option} takes numbers separated by commas, such as 1,2,5, got {text!r}") from None


def folder(text: str | Path) -> Path:
    """Read the name of a folder; an empty one, which would be the working directory, is refused, and one too deep."""
    if not str(text).strip():
        raise typer.BadParameter("it is empty: name a folder, or . for the working directory")
    if str(text).startswith("--"):
        raise typer.BadParameter(f"{str(text)!r} looks like an option: write ./{text} if it is a folder")
    path = Path(text)
    if len(path.parts) > _DEEPEST:
        raise typer.BadParameter(f"it has {len(path.parts)} parts: folders lie at most {_DEEPEST} deep here")
    return path


# -- what is trained, and how ------------------------------------------------------------------------------

DataOption = Annotated[
    str | None, typer.Option(help="A data set (dphero data list), package:function, a folder of images, or .npz.")
]
ChannelsOption = Annotated[
    int | None,
    typer.Option(help="Of the images in a folder: 3 (RGB, unless given) or 1 (grey). Public: it shapes the network."),
]
DatasetSizeOption = Annotated[
    str | None, typer.Option(help='A public number of records; "public" if the number in the data is no secret.')
]
ModelOption = Annotated[str | None, typer.Option(help="A network by name, or package:function.")]
MethodOption = Annotated[str | None, typer.Option(help="How to train (dphero methods); dp-hero unless given.")]
LotOption = Annotated[int | None, typer.Option(help="Expected examples in a step.")]
PhysicalBatchOption = Annotated[
    str | None, typer.Option(help="The most examples in memory at a time; auto: as many as fit on the GPU.")
]
EpochsOption = Annotated[float | None, typer.Option(help="Passes over the data.")]
LearningRateOption = Annotated[float | None, typer.Option(help="Learning rate.")]
ClipOption = Annotated[float | None, typer.Option(help="Clip norm.")]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An option of the method; may be repeated.")
]

# -- its privacy ---------------------------------------------------------------------------------------------

Accountant = Literal["pld", "rdp", "zcdp", "gdp"]
AccountantOption = Annotated[Accountant | None, typer.Option(help="How to price.")]
EpsilonOption = Annotated[float | None, typer.Option(help="The privacy loss allowed; the noise follows.")]
NoiseOption = Annotated[float | None, typer.Option(help="The noise; the privacy loss follows.")]
DeltaOption = Annotated[float | None, typer.Option(help="The probability left out of account.")]
SeedOption = Annotated[
    int | None, typer.Option(min=0, help="Make the run repeatable; privacy then rests on keeping the seed secret.")
]
SecureOption = Annotated[
    bool | None, typer.Option("--secure", help="Noise and lots from a cryptographic generator.", show_default=False)
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import and run the code (package:function) that a recipe or run directory names: not a stranger's.",
    ),
]

# -- where it goes -------------------------------------------------------------------------------------------

OutOption = Annotated[
    Path | None,
    typer.Option(parser=folder, metavar="FOLDER", help="Where to keep the run; a new folder under runs/ unless given."),
]
ResumeOption = Annotated[
    Path | None, typer.Option(parser=folder, metavar="FOLDER", help="Go on with a run that was stopped.")
]
WorkersOption = Annotated[int | None, typer.Option(min=1, help="Runs at a time; by cores and GPU unless given.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
