"""The command line. One file per command: each module here without a leading underscore adds itself.

A command module defines ``register(app)``. It imports at its top only what is quick, and everything heavy
(torch, the accountants) inside the command.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Annotated

import typer

from dphero.cli._app import OneLineErrors, version

app = typer.Typer(
    name="dphero",
    cls=OneLineErrors,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _dphero(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models with differential privacy, and know what it costs."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    if not _module.startswith("_"):
        import_module(f"{__name__}.{_module}").register(app)
