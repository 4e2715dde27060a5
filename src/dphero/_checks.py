"""Checks of what users hand in: each returns the value, or says what is wrong and what to do. No torch here."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, SupportsFloat

_MOST_NOISE = 1e50  # beyond it, or below its inverse, squares and exponentials overflow


def positive(name: str, value: Any) -> float:
    """Return a positive, finite number; raise ``ValueError`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """Return a whole number of at least ``least``; floats and booleans are refused rather than rounded."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def whole_or_auto(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is a whole number of at least 1, the word ``auto``, or ``None``."""
    if isinstance(value, str) and value != "auto":
        raise ValueError(f'{name} must be a whole number of at least 1, or "auto", got {value!r}')
    if value is not None and value != "auto":
        whole(name, value)


def one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def closest(name: str, known: Iterable[str], otherwise: str, *, cutoff: float = 0.6) -> str:
    """Return the hint for a name that is unknown: the known one that looks most like it, else ``otherwise``."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else otherwise


def number(
    name: str,
    value: SupportsFloat,
    advice: str,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> float:
    """Return ``value`` as a float; refuse what is not a finite number within the bounds."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}: {advice}") from None
    if not math.isfinite(found):
        raise ValueError(f"{name} must be finite, got {found}: {advice}")
    if not (above < found < below and least <= found <= most):
        bounds = {"above": above, "at least": least, "below": below, "at most": most}
        said = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))
        raise ValueError(f"{name} must be {said}, got {found}: {advice}")
    return found


def noise_multiplier(value: SupportsFloat, *, zero_allowed: bool = False) -> float:
    """A noise multiplier: positive, or zero where an event may have released something without noise."""
    advice = "give the noise's standard deviation divided by the clip bound, for example 1.0 (no noise is no privacy)"
    bound = {"least": 0.0} if zero_allowed else {"above": 0.0}
    found = number("noise_multiplier", value, advice, **bound)
    if found > _MOST_NOISE or (found < 1 / _MOST_NOISE and not zero_allowed):
        raise ValueError(f"noise_multiplier is beyond what can be computed with, got {found}: {advice}")
    return found


def sample_rate(value: SupportsFloat) -> float:
    """A sampling probability in (0, 1]."""
    advice = "give the expected lot size divided by the number of examples, for example 256 / 60000"
    return number("sample_rate", value, advice, above=0, most=1)


def delta(value: SupportsFloat) -> float:
    """A failure probability in (0, 1)."""
    advice = "give a probability well below one over the number of examples, for example 1e-5"
    return number("delta", value, advice, above=0, below=1)


def epsilon(value: SupportsFloat) -> float:
    """A target epsilon: positive and finite."""
    return number("epsilon", value, "give the privacy loss that you allow, for example 3.0", above=0)
