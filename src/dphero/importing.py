"""``package.module:function``: how data and networks of the user's own are named."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["function_named", "names_code"]


def names_code(spec: object) -> bool:
    """Whether a text is the name of a function, ``package.module:function``: to use it is to import and run it."""
    if not isinstance(spec, str):
        return False
    path, colon, name = spec.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*path.split("."), name))


def function_named(spec: str, kind: str) -> Callable[..., Any]:
    """Return the function that ``package.module:function`` names.

    The module is looked for in the working directory, and as Python does.

    Args:
        spec: The name.
        kind: What the function is for, in a word; errors begin with it.

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
