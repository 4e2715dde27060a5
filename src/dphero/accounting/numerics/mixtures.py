"""Many different Poisson-sampled Gaussian releases, bounded by mixtures of a few.

A ledger of a noise schedule holds thousands of releases that differ a little. Computing the privacy-loss
distribution of each is slow; here each is bounded by a mixture of up to four neighbours on a lattice of sampling
rates ``q`` and noise multipliers ``sigma``, so that only the lattice points in use are computed.

Why the mixture is a bound. Let ``d(q, sigma)`` be the hockey-stick divergence at any one epsilon, in either direction.

- ``d`` is convex in ``q``: the release with the example is ``(1-q) Q + q P``, linear in ``q``, and divergences are
  convex.
- ``d`` is convex in ``u = 2 Phi(1 / (2 sigma)) - 1``, the total variation distance of the Gaussian. Without sampling,
  with ``m = 1/sigma``, the derivative of ``d`` by ``m`` is ``phi(epsilon/m - m/2)`` and that of ``u`` is ``phi(m/2)``;
  their ratio ``exp(epsilon/2 - epsilon^2 / (2 m^2))`` grows with ``m``. With sampling, the divergence of an example
  removed is ``q`` times the one without sampling at ``ln(1 + (e^epsilon - 1) / q)``, or does not depend on sigma; that
  of an example added at epsilon is ``1 - e^epsilon + e^epsilon`` times that of one removed at ``-epsilon``.

So the straight line between two lattice points lies on or above ``d`` at every epsilon: the mixture of their two
distributions, with the weights of linear interpolation, dominates the release, and dominating distributions compose
(Zhu, Dong and Wang 2022, "Optimal Accounting of Differential Privacy via Characteristic Function", Theorem 10). Every
other divergence of the family (Rényi moments too) is an integral of these, so the same weights bound it. What
interpolation adds is of second order in the spacing: about a quarter of its square, relative to the variance of the
losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf, log_ndtr, wrightomega

_SPACINGS = (0.02, 0.04, 0.08, 0.16)
_FEW_RATES = 8
_SAFETY = 1e-9  # far above the rounding of a weight, far below what it costs


@dataclass(frozen=True)
class Mixtures:
    """Releases as mixtures of nodes.

    Under one lattice a release always has the same nodes and weights, whatever the others are.
    """

    nodes: tuple[tuple[float, float], ...]  # (q, sigma) of every node
    indices: NDArray[np.int64]  # for each release up to four nodes, shape (releases, 4)
    weights: NDArray[np.float64]  # their weights, which sum to 1; 0 where a node takes no part
    lattice: tuple[float, bool] | None = None  # which lattice was used


def mixtures(releases: Sequence[tuple[float, float]], at_most: int) -> Mixtures:
    """Bound each release, given as ``(q, sigma)`` with ``q < 1``, by a mixture of about ``at_most`` nodes in all.

    Few releases, and those that lie too far apart to share nodes, are their own nodes: nothing is added to them.
    """
    for spacing in _SPACINGS if len(releases) > at_most / 2 else ():
        found = _on_lattice(np.asarray(releases, dtype=np.float64), spacing)
        if len(found.nodes) <= at_most or (spacing == _SPACINGS[-1] and len(found.nodes) < len(releases) / 2):
            return found
    count = len(releases)
    indices = np.zeros((count, 4), dtype=np.int64)
    indices[:, 0] = np.arange(count)
    return Mixtures(tuple(releases), indices, np.tile([1.0, 0.0, 0.0, 0.0], (count, 1)))


def _on_lattice(releases: NDArray[np.float64], spacing: float) -> Mixtures:
    rates, sigmas = releases[:, 0], releases[:, 1]
    few_rates = len(np.unique(rates)) <= _FEW_RATES
    less_rate, more_rate, rate_weight = _between_rates(rates, spacing, kept=few_rates)
    less_loss, more_loss, loss_weight = _between_noise(sigmas, spacing)
    rate_weight, loss_weight = (
        np.where(weight > 0, np.minimum(weight + _SAFETY, 1.0), 0.0) for weight in (rate_weight, loss_weight)
    )
    corners = np.stack([less_rate, less_loss, less_rate, more_loss, more_rate, less_loss, more_rate, more_loss], axis=1)
    weights = np.stack(
        [
            (1 - rate_weight) * (1 - loss_weight),
            (1 - rate_weight) * loss_weight,
            rate_weight * (1 - loss_weight),
            rate_weight * loss_weight,
        ],
        axis=1,
    )
    points = corners.reshape(-1, 4, 2)
    points = np.where(weights[..., None] > 0, points, points[np.arange(len(points)), weights.argmax(1)][:, None])
    nodes, indices = np.unique(points.reshape(-1, 2), axis=0, return_inverse=True)
    return Mixtures(
        tuple((float(q), float(s)) for q, s in nodes), indices.reshape(-1, 4), weights, (spacing, few_rates)
    )


def _between_rates(
    rates: NDArray[np.float64], spacing: float, kept: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The lattice rates around each rate, and the weight of the upper one; or the rates as they are."""
    if kept:
        return rates, rates, np.zeros_like(rates)
    steps = np.floor(np.log(rates) / spacing)
    steps = steps - (np.exp(steps * spacing) > rates) + (np.exp((steps + 1) * spacing) < rates)
    lower, upper = np.exp(steps * spacing), np.exp((steps + 1) * spacing)
    high = upper >= 0.99  # at rate 1 nothing is sampled
    weight = np.where(high, 0.0, np.clip((rates - lower) / (upper - lower), 0.0, 1.0))
    return np.where(high, rates, lower), np.where(high, rates, upper), weight


def _between_noise(
    sigmas: NDArray[np.float64], spacing: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The lattice noise multipliers around each (more noise first), and the weight of the one with less noise.

    The lattice is even in ``ln m + m^2/2`` with ``m = 1/sigma``: the variance of the losses grows like its square.
    """
    shifts = 1 / sigmas

    def on_lattice(steps: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.sqrt(wrightomega(2 * spacing * steps)), dtype=np.float64)  # y + ln y = 2v, y = m^2

    steps = np.floor((np.log(shifts) + shifts**2 / 2) / spacing)
    steps = steps - (on_lattice(steps) > shifts) + (on_lattice(steps + 1) < shifts)
    lower, upper = on_lattice(steps), on_lattice(steps + 1)
    # u = erf(m / sqrt 8) = 1 - 2 Phi(-m/2): the first form keeps its digits for small m, the second for large m
    small = (erf(shifts / 8**0.5) - erf(lower / 8**0.5)) / (erf(upper / 8**0.5) - erf(lower / 8**0.5) + 1e-300)
    base = log_ndtr(-lower / 2)
    large = np.expm1(log_ndtr(-shifts / 2) - base) / np.expm1(log_ndtr(-upper / 2) - base)
    weight = np.clip(np.where(shifts < 1, small, large), 0.0, 1.0)
    return 1 / lower, 1 / upper, weight
