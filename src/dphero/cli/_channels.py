"""The channels of images in a folder, as commands take them: declared, not read off the data."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["ChannelsOption"]

ChannelsOption = Annotated[
    int | None,
    typer.Option(help="Of the images in a folder: 3 (RGB, unless given) or 1 (grey). Public: it shapes the network."),
]
