"""``--trust``: whether code that a file names may be run."""

from __future__ import annotations

from typing import Annotated

import typer

TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import and run the code (package:function) that a recipe or run directory names: not a stranger's.",
    ),
]
