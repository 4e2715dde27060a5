"""The privacy-loss distribution of many different Poisson-sampled Gaussian releases, composed on one grid.

All distributions are put on one circular grid of ``points`` losses, ``interval`` apart. There, composing is
multiplying Fourier transforms: one multiplication for each different release, one transform back at the end, and one
multiplication more when a release is appended to a ledger whose product is remembered.

Guarantee: the composed distribution is pessimistic. The circle maps losses that differ by its length onto each other;
of those, the window chosen at the end shows the mass inside it and on top of it the mass from outside, so nothing
inside is lost. Mass above the window is bounded by Chernoff's inequality and counted as infinite loss, as is what the
rounding of the transforms can amount to.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray
from scipy.fft import irfft, rfft
from scipy.special import logsumexp

from dphero.accounting.numerics.curves import poisson_gaussian_masses, poisson_gaussian_rdp
from dphero.accounting.numerics.mixtures import Mixtures, mixtures
from dphero.accounting.numerics.sampled_rdp import gaussian_log_moments, poisson_divergence

Releases = Mapping[tuple[float, float], int]
"""How often each ``(sample_rate, noise_multiplier)`` was released; every rate is below 1."""

_RENYI_NODES = 32
_NODES = 256  # at most, or a twentieth of the different releases
_SLOPES = 2.0 ** np.arange(-2, 11)  # of Chernoff's inequality
_ORDERS = (2, 3, 4, 6, 8, 16, 32, 64, 256, 1024)
_WORK = 2e7  # multiplications of a grid point that take about half a second
_WIDEST_INTERVAL, _FINEST_INTERVAL = 1e-3, 1e-7
_MOST_POINTS = 2**20
_NEGLIGIBLE = 1e-40  # of a Fourier coefficient
_ROUNDING = 16 * float(np.finfo(np.float64).eps)  # of one factor
_REMEMBERED_BYTES = 2**27


@dataclass(frozen=True)
class Grid:
    """Losses ``interval`` apart on a circle of ``points``, a power of two."""

    interval: float
    points: int


@dataclass(frozen=True)
class _Product:
    """The composition of ``releases``, whatever the window; the first axis is the direction, removed or added."""

    releases: dict[tuple[float, float], int]  # what was composed
    spectra: NDArray[np.complex128]  # the Fourier transforms of the masses
    log_finite: NDArray[np.float64]  # ln of the probability that no loss is infinite
    log_moments: NDArray[np.float64]  # ln E[exp(slope * loss)] at every slope


_Key = tuple[Grid, tuple[float, bool] | None]


class _Remembered:
    """Products of the latest ledgers by grid, so that an appended release costs one multiplication."""

    def __init__(self) -> None:
        self._products: OrderedDict[int, tuple[_Key, _Product]] = OrderedDict()
        self._lock = threading.Lock()
        self._next = 0

    def largest_part(self, key: _Key, releases: Releases) -> _Product | None:
        """The remembered product that leaves the fewest of ``releases`` to multiply."""
        best: tuple[int, int] | None = None
        with self._lock:
            for number, (known, product) in self._products.items():
                if known != key or len(product.releases) > len(releases):
                    continue
                if all(releases.get(release, 0) >= count for release, count in product.releases.items()):
                    kept = sum(releases[release] == count for release, count in product.releases.items())
                    best = max(best or (0, 0), (kept, number))
            if best is None:
                return None
            self._products.move_to_end(best[1])
            return self._products[best[1]][1]

    def add(self, key: _Key, product: _Product) -> None:
        with self._lock:
            self._products[self._next] = (key, product)
            self._next += 1
            while len(self._products) > 1 and (
                len(self._products) > 6 or sum(p.spectra.nbytes for _, p in self._products.values()) > _REMEMBERED_BYTES
            ):
                self._products.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._products.clear()


remembered = _Remembered()


def compose_many(releases: Releases, delta: float, *, coarse: bool = False) -> tuple[float, PrivacyLossDistribution]:
    """Compose many different Poisson-sampled Gaussian releases, to be read at ``delta``: a millionth of it is cut off.

    Returned are the interval of the grid (half as many points if ``coarse``), and the pessimistic distribution on it.
    """
    parts = mixtures(list(releases), max(_NODES, len(releases) // 20))
    counts = np.fromiter(releases.values(), dtype=np.float64, count=len(releases))
    tail = 1e-6 * delta
    grid = _grid(parts, counts, tail, coarse)
    product = _product(releases, parts, grid)
    steps = float(counts.sum())
    directions = [_window(product, grid, direction, tail, steps) for direction in range(2)]
    return grid.interval, PrivacyLossDistribution(*directions)


def sum_of_divergences(releases: Releases, orders: Sequence[float]) -> NDArray[np.float64]:
    """Upper bounds on the sum of the Rényi divergences at each order, from those of a few nodes.

    ``exp((a-1) D_a)`` of a mixture is the mixture of those of its parts.
    """
    parts = mixtures(list(releases), _RENYI_NODES)
    scales = np.asarray(orders, dtype=np.float64) - 1
    logs = np.array([poisson_gaussian_rdp(*node, orders) for node in parts.nodes]) * scales
    counts = np.fromiter(releases.values(), dtype=np.float64, count=len(releases))
    total = np.zeros(len(scales))
    for start in range(0, len(counts), 2048):
        several = slice(start, start + 2048)
        mixed = logsumexp(logs[parts.indices[several]], axis=1, b=parts.weights[several][:, :, None])
        total += counts[several] @ np.where(np.isnan(mixed), np.inf, mixed)
    return np.asarray(total / scales)


def _grid(parts: Mixtures, counts: NDArray[np.float64], tail: float, coarse: bool) -> Grid:
    """A grid fine enough for the losses' deviation and wide enough for their sum.

    Rounding adds about ``interval^2 / 6`` to the variance of each loss: at a twentieth of the deviation 0.07 %, at a
    fiftieth 0.01 %. The interval is in between, as time allows; where even the coarser one would take long, up to a
    fifth, and in the end whatever ten seconds allow. Both numbers are powers of two, so that they seldom change when a
    release is appended.
    """
    shares = np.bincount(parts.indices.ravel(), (counts[:, None] * parts.weights).ravel(), len(parts.nodes))
    divergences = np.array([_divergences(*node) for node in parts.nodes])
    totals = shares @ np.where(shares[:, None] > 0, divergences, 0.0)
    orders = np.array(_ORDERS, dtype=np.float64)
    highest = np.min(totals - math.log(tail) / (orders - 1))
    lowest = np.min(((orders - 1) * totals - math.log(tail)) / orders)
    width = highest + lowest
    deviation = math.sqrt(totals[0] / counts.sum())
    busy = (len(counts) + 30 * len(parts.nodes)) * width
    widest = _WIDEST_INTERVAL * max(1.0, width / 40)
    finest, fine, wide = (min(max(share * deviation, _FINEST_INTERVAL), widest) for share in (0.02, 0.05, 0.2))
    interval = min(max(busy / _WORK, finest), fine)
    interval = max(interval, min(busy / (4 * _WORK), wide), busy / (40 * _WORK), width / _MOST_POINTS)
    interval = 2.0 ** math.floor(math.log2(interval * (2 if coarse else 1)))
    return Grid(interval, 2 ** math.ceil(math.log2(width / interval + 2)))


@lru_cache(maxsize=4096)
def _divergences(sample_rate: float, noise_multiplier: float) -> NDArray[np.float64]:
    shift = np.array([1 / noise_multiplier])
    return np.array([poisson_divergence(sample_rate, gaussian_log_moments(order, shift))[0] for order in _ORDERS])


def _product(releases: Releases, parts: Mixtures, grid: Grid) -> _Product:
    """The product of all releases; that of all but the latest different one is remembered too."""
    key = (grid, parts.lattice)
    product = remembered.largest_part(key, releases) or _Product(
        {}, np.ones((2, grid.points // 2 + 1), dtype=np.complex128), np.zeros(2), np.zeros((2, len(_SLOPES)))
    )
    place = {release: index for index, release in enumerate(releases)}
    missing = {
        release: count - product.releases.get(release, 0)
        for release, count in releases.items()
        if count > product.releases.get(release, 0)
    }
    latest = next(reversed(place))
    if latest in missing and len(missing) > 1:
        last = missing.pop(latest)
        product = _multiplied(product, missing, place, parts, grid)
        remembered.add(key, product)
        missing = {latest: last}
    if missing:
        product = _multiplied(product, missing, place, parts, grid)
        remembered.add(key, product)
    return product


def _multiplied(
    product: _Product, missing: Releases, place: Mapping[tuple[float, float], int], parts: Mixtures, grid: Grid
) -> _Product:
    # neighbours on the lattice one after another, so that few transforms are in use at a time
    ordered = sorted(missing, key=lambda release: tuple(parts.indices[place[release]]))
    rows = np.array([place[release] for release in ordered])
    counts = np.array([missing[release] for release in ordered])
    weights, indices = parts.weights[rows], parts.indices[rows]
    factors = _Factors(product.spectra)
    for row, row_weights, count in zip(indices, weights, counts.tolist(), strict=True):
        used = row_weights > 0
        factors.multiply([_spectra(*parts.nodes[index], grid) for index in row[used]], row_weights[used], count)
    log_finite, log_moments = _summed(parts, indices, weights, counts, grid.interval)
    total = dict(product.releases)
    for release, count in missing.items():
        total[release] = total.get(release, 0) + count
    return _Product(total, factors.product, product.log_finite + log_finite, product.log_moments + log_moments)


class _Factors:
    """A running product of mixtures of spectra, in place; frequencies at which it vanished are left out."""

    def __init__(self, start: NDArray[np.complex128]) -> None:
        self.product = start.copy()
        self._active = start.shape[1]
        self._factor, self._part = np.empty_like(start), np.empty_like(start)
        self._since = 0

    def multiply(self, spectra: list[NDArray[np.complex128]], weights: NDArray[np.float64], count: int) -> None:
        active = self._active
        product, factor, part = (array[:, :active] for array in (self.product, self._factor, self._part))
        if len(spectra) == 1:
            factor = spectra[0][:, :active]
        else:
            np.multiply(spectra[0][:, :active], weights[0], out=factor)
            for spectrum, weight in zip(spectra[1:], weights[1:], strict=True):
                np.multiply(spectrum[:, :active], weight, out=part)
                factor += part
        product *= factor if count == 1 else _power(factor, count)
        self._since += 1
        if self._since % 64 == 0:  # tiny numbers are slow, too
            kept = np.flatnonzero(np.abs(product).max(axis=0) > _NEGLIGIBLE)
            self._active = int(kept[-1]) + 1
            product[:, self._active :] = 0.0


def _summed(
    parts: Mixtures,
    indices: NDArray[np.int64],
    weights: NDArray[np.float64],
    counts: NDArray[np.int64],
    interval: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The logarithms of the finite mass and of the moments, summed over releases."""
    infinite, moments = np.zeros((len(parts.nodes), 2)), np.zeros((len(parts.nodes), 2, len(_SLOPES)))
    for index in np.unique(indices[weights > 0]):
        infinite[index], moments[index] = _summary(*parts.nodes[index], interval)
    log_finite = counts @ np.log1p(-np.einsum("rk,rkd->rd", weights, infinite[indices]))
    log_moments = np.zeros_like(moments[0])
    for start in range(0, len(counts), 4096):
        several = slice(start, start + 4096)
        mixed = logsumexp(moments[indices[several]], axis=1, b=weights[several][:, :, None, None])
        log_moments += np.tensordot(counts[several], np.where(np.isnan(mixed), np.inf, mixed), axes=1)
    return log_finite, log_moments


