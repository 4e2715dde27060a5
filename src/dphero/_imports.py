"""``package.module:function``: how data and networks of the user's own are named."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

FAILED_IN = "this happened in "
"""Begins the note on an exception of a user's own function."""


def names_code(spec: object) -> bool:
    """Whether a text is the name of a function, ``package.module:function``: to use it is to import and run it."""
    if not isinstance(spec, str):
        return False
    path, colon, name = spec.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*path.split("."), name))


def call_named(spec: str, kind: str, *arguments: Any) -> Any:
    """Call the function that ``package.module:function`` names, and return what it returns.

    Raises:
        ValueError: If there is no such function, it does not take these arguments, or it ends the process. What else
            the function raises comes through as it is, with a note that begins with ``FAILED_IN``.
    """
    function = function_named(spec, kind)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        plain = all(isinstance(each, int | float | str | tuple) for each in arguments)
        given = f"{len(arguments)} arguments" if arguments else "no arguments"
        given += f" ({', '.join(map(repr, arguments))})" if arguments and plain else ""
        raise ValueError(
            f"{kind} {spec!r}: the function is called with {given}, and does not take them: {error}"
        ) from None
    except ValueError:
        pass  # some functions written in C do not tell
    try:
        return function(*arguments)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # not inside the function
            raise ValueError(f"{kind} {spec!r} cannot be called so: {error}") from error
        error.add_note(f"{FAILED_IN}{kind} {spec!r}{_place(error)}")
        raise
    except SystemExit as error:
        raise ValueError(f"{kind} {spec!r}: the function ended the process instead of returning something") from error
    except Exception as error:
        error.add_note(f"{FAILED_IN}{kind} {spec!r}{_place(error)}")
        raise


def _place(error: BaseException) -> str:
    """Where in the function it happened."""
    trace, last = error.__traceback__, None
    while trace is not None and trace.tb_next is not None:
        trace = last = trace.tb_next
    return f" ({last.tb_frame.f_code.co_filename}, line {last.tb_lineno})" if last is not None else ""


def function_named(spec: str, kind: str) -> Callable[..., Any]:
    """Return the function that ``package.module:function`` names; ``kind`` says what it is for, and begins errors.

    The module is looked for in the working directory, and as Python does.

    Raises:
        ValueError: If there is no such module or function.
    """
    path, _, name = spec.partition(":")
    if not all(part.isidentifier() for part in path.split(".")) or not name.isidentifier():
        raise ValueError(f"{kind}: a function of your own is given as package.module:function, not {spec!r}")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # it exists, and lacks something itself
        raise ValueError(
            f"{kind} {spec!r}: there is no module {path!r}, neither installed nor in {here}. Install it, or put its "
            "folder on PYTHONPATH"
        ) from error
    finally:
        sys.path.remove(here)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{kind} {spec!r}: {path} has no function {name!r}")
    return function
