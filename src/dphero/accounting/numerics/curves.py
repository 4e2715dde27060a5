"""Privacy curves of the Gaussian mechanism, plain and Poisson-sampled: the numerics under every accountant.

Everything here is a function of public parameters only. The two expensive curves are cached, because a run
asks for the same one thousands of times.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld.pld_pmf import PLDPmf, create_pmf_pessimistic_connect_dots_fixed_gap
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

RDP_ORDERS: tuple[float, ...] = tuple(float(order) for order in RdpAccountant().orders)

_DENSE = 400  # up to so many intervals from 0 every loss has its own point


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The exact delta of mu-Gaussian differential privacy at ``epsilon``.

    ``delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)``, evaluated through logarithms so
    that a large epsilon does not overflow.
    """
    kept = float(log_ndtr(mu / 2 - epsilon / mu))
    removed = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(kept) * -math.expm1(removed - kept) if removed < kept else 0.0


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The exact epsilon of mu-Gaussian differential privacy at ``delta``: the inverse of ``gaussian_delta``.

    By bisection, starting from the zCDP bound ``mu^2/2 + mu sqrt(2 ln(1/delta))``. The upper end of the last bracket is
    returned: the value errs, by rounding alone, on the safe side.
    """
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta))
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if gaussian_delta(mu, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu whose ``gaussian_epsilon`` at ``delta`` is ``epsilon``: where searches for parameters start."""
    low, high = 0.0, 1.0
    while gaussian_delta(high, epsilon) <= delta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, epsilon) <= delta else (low, middle)
    return high


@contextmanager
def _without_convergence_warnings() -> Iterator[None]:
    """Hush dp_accounting where an order does not converge: its divergence is infinite, so it is not used."""

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@lru_cache(maxsize=16384)
def _poisson_gaussian_rdp(
    sample_rate: float, noise_multiplier: float, orders: tuple[float, ...]
) -> NDArray[np.float64]:
    event = PoissonSampledDpEvent(sample_rate, GaussianDpEvent(noise_multiplier))
    with _without_convergence_warnings():
        divergences = np.asarray(RdpAccountant(orders=orders).compose(event).rdp, dtype=np.float64)
    # Rounding can push a divergence near 0 below it, and dp_accounting then reports epsilon 0 for the whole
    # run.
    rounding = np.asarray(orders) * np.finfo(np.float64).eps
    divergences = _known(np.where(divergences < 0, rounding, divergences))
    divergences.flags.writeable = False
    return divergences


_LEAST_NOISE = 1e-140
"""Below it, squares are too small for numbers of 64 bits."""


def poisson_gaussian_rdp(sample_rate: float, noise_multiplier: float, orders: Sequence[float]) -> NDArray[np.float64]:
    """Rényi divergences of one Poisson-sampled Gaussian release, one per order (infinite with no noise to speak of).

    At an integer order ``a``: ``ln sum_k C(a,k) (1-q)^(a-k) q^k exp(k(k-1) / (2 sigma^2)) / (a-1)``; without
    sampling ``a / (2 sigma^2)``. The values are dp_accounting's.
    """
    if noise_multiplier < _LEAST_NOISE:
        return np.full(len(orders), np.inf)
    return _poisson_gaussian_rdp(sample_rate, noise_multiplier, tuple(orders))


def rdp_epsilon(orders: Sequence[float], divergences: NDArray[np.float64], delta: float) -> float:
    """The best epsilon that Rényi divergences at several orders prove at ``delta``.

    ``min_a [ R(a) + ln((a-1)/a) - (ln delta + ln a) / (a-1) ]``: Canonne, Kamath and Steinke's conversion.
    """
    return float(compute_epsilon(orders, _known(divergences), delta)[0])


def _known(divergences: NDArray[np.float64]) -> NDArray[np.float64]:
    """What overflowed is not a number: it proves nothing, and dp_accounting would take it for epsilon 0."""
    return np.where(np.isnan(divergences), np.inf, divergences)


def poisson_gaussian_deltas(
    sample_rate: float, noise_multiplier: float, epsilons: NDArray[np.float64], *, adding: bool
) -> NDArray[np.float64]:
    """The hockey-stick divergences of one Poisson-sampled Gaussian release in one direction (rate below 1).

    With ``Q = N(0, s^2)`` and ``P = (1-q) Q + q N(1, s^2)``, the example removed compares P against Q and the
    example added Q against P. The likelihood ratio ``P/Q = 1 - q + q exp((2x-1) / (2 s^2))`` grows with x, so
    either way the best event is a half-line that ends at ``s^2 ln((e^t - (1-q)) / q) + 1/2``, where ``t =
    epsilon`` when removing and ``t = -epsilon`` when adding.
    """
    q, sigma = sample_rate, noise_multiplier
    thresholds = -epsilons if adding else epsilons
    beyond = thresholds <= math.log1p(-q)  # the likelihood ratio never falls so low
    t = np.where(beyond, 1.0, thresholds)
    small = np.log(np.expm1(np.minimum(t, 30.0)) + q)
    large = t + np.log1p(-(1 - q) * np.exp(-np.maximum(t, 0.0)))
    ends = sigma * (np.where(t < 30, small, large) - math.log(q)) + 0.5 / sigma
    if adding:
        kept = ndtr(ends)
        paid = (1 - q) * np.exp(epsilons + log_ndtr(ends)) + q * np.exp(epsilons + log_ndtr(ends - 1 / sigma))
        divergences = np.where(beyond, 0.0, kept - paid)
    else:
        kept = (1 - q) * ndtr(-ends) + q * ndtr(1 / sigma - ends)
        with np.errstate(over="ignore"):
            divergences = np.where(beyond, -np.expm1(epsilons), kept - np.exp(t + log_ndtr(-ends)))
    return np.clip(divergences, 0.0, 1.0)


