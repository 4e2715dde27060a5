"""The command line. One file per command: each module in these rooms without a leading underscore adds itself.

A command module defines ``register(app)``. It imports at its top only what is quick, and everything heavy
(torch, the accountants) inside the command.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Annotated

import typer

from dphero.cli._app import ErrorsInWords, version

app = typer.Typer(
    name="dphero",
    cls=ErrorsInWords,
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


_names = [module.name for module in pkgutil.walk_packages(__path__, prefix=f"{__name__}.") if not module.ispkg]
for _name in sorted(_names, key=lambda name: name.rpartition(".")[2]):
    if not _name.rpartition(".")[2].startswith("_"):
        import_module(_name).register(app)
