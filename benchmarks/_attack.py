"""What an attack on a claim is: run once with its guard taken away, once as dphero is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True)
class Attack:
    """One thing that a user may do, and that once made a printed ε false.

    Attributes:
        name: A few words.
        what: What the user does, in one sentence.
        before: Runs it with the guard taken away; returns figures such as ``{"claimed": 4.38, "audited": 31.0}``.
        after: Runs it as dphero is; returns figures, or ``{"refused": message}``.
    """

    name: str
    what: str
    before: Callable[[], Figures]
    after: Callable[[], Figures]


def refused(function: Callable[[], Any]) -> Figures:
    """Return the message with which a function is refused, or what it returned if it was not."""
    try:
        returned = function()
    except (ValueError, RuntimeError) as error:
        return {"refused": str(error).splitlines()[0]}
    return returned if isinstance(returned, dict) else {"accepted": True}