@lru_cache(maxsize=16)
def poisson_gaussian_pld(sample_rate: float, noise_multiplier: float, interval: float) -> PrivacyLossDistribution:
    """The privacy-loss distribution of one Poisson-sampled Gaussian release, for ``sample_rate < 1``.

    The same numbers as dp_accounting's ``from_gaussian_mechanism``, whose divergences are computed one by one in
    Python; here they are computed in one sweep, about ten times faster. By connect-the-dots rounding, the divergence at
    every epsilon is at least the true one, also after composition.
    """

    def one_direction(adjacency: AdjacencyType) -> PLDPmf:
        bounds = GaussianPrivacyLoss(
            noise_multiplier, sampling_prob=sample_rate, adjacency_type=adjacency
        ).connect_dots_bounds()
        low = math.floor(bounds.epsilon_lower / interval)
        high = math.ceil(bounds.epsilon_upper / interval)
        epsilons = np.arange(low, high + 1) * interval
        deltas = poisson_gaussian_deltas(sample_rate, noise_multiplier, epsilons, adding=adjacency is AdjacencyType.ADD)
        return create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas)

    return PrivacyLossDistribution(one_direction(AdjacencyType.REMOVE), one_direction(AdjacencyType.ADD))


def poisson_gaussian_masses(
    sample_rate: float, noise_multiplier: float, interval: float, *, adding: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
    """One direction of ``poisson_gaussian_pld`` on fewer points: large losses are 1/400 of themselves apart.

    Returned are the losses as multiples of the interval, their masses, and the mass of the infinite loss.

    The straight lines (in ``e^epsilon``) between the divergences at any set of points lie on or above the true ones
    (Doroshenko and others 2022, "Connect the Dots"). With gaps ``a`` below and ``b`` above, the mass of loss ``i`` is
    ``(delta_(i+1) - delta_i) / (e^b - 1) - (delta_i - delta_(i-1)) / (1 - e^-a)``.
    """
    # ln(1 - q + q exp((2x-1) / (2 s^2))) at nine deviations beyond either mean: 1e-19 of the mass lies outside
    reach = 9 / noise_multiplier + 0.5 / noise_multiplier**2
    ends = [np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + end) for end in (-reach, reach)]
    lowest, highest = (-ends[1], -ends[0]) if adding else (ends[0], ends[1])
    losses = _spread_out(math.floor(lowest / interval), math.ceil(highest / interval))
    epsilons = np.asarray(losses * interval, dtype=np.float64)
    deltas = poisson_gaussian_deltas(sample_rate, noise_multiplier, epsilons, adding=adding)
    deltas = np.minimum.accumulate(deltas)
    falls, gaps = np.diff(deltas), np.diff(epsilons)
    masses = np.zeros_like(deltas)
    masses[0] = 1 - deltas[0]
    masses[:-1] += falls / np.expm1(gaps)
    masses[1:] += falls / np.expm1(-gaps)
    return losses, np.maximum(masses, 0.0), float(deltas[-1])


def _spread_out(low: int, high: int) -> NDArray[np.int64]:
    """Whole numbers from ``low`` < 0 to ``high`` > 0, both included; gaps grow with the distance from 0."""

    def up_to(end: int) -> NDArray[np.int64]:
        if end <= _DENSE:
            return np.arange(1, end + 1)
        count = math.ceil(math.log(end / _DENSE) / math.log1p(1 / _DENSE))
        further = np.round(np.geomspace(_DENSE, end, count + 1)).astype(np.int64)
        return np.unique(np.concatenate([np.arange(1, _DENSE), further, [end]]))

    return np.concatenate([-up_to(max(-low, 1))[::-1], [0], up_to(max(high, 1))])


def self_compose(distribution: PrivacyLossDistribution, count: int) -> PrivacyLossDistribution:
    """The privacy-loss distribution of ``count`` releases.

    Long runs are composed in two stages, because dp_accounting raises the number of grid points to the power
    of the count, digit by digit, before it decides how to compose.
    """
    if count <= 100_000:
        return distribution.self_compose(count)
    blocks, rest = divmod(count, 1000)
    composed = distribution.self_compose(1000).self_compose(blocks)
    return composed.compose(distribution.self_compose(rest)) if rest else composed
