"""Quantised sums with Student-t noise: divergences evaluated numerically, since no closed form exists.

One release is ``sum_i c_i + s t``: every example's code word ``c_i`` has coordinates that are whole multiples of a
public spacing and a norm of at most the clip bound (here 1); ``t`` has independent Student-t coordinates. An
example's presence shifts the law by its code word. For a product law the logarithms of the moments add up over
coordinates::

    ln E_Q[(P/Q)^k] = sum_j h_k(c_j),    h_k(v) = ln E[(t(X - v) / t(X))^k]

Student-t noise is not rotation invariant, so the norm of ``c`` alone does not tell this sum. But since the squares of
the coordinates add up to at most 1, it is at most ``max_v h_k(v) / v^2`` over the finitely many values ``v`` that a
coordinate can have: that bound is what is charged. The density is symmetric, so Poisson sampling is priced by
:mod:`dphero.accounting.numerics.sampled_rdp`, in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from dphero import _checks as checks
from dphero.accounting.events.base import POISSON, Event
from dphero.accounting.numerics.sampled_rdp import poisson_divergence

LARGEST_ORDER = 128
_SAFETY = 1 + 1e-6  # far above the error of the quadrature


@dataclass(frozen=True)
class PoissonStudentT(Event, kind="poisson_student_t"):
    """Student-t noise on the quantised sum of a Poisson lot, in units of the clip norm.

    Guarantee: under add-or-remove, the divergence at every whole order up to 128 is at most what :meth:`rdp` says, for
    code words whose coordinates are ``0, ±spacing, ..., ±levels * spacing`` and whose norm is at most 1.

    Attributes:
        sample_rate: ``q``.
        noise_multiplier: The scale of the Student-t noise (not its deviation) over the clip norm.
        degrees: Its degrees of freedom.
        spacing: Distance between neighbouring code values, over the clip norm.
        levels: Number of positive code values.
    """

    sample_rate: float
    noise_multiplier: float
    degrees: int
    spacing: float
    levels: int

    title: ClassVar[str] = "Student-t noise on quantised gradients of Poisson lots"
    sampling: ClassVar[str] = POISSON

    _checks: ClassVar = {
        "sample_rate": checks.sample_rate,
        "noise_multiplier": checks.noise_multiplier,
        "degrees": partial(checks.whole, "degrees", least=3),
        "spacing": partial(
            checks.number, "spacing", advice="give the distance of code values over the clip norm", above=0, most=1
        ),
        "levels": partial(checks.whole, "levels"),
    }

    def rdp(self, orders: Sequence[float]) -> NDArray[np.float64] | None:
        """The divergences; at a fractional order that of the next whole one, above 128 infinite."""
        values = {
            order: self._divergence(max(math.ceil(order), 2)) if order <= LARGEST_ORDER else math.inf
            for order in set(orders)
        }
        return np.array([values[order] for order in orders])

    def _divergence(self, order: int) -> float:
        moments = student_t_log_moments(self.degrees, self.noise_multiplier, self.spacing, self.levels)
        return float(poisson_divergence(self.sample_rate, moments[: order + 1]))


@lru_cache(maxsize=64)
def student_t_log_moments(degrees: int, scale: float, spacing: float, levels: int) -> NDArray[np.float64]:
    """Upper bounds on ``ln E_Q[(P/Q)^k]``, ``k = 0 ... 128``, over all code words of norm at most 1."""
    largest = min(levels, math.floor(1 / spacing * (1 + 1e-12)))
    rates = [shift_log_moments(degrees, value / scale) / value**2 for value in spacing * np.arange(1, largest + 1)]
    bounds = np.max(rates, axis=0) * _SAFETY
    bounds.flags.writeable = False
    return bounds


def shift_log_moments(degrees: int, shift: float) -> NDArray[np.float64]:
    """``ln E[(t(X - shift) / t(X))^k]`` for ``k = 0 ... 128`` and standard Student-t ``X``.

    With ``x = sqrt(nu) tan(theta)`` the law becomes ``cos(theta)^(nu-1) dtheta``, and the ratio of the densities a
    power of ``cos^2 + (sin - w cos)^2`` with ``w = shift / sqrt(nu)``: smooth and periodic over a half turn, so that
    the midpoint rule converges faster than any power of its step. The step follows the width of the narrowest peak.
    """
    w = shift / math.sqrt(degrees)
    powers = np.arange(LARGEST_ORDER + 1, dtype=np.float64)
    steepness = LARGEST_ORDER * (degrees + 1) / 2
    nodes = 256 + math.ceil(40 * (1 + w * w) * (math.sqrt(1 + steepness * w) + math.sqrt(degrees)))
    theta = math.pi * ((np.arange(nodes) + 0.5) / nodes - 0.5)
    sine, cosine = np.sin(theta), np.cos(theta)
    log_law = (degrees - 1) * np.log(cosine)
    log_law -= logsumexp(log_law)
    # cos^2 + (sin - w cos)^2 = 1 - 2 w sin cos + w^2 cos^2, which keeps its digits for small w
    log_ratio = -(degrees + 1) / 2 * np.log1p(w * cosine * (w * cosine - 2 * sine))
    found, law = np.empty(len(powers)), np.exp(log_law)
    for start in range(0, len(powers), 16):  # bounds the memory where there are many nodes
        exponents = np.multiply.outer(powers[start : start + 16], log_ratio)
        if np.abs(exponents).max() < 1:  # moments next to 1 keep their digits
            found[start : start + 16] = np.log1p((law * np.expm1(exponents)).sum(-1))
        else:
            exponents += log_law
            top = exponents.max(-1)
            found[start : start + 16] = top + np.log(np.exp(exponents - top[:, None]).sum(-1))
    found[:2] = 0.0
    return np.maximum(found, 0.0)
