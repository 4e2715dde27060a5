"""One step of noisy gradient descent with a private line search: a Gaussian release, then a sparse-vector test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dphero import _checks as checks
from dphero.accounting.events.base import POISSON, Event
from dphero.accounting.numerics.curves import poisson_gaussian_rdp


@dataclass(frozen=True)
class LineSearchStep(Event, kind="line_search_step"):
    """A Gaussian release on one Poisson lot and a sparse-vector search on *another*, drawn independently.

    Guarantee: given the earlier outputs, the two releases compose, since their lots are independent: the divergences
    add. (On one and the same lot they would not: a mechanism that sees the lot twice is amplified once.) The noise
    multiplier may depend on earlier outputs, so only a Rényi filter covers a run. ``search_epsilon = 0``: no search.
    """

    sample_rate: float
    noise_multiplier: float
    search_epsilon: float

    title: ClassVar[str] = "Gaussian noise on Poisson lots, and step sizes found by the sparse vector technique"
    sampling: ClassVar[str] = f"{POISSON} Gradient and search draw lots of their own."
    adaptive: ClassVar[bool] = True

    _checks: ClassVar = {
        "sample_rate": checks.sample_rate,
        "noise_multiplier": checks.noise_multiplier,
        "search_epsilon": partial(
            checks.number, "search_epsilon", advice="give the ε of one search, or 0 for none", least=0
        ),
    }

    def rdp(self, orders: Sequence[float]) -> NDArray[np.float64] | None:
        """The sum of the sampled Gaussian's and the sampled search's divergences."""
        gaussian = poisson_gaussian_rdp(self.sample_rate, self.noise_multiplier, orders)
        return gaussian + poisson_pure_rdp(self.sample_rate, self.search_epsilon, orders)


def poisson_pure_rdp(sample_rate: float, epsilon: float, orders: Sequence[float]) -> NDArray[np.float64]:
    """Rényi divergences of a Poisson-sampled mechanism of which only ``epsilon``-differential privacy is known.

    Every pair of laws ``(P, Q)`` within a factor ``e^epsilon`` is a post-processing of randomised response,
    ``(b, a)`` and ``(a, b)`` with ``b/a = e^epsilon`` (Kairouz, Oh and Viswanath 2015), and then ``((1-q) Q + q P,
    Q)`` is one of the sampled randomised response. So the worst case has two outcomes, and its divergences are exact
    sums, in either direction.
    """
    alphas = np.asarray(orders, dtype=np.float64)
    if epsilon == 0:
        return np.zeros(len(alphas))
    log_law = -np.log1p(np.exp(np.array([epsilon, -epsilon])))  # of Q: the outcome that P favours is the rarer one
    log_ratio = np.log1p(sample_rate * np.expm1(np.array([epsilon, -epsilon])))  # of the mixture to Q
    curves = [_log_mean_power(log_law, log_ratio, powers) / (alphas - 1) for powers in (alphas, 1 - alphas)]
    return np.maximum(*curves)


def _log_mean_power(
    log_law: NDArray[np.float64], log_ratio: NDArray[np.float64], powers: NDArray[np.float64]
) -> NDArray[np.float64]:
    """``ln sum_j law_j ratio_j^power``, also where it is next to 0 and where the power overflows."""
    exponents = np.multiply.outer(powers, log_ratio)
    near = np.log1p((np.exp(log_law) * np.expm1(np.minimum(exponents, 1.0))).sum(-1))
    far = np.logaddexp(exponents[:, 0] + log_law[0], exponents[:, 1] + log_law[1])
    return np.where(np.abs(exponents).max(-1) < 1, near, far)
