"""Calibration: noise multiplier, steps or sample rate from a target (epsilon, delta) and the other two.

Every answer is confirmed by ``price`` on the fine grid and costs at most the target. The search runs on the
coarse grid, from where the central-limit approximation points; the fine grid is asked only near the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from dphero import _checks as checks
from dphero.accounting.accountants import price
from dphero.accounting.events.gaussian import PoissonGaussian
from dphero.accounting.ledger import Ledger
from dphero.accounting.numerics.curves import gaussian_mu
from dphero.accounting.numerics.search import largest_count, safe_value
from dphero.accounting.privacy_loss import MAX_STEPS

LEAST_NOISE, MOST_NOISE = 0.01, 1e6
LEAST_RATE = 1e-9
_TOLERANCE = 5e-4

_Number = TypeVar("_Number", int, float)


class CalibrationError(ValueError):
    """No value of the parameter meets the target; the message says what could be reached."""


def calibrate_noise_multiplier(
    epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "pld",
    *,
    besides: Ledger | None = None,
) -> float:
    """The smallest noise multiplier with which ``steps`` Poisson Gaussian steps stay within (epsilon, delta).

    Guarantee:
        ``price`` of the result, on the fine grid, is at most ``epsilon`` and within 0.05 % of it. The
        accountant must itself give bounds (all but ``gdp``) for this to be a privacy guarantee.

    Args:
        epsilon: The privacy loss allowed.
        delta: The probability left out of account.
        sample_rate: The probability with which an example enters a lot; 1 for no sampling.
        steps: How many releases are planned, at least 1.
        accountant: How to price.
        besides: Other releases on the same data, made or planned, that the target has to cover too.

    Raises:
        CalibrationError: If the target cannot be reached.
    """
    epsilon, delta = checks.epsilon(epsilon), checks.delta(delta)
    sample_rate, steps = checks.sample_rate(sample_rate), checks.whole("steps", steps)
    others = Ledger() if besides is None else besides

    def cost(noise_multiplier: float, coarse: bool) -> float:
        planned = others.with_event(PoissonGaussian(sample_rate, noise_multiplier), steps)
        return price(planned, delta, accountant, coarse=coarse).epsilon

    ratio = (gaussian_mu(epsilon, delta) / sample_rate) ** 2 / steps
    guess = (1 / math.log1p(ratio)) ** 0.5
    ends = {"safest": MOST_NOISE, "riskiest": LEAST_NOISE}
    found = safe_value(stages(cost, accountant), epsilon, guess, **ends, tolerance=_TOLERANCE)
    if found is None:
        best = cost(MOST_NOISE, False)
        rest = f", {others.steps} other releases included" if others.steps else ""
        raise CalibrationError(
            f"epsilon {epsilon:g} at delta {delta:g} is out of reach for {steps} steps at sample rate "
            f"{sample_rate:g} ({accountant}{rest}): even noise multiplier {MOST_NOISE:g} costs {best:.4g}; take "
            "fewer steps or allow more"
        )
    return found


def calibrate_sample_rate(
    epsilon: float, delta: float, noise_multiplier: float, steps: int, accountant: str = "pld"
) -> float:
    """The largest Poisson sample rate with which ``steps`` steps at this noise stay within (epsilon, delta).

    Arguments, guarantee and errors are those of ``calibrate_noise_multiplier``; 1.0 is returned when even the whole
    data set in every step is affordable.
    """
    epsilon, delta = checks.epsilon(epsilon), checks.delta(delta)
    noise_multiplier, steps = checks.noise_multiplier(noise_multiplier), checks.whole("steps", steps)

    def cost(sample_rate: float, coarse: bool) -> float:
        planned = Ledger().with_event(PoissonGaussian(sample_rate, noise_multiplier), steps)
        return price(planned, delta, accountant, coarse=coarse).epsilon

    guess = gaussian_mu(epsilon, delta) / (_unsampled_mu(noise_multiplier) * math.sqrt(steps))
    found = safe_value(stages(cost, accountant), epsilon, guess, safest=LEAST_RATE, riskiest=1.0, tolerance=_TOLERANCE)
    if found is None:
        best = cost(LEAST_RATE, False)
        raise CalibrationError(
            f"epsilon {epsilon:g} at delta {delta:g} is out of reach for {steps} steps at noise multiplier "
            f"{noise_multiplier:g} ({accountant}): even sample rate {LEAST_RATE:g} costs {best:.4g}; add "
            "noise, take fewer steps or allow more"
        )
    return found


def calibrate_steps(
    epsilon: float, delta: float, sample_rate: float, noise_multiplier: float, accountant: str = "pld"
) -> int:
    """The largest number of Poisson Gaussian steps within (epsilon, delta).

    Arguments as those of ``calibrate_noise_multiplier``.

    Guarantee:
        Exact on the fine grid: the result costs at most ``epsilon``, one step more costs more (or would pass
        ``MAX_STEPS``, where the search ends).

    Raises:
        CalibrationError: If not even one step is affordable.
    """
    epsilon, delta = checks.epsilon(epsilon), checks.delta(delta)
    event = PoissonGaussian(sample_rate, noise_multiplier)

    def cost(steps: int, coarse: bool) -> float:
        return price(Ledger().with_event(event, steps), delta, accountant, coarse=coarse).epsilon

    mu = event.sample_rate * _unsampled_mu(event.noise_multiplier)
    guess = int(min((gaussian_mu(epsilon, delta) / mu) ** 2, MAX_STEPS))
    steps = largest_count(stages(cost, accountant), epsilon, guess, MAX_STEPS)
    if steps == 0:
        raise CalibrationError(
            f"epsilon {epsilon:g} at delta {delta:g} is out of reach at sample rate {event.sample_rate:g} "
            f"and noise multiplier {event.noise_multiplier:g} ({accountant}): one step alone costs "
            f"{cost(1, False):.4g}; add noise, sample less or allow more"
        )
    return steps


def stages(cost: Callable[[_Number, bool], float], accountant: str) -> list[Callable[[_Number], float]]:
    """``cost(value, coarse)`` in rising precision: on the coarse grid, if there is one, then on the fine.

    A coarse price is never below the fine one, so what is safe on the coarse grid is safe.
    """
    if accountant != "pld":
        return [lambda value: cost(value, False)]
    return [lambda value: cost(value, True), lambda value: cost(value, False)]


def _unsampled_mu(noise_multiplier: float) -> float:
    """``sqrt(e^(1/sigma^2) - 1)``, the central limit's mu of a step per unit of sample rate, kept finite."""
    return math.sqrt(math.expm1(min(noise_multiplier**-2, 700.0)))
