"""Where in the model's own code something happens."""

from __future__ import annotations

import os
import sys
from types import CodeType

import torch

__all__ = ["Place", "place_in_code"]

Place = tuple[int, int] | None
"""Which code, and where in it."""

_HERE = os.path.dirname(__file__)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_RULES = os.path.join(_HERE, "layers") + os.sep
_OURS = {os.path.join(_HERE, f"{name}.py") for name in ("meetings", "operation", "readings", "shared", "sites", "taps")}
_internal: dict[str, bool] = {}
_codes: dict[int, CodeType] = {}
"""Kept, so that no other code is ever known by the same number."""


def place_in_code(outermost: CodeType) -> Place:
    """Return the innermost place in code that is neither torch's nor the taps'; ``None`` where there is none.

    Args:
        outermost: Where to stop looking.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        name = frame.f_code.co_filename
        internal = _internal.get(name)
        if internal is None:
            internal = _internal[name] = name in _OURS or name.startswith((_TORCH, _RULES))
        if not internal:
            number = id(frame.f_code)
            _codes.setdefault(number, frame.f_code)
            return number, frame.f_lasti
        frame = frame.f_back  # type: ignore[assignment]
    return None