def _power(base: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """``base ** exponent`` by squaring; numpy's own goes through logarithms."""
    result: NDArray[np.complex128] | None = None
    while True:
        if exponent & 1:
            result = base.copy() if result is None else result * base
        exponent >>= 1
        if not exponent:
            assert result is not None
            return result
        base = base * base
        base[np.abs(base) < _NEGLIGIBLE] = 0.0


@lru_cache(maxsize=8)
def _spectra(sample_rate: float, noise_multiplier: float, grid: Grid) -> NDArray[np.complex128]:
    """The Fourier transforms of one release's masses on the circle, in both directions."""
    both = _masses(sample_rate, noise_multiplier, grid.interval)
    return np.array([rfft(np.bincount(losses % grid.points, masses, grid.points)) for losses, masses, _ in both])


@lru_cache(maxsize=4096)
def _summary(
    sample_rate: float, noise_multiplier: float, interval: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The infinite mass and ``ln E[exp(slope * loss)]`` at every slope, of one release in both directions."""
    both = _masses(sample_rate, noise_multiplier, interval)
    moments = [logsumexp(np.multiply.outer(_SLOPES, losses * interval), axis=1, b=masses) for losses, masses, _ in both]
    return np.array([infinite for *_, infinite in both]), np.array(moments)


@lru_cache(maxsize=300)
def _masses(
    sample_rate: float, noise_multiplier: float, interval: float
) -> tuple[tuple[NDArray[np.int64], NDArray[np.float64], float], ...]:
    return tuple(
        poisson_gaussian_masses(sample_rate, noise_multiplier, interval, adding=adding) for adding in (False, True)
    )


def _window(product: _Product, grid: Grid, direction: int, tail: float, steps: float) -> DensePLDPmf:
    """The masses of the losses up to where at most ``tail`` is left above."""
    spectrum = product.spectra[direction]
    highest = np.min((product.log_moments[direction] - math.log(tail)) / _SLOPES)
    first = math.ceil(highest / grid.interval) - grid.points + 1
    masses = np.roll(irfft(spectrum, grid.points), -(first % grid.points))
    # The sum of the errors of all masses is at most the norm of the errors of all coefficients.
    rounding = steps * _ROUNDING * math.sqrt(2 * float(np.vdot(spectrum, spectrum).real))
    infinite = -math.expm1(float(product.log_finite[direction])) + tail + rounding
    return DensePLDPmf(grid.interval, first, np.maximum(masses, 0.0), infinite, True)
