"""What all commands share: how errors are shown, and the version."""

from __future__ import annotations

import codecs
import importlib.metadata
import io
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

import dphero
from dphero._imports import FAILED_IN
from dphero.cli._console import say

_UsageError: Any = typer.BadParameter.__base__  # click's, or that of typer's own copy of click, which newer ones have


_SPELT_OUT = {"ε": "epsilon", "δ": "delta", "σ": "sigma", "∞": "inf", "±": "+-", "≤": "<=", "≥": ">=", "·": "*"}


def _spell_out(error: UnicodeError) -> tuple[str, int]:
    """Write what a terminal has no letter for in those it has: a price is better printed oddly than not at all."""
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    return "".join(_SPELT_OUT.get(letter) or _without_accent(letter) for letter in letters), error.end


def _without_accent(letter: str) -> str:
    return unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode() or "?"


codecs.register_error("dphero", _spell_out)


class ErrorsInWords(TyperGroup):
    """Shows wrong usage, and what the library refuses, in words on stderr, with exit code 2 and without a traceback.

    That is one line, ``dphero: error: …``; further lines of a message (a list, say) are indented below it.
    """

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **options: Any) -> Any:
        """Run the command line and leave the process."""
        options["standalone_mode"] = False
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="dphero")
        try:
            status = super().main(args, prog_name, *rest, **options)
        except _UsageError as error:
            _fail(error.format_message())
        except typer.Abort:
            _fail("interrupted", status=130)
        except (ValueError, OSError) as error:
            _fail(str(error))
        except MemoryError as error:
            _fail(f"there is not enough memory: {error}")
        except RecursionError:
            _fail("something is nested too deeply: brackets in a file, or folders in a path")
        except ArithmeticError as error:
            _fail(f"a number is too large or too small to compute with: {error}")
        except ImportError as error:
            if "pip install" in str(error):
                _fail(str(error))
            if not isinstance(error, ModuleNotFoundError):  # a package that is broken: where, is of use
                raise
            _fail(f"{error}: {_way_to_get(error.name or '')}")
        except Exception as error:
            notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(FAILED_IN)]
            if not notes:
                raise
            _fail(f"{type(error).__name__}: {error}; {notes[0]}")
        sys.exit(status if isinstance(status, int) else 0)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command; Ctrl-C, where the command says nothing of it itself, is named."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Abort from error


def _fail(message: str, status: int = 2) -> NoReturn:
    first, *more = [" ".join(line.split()) for line in message.splitlines() if line.strip()] or [""]
    say("\n  ".join([f"dphero: error: {first}", *more]))
    sys.exit(status)


_EXTRAS = {
    "sklearn": "demo",
    "safetensors": "experiments",
    "PIL": "experiments",
    "matplotlib": "experiments",
    "tensorboard": "experiments",
    "captum": "explain",
    "flwr": "federated",
    "ray": "ray",
    "plotly": "report",
}


def _way_to_get(module: str) -> str:
    """Return how to get a module that is missing: an extra of dphero, or whatever has it."""
    extra = _EXTRAS.get(module.partition(".")[0])
    return f"pip install 'dphero[{extra}]'" if extra else "install the package that has it"


def version(wanted: bool) -> None:
    """Print the installed version and stop, if it is wanted."""
    if not wanted:
        return
    try:
        number = importlib.metadata.version("dphero")
    except importlib.metadata.PackageNotFoundError:
        number = dphero.__version__
    typer.echo(f"dphero {number}")
    raise typer.Exit
