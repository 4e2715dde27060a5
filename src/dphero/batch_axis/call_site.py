"""Where in the model's own code something happens."""

from __future__ import annotations

import dis
import os
import sys
from types import CodeType, FrameType

import torch

CallSite = tuple[tuple[int, int], ...]
"""From the inside out: which code, and which of its instructions.

A line may hold several calls, and a code need not know its columns (``python -X no_debug_ranges``).
"""

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = tuple(os.path.join(_PACKAGE, folder) + os.sep for folder in ("functional", "hooks", "layers"))
_internal: dict[str, bool] = {}
_codes: dict[int, tuple[CodeType, list[int]]] = {}
"""By its number: a code, kept so that no other is ever known by that number, and its :func:`_instructions`."""


def find_call_site(outermost: CodeType) -> CallSite:
    """Return where we are in code that is neither torch's nor the taps': the calls that led here from ``outermost``."""
    place: list[tuple[int, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        code = frame.f_code
        internal = _internal.get(code.co_filename)
        if internal is None:
            name = code.co_filename
            internal = _internal[name] = name.startswith((_TORCH, *_OURS))
        if not internal:
            number = id(code)
            if number not in _codes:
                _codes[number] = (code, _instructions(code))
            place.append((number, _codes[number][1][frame.f_lasti // 2]))
        frame = frame.f_back
    return tuple(place)


def _instructions(code: CodeType) -> list[int]:
    """Return, for each unit of a code, which instruction it belongs to.

    An instruction is a unit, and some behind it may be its own. While a function that it calls is running, Python is at
    any of these, depending on how often it was called. Python 3.11 calls by two instructions, which count as one.
    """
    names = {each.offset // 2: each.opname for each in dis.get_instructions(code)}
    found, previous = list[int](), ""
    for unit in range(len(code.co_code) // 2):
        name = names.get(unit)
        found.append(unit if name is not None and previous != "PRECALL" else found[-1])
        previous = previous if name is None else name
    return found
