"""The number of records, as commands take it: private unless somebody says otherwise."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["DatasetSizeOption", "size_of"]

DatasetSizeOption = Annotated[
    str | None, typer.Option(help='A public number of records; "public" if the number in the data is no secret.')
]


def size_of(text: str | None) -> int | str | None:
    """Read ``--dataset-size``."""
    if text is None or text == "public":
        return text
    if not text.isdecimal():
        raise ValueError(f'--dataset-size must be a whole number or "public", got {text!r}')
    return int(text)
