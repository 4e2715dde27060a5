"""How DP-MP's noise decays from epoch to epoch.

Schedules (e counts epochs from 0; numbers as in the published code):

===============  ========================================  ==============================
``constant``     σ₀
``time``         σ₀ / (1 + k e)                            k = 0.0281
``exponential``  σ₀ exp(−k e)                              k = 0.0138
``step``         σ₀ k^⌊e / period⌋                         k = 0.7008, period 10
``polynomial``   (σ₀ − σ_end)(1 − e/E)^k + σ_end           k = 3.53, σ_end = σ₀ / 5
``validation``   σ ← k σ when accuracy has stopped rising  k = 0.9
===============  ========================================  ==============================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from dphero.accounting import CalibrationError
from dphero.accounting.numerics.search import safe_value

Schedule = Literal["constant", "time", "exponential", "step", "polynomial", "validation"]

DECAYS: Mapping[str, float] = {
    "constant": 1.0,
    "time": 0.0281,
    "exponential": 0.0138,
    "step": 0.7008,
    "polynomial": 3.53,
    "validation": 0.9,
}
_END = 0.2  # σ_end / σ₀ of the polynomial


def relative_noise(schedule: str, decay: float, period: int, epochs: int) -> list[float]:
    """Return σ_e / σ₀ for every epoch of a schedule that is known in advance."""
    rules: dict[str, Callable[[int], float]] = {
        "constant": lambda e: 1.0,
        "time": lambda e: 1 / (1 + decay * e),
        "exponential": lambda e: math.exp(-decay * e),
        "step": lambda e: decay ** (e // period),
        "polynomial": lambda e: (1 - _END) * (1 - e / epochs) ** decay + _END,
    }
    return [rules[schedule](e) for e in range(epochs)]


def within(epsilon: float, cost: Callable[[float], float], *, safest: float, riskiest: float, what: str) -> float:
    """Return the value that uses (nearly) all of ε, or say that there is none."""
    found = safe_value([cost], epsilon, 1.0, safest=safest, riskiest=riskiest, tolerance=5e-4)
    if found is None:
        raise CalibrationError(f"epsilon {epsilon:g} is out of reach: even {what} {safest:g} costs {cost(safest):.4g}")
    return found
