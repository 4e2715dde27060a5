"""Folders that are named on the command line."""

from __future__ import annotations

from pathlib import Path

import typer

__all__ = ["folder"]

_DEEPEST = 200


def folder(text: str | Path) -> Path:
    """Return the path; an empty one, which would be the working directory, is refused, and one of absurd depth."""
    if not str(text).strip():
        raise typer.BadParameter("it is empty: name a folder, or . for the working directory")
    if str(text).startswith("--"):
        raise typer.BadParameter(f"{str(text)!r} looks like an option: write ./{text} if it is a folder")
    path = Path(text)
    if len(path.parts) > _DEEPEST:
        raise typer.BadParameter(f"it has {len(path.parts)} parts: folders lie at most {_DEEPEST} deep here")
    return path
