"""Poisson sampling of any mechanism with symmetric noise, at whole Rényi orders.

Let ``Q`` be the law of a release without an example and ``P`` with it, and let the example take part with
probability ``q``: the release then follows ``M = (1-q) Q + q P``. At a whole order ``a`` the power of ``M/Q``
expands by the binomial theorem::

    D_a(M || Q) = ln( sum_k C(a,k) (1-q)^(a-k) q^k E_Q[(P/Q)^k] ) / (a-1)

exactly, whatever ``P`` and ``Q`` are, and every ``E_Q[(P/Q)^k]`` may be replaced by an upper bound.

The other direction, ``D_a(Q || M)``, is never larger if a volume-preserving involution swaps ``P`` and ``Q``
(Mironov, Talwar and Zhang 2019, "Rényi Differential Privacy of the Sampled Gaussian Mechanism", Theorem 5). For
``Q`` with a density that is symmetric in every coordinate and ``P`` the same shifted by ``c`` that is the point
reflection ``x -> c - x``. So Gaussian, Laplace and Student-t noise are covered in both directions.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp


def poisson_divergence(sample_rate: float, log_moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """The Rényi divergence, at the whole order ``a``, of a Poisson-sampled release; the larger of both directions.

    One for each row of ``log_moments``: upper bounds on ``ln E_Q[(P/Q)^k]`` for ``k = 0 ... a`` along the last axis (0
    for the first two), infinite where there is none.
    """
    order = log_moments.shape[-1] - 1
    assert order >= 2
    if sample_rate == 1:
        return np.asarray(log_moments[..., -1] / (order - 1))
    # The terms sum to 1 + sum_(k>=2) (binomial weight) (moment - 1): written so, nothing is lost where moments are
    # next to 1.
    with np.errstate(divide="ignore"):
        excess = log_moments[..., 2:] + np.log(-np.expm1(-log_moments[..., 2:]))
    terms = _log_binomial(sample_rate, order) + excess
    return np.asarray(np.logaddexp(0.0, logsumexp(terms, axis=-1)) / (order - 1))


def gaussian_log_moments(order: int, shifts: NDArray[np.float64]) -> NDArray[np.float64]:
    """``ln E_Q[(P/Q)^k] = k (k-1) shift^2 / 2`` for ``k = 0 ... order``, in units of the noise's deviation."""
    powers = np.arange(order + 1, dtype=np.float64)
    return np.asarray(np.multiply.outer(np.square(shifts), powers * (powers - 1) / 2))


@lru_cache(maxsize=1024)
def _log_binomial(sample_rate: float, order: int) -> NDArray[np.float64]:
    """``ln C(a,k) (1-q)^(a-k) q^k`` for ``k = 2 ... a``."""
    powers = np.arange(2, order + 1, dtype=np.float64)
    choices = gammaln(order + 1) - gammaln(powers + 1) - gammaln(order - powers + 1)
    return np.asarray(choices + powers * np.log(sample_rate) + (order - powers) * np.log1p(-sample_rate))
