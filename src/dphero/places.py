"""Where in the model's own code something happens."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch

__all__ = ["Place", "place_in_code"]

Position = tuple[int | None, int | None, int | None, int | None]
Place = tuple[tuple[int, Position], ...]
"""From the inside out: which code, and where in its source: from which line and column to which.

One line may hold several calls. The number of the instruction would not do: Python 3.11 calls a function by another one
once it is called often.
"""

_HERE = os.path.dirname(__file__)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_RULES = os.path.join(_HERE, "layers") + os.sep
_OURS = {os.path.join(_HERE, f"{name}.py") for name in ("meetings", "operation", "readings", "shared", "sites", "taps")}
_internal: dict[str, bool] = {}
_codes: dict[int, tuple[CodeType, list[Position]]] = {}
"""By its number: a code, kept so that no other is ever known by that number, and the positions of its instructions."""


def place_in_code(outermost: CodeType) -> Place:
    """Return where we are in code that is neither torch's nor the taps': the calls that led here.

    Args:
        outermost: Where to stop looking.
    """
    place: list[tuple[int, Position]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        code = frame.f_code
        internal = _internal.get(code.co_filename)
        if internal is None:
            name = code.co_filename
            internal = _internal[name] = name in _OURS or name.startswith((_TORCH, _RULES))
        if not internal:
            number = id(code)
            if number not in _codes:
                _codes[number] = (code, list(code.co_positions()))
            place.append((number, _codes[number][1][frame.f_lasti // 2]))
        frame = frame.f_back
    return tuple(place)
