"""Is the noise what is charged for? Tests of whitened noise: N(0, 1), all of it independent.

What a release holds besides the sum, divided by the shape and size that are charged for, has to be independent standard
normals: over the numbers of one release, and over releases. Each test here has its exact law under that hypothesis, or
a bound on it, and a p-value that counts everything it looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dphero.audit.laws.checks import Check

Array = NDArray[np.float64]

_KEPT = 512
"""Numbers of each release that are kept for the tests that need all releases side by side."""
_LARGEST = 1024
"""Rows or columns up to which the weakest direction of a parameter is looked for."""
_LAGS = 10
_TAILS = (2.0, 2.5, 3.0, 3.5)
_NEAR = 0.05
"""Of the mean distance between neighbouring values: how near two values are that should rarely be so near."""
_MOST_COMPARED = 1 << 16
_ENDS = 1 / 16


@dataclass(eq=False)
class NoiseRecord:
    """What is remembered of the whitened noise of many releases.

    Args:
        shapes: Rows and columns of each parameter, by name.
        seed: Decides which numbers are kept.
    """

    shapes: Mapping[str, tuple[int, int]]
    seed: int = 0
    releases: int = field(default=0, init=False)
    _kept: list[Array] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        generator = np.random.default_rng([self.seed, 3])
        share = _share(sorted(rows * columns for rows, columns in self.shapes.values()))
        self.chosen: dict[str, NDArray[np.int64]] = {}
        for name, (rows, columns) in self.shapes.items():
            size = rows * columns
            some = generator.choice(size, share, replace=False) if size > share else np.arange(size)
            self.chosen[name] = np.sort(some)
        self.row_squares = {name: np.zeros(rows) for name, (rows, _) in self.shapes.items()}
        self.products: dict[tuple[str, str], Array] = {}
        for name, (rows, columns) in self.shapes.items():
            for side, size in (("rows", rows), ("columns", columns)):
                if 1 < size <= _LARGEST:
                    self.products[name, side] = np.zeros((size, size))

    def add(self, noise: Mapping[str, Array]) -> None:
        """Take note of one release: a matrix of whitened noise for each parameter."""
        for name, values in noise.items():
            self.row_squares[name] += np.square(values).sum(1)
            if (name, "rows") in self.products:
                self.products[name, "rows"] += values @ values.T
            if (name, "columns") in self.products:
                self.products[name, "columns"] += values.T @ values
        self._kept.append(np.concatenate([noise[name].ravel()[some] for name, some in self.chosen.items()]))
        self.releases += 1

    @property
    def kept(self) -> Array:
        """The numbers that were kept: a row for each release."""
        return np.array(self._kept)

    def parts(self) -> Iterable[tuple[str, slice]]:
        """Yield which columns of :attr:`kept` belong to each parameter."""
        start = 0
        for name, some in self.chosen.items():
            yield name, slice(start, start + len(some))
            start += len(some)


def _share(sizes: list[int]) -> int:
    """Return the most numbers that each parameter may keep, so that all together keep no more than they should."""
    left = _KEPT
    for place, size in enumerate(sizes):
        if size * (len(sizes) - place) > left:
            return max(1, left // (len(sizes) - place))
        left -= size
    return max(sizes)


def noise_checks(record: NoiseRecord, *, coarse: bool = False) -> list[Check]:
    """Test the noise of many releases.

    Args:
        record: What was seen of it.
        coarse: Whether numbers are released with fewer digits than 32 bits have: then they do lie on a grid.
    """
    kept = record.kept
    found = [
        _scale(record),
        _rows(record),
        _directions(record),
        _pairs(kept, "noise: numbers of one release", "two numbers of a release are correlated by"),
        _pairs(kept.T, "noise: used again", "two releases have noise that is correlated by"),
        _lags(kept),
        _shape(record, kept),
        _ends(kept),
        _tails(kept),
        _lengths(kept),
    ]
    if not coarse:
        found.append(grid_check(kept, "noise: digits"))
    return found


def _least(p_values: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """Return the smallest p-value, times how many there are, and what it is about."""
    every = list(p_values)
    p_value, about = min(every)
    return min(1.0, p_value * len(every)), about


def _scale(record: NoiseRecord) -> Check:
    """The energy of each parameter's noise: χ², too small where there is less noise than charged."""
    tests = []
    for name, squares in record.row_squares.items():
        count = record.releases * math.prod(record.shapes[name])
        size = math.sqrt(squares.sum() / count)
        tests.append((float(stats.chi2.cdf(squares.sum(), count)), f"{size:.3f} of what is charged in {name}"))
    p_value, about = _least(tests)
    return Check("noise: size by parameter", f"smallest: {about}", p_value)


def _rows(record: NoiseRecord) -> Check:
    """The same for each row of each parameter."""
    tests = []
    for name, squares in record.row_squares.items():
        count = record.releases * record.shapes[name][1]
        row = int(squares.argmin())
        p_value = min(1.0, float(stats.chi2.cdf(squares[row], count)) * len(squares))
        tests.append((p_value, f"{math.sqrt(squares[row] / count):.3f} in row {row} of {name}"))
    p_value, about = _least(tests)
    return Check("noise: size by row", f"smallest: {about} of what is charged", p_value)


def _directions(record: NoiseRecord) -> Check:
    """The weakest of all directions: among a parameter's rows, among its columns, and among the numbers kept.

    The smallest singular value s of an n × k matrix of standard normals has
    P(s ≤ √n − √k − t) ≤ exp(−t²/2) (Davidson and Szarek 2001).
    """
    tests = []
    for (name, side), product in record.products.items():
        rows, columns = record.shapes[name]
        count = record.releases * (columns if side == "rows" else rows)
        tests.append(_weakest(product, count, f"{side} of {name}"))
    kept = record.kept
    tests.append(_weakest(kept.T @ kept, record.releases, "all parameters together"))
    p_value, about = _least(tests)
    return Check("noise: weakest direction", f"smallest: {about}", p_value)


def _weakest(product: Array, count: int, name: str) -> tuple[float, str]:
    size = len(product)
    smallest = math.sqrt(max(float(np.linalg.eigvalsh(product)[0]), 0.0))
    slack = math.sqrt(count) - math.sqrt(size) - smallest
    p_value = math.exp(-(slack**2) / 2) if slack > 0 else 1.0
    return p_value, f"{smallest / math.sqrt(count):.3f} of what is charged among the {name}"


def _pairs(columns: Array, name: str, words: str) -> Check:
    """The largest correlation of two columns, (1 + ρ)/2 ~ Beta((n−1)/2, (n−1)/2) for n rows of normals."""
    units = columns / np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    products = np.abs(np.triu(units.T @ units, 1))
    largest, half = min(float(products.max()), 1.0), (len(columns) - 1) / 2
    pairs = units.shape[1] * (units.shape[1] - 1) / 2
    p_value = min(1.0, 2 * pairs * float(stats.beta.cdf((1 - largest) / 2, half, half))) if half > 0 else 1.0
    first, second = np.unravel_index(int(products.argmax()), products.shape)
    return Check(name, f"{words} {largest:.2f} at most (numbers {first} and {second})", p_value)


def _lags(kept: Array) -> Check:
    """Each release beside the one 1, 2, … later: faint correlation, of all releases together."""
    tests = []
    for lag in range(1, min(_LAGS, len(kept) - 1) + 1):
        together = float((kept[:-lag] * kept[lag:]).sum()) / math.sqrt(kept[lag:].size)
        tests.append((2 * float(stats.norm.sf(abs(together))), f"{together:+.1f} deviations at a distance of {lag}"))
    p_value, about = _least(tests)
    return Check("noise: over releases", f"correlation with later releases: {about}", p_value)


def _shape(record: NoiseRecord, kept: Array) -> Check:
    """Kolmogorov–Smirnov against N(0, 1): all numbers, and those of each parameter."""
    tests = []
    for name, part in [("all parameters", slice(None)), *record.parts()]:
        result = stats.kstest(kept[:, part].ravel(), "norm", method="asymp")
        tests.append((float(result.pvalue), f"{result.statistic:.4f} in {name}"))
    p_value, about = _least(tests)
    return Check("noise: normal", f"largest distance from a normal distribution: {about}", p_value)


def _ends(kept: Array) -> Check:
    """The largest and the smallest number: P(max ≤ x) = Φ(x)^n, small where the tails were cut."""
    high, low = float(kept.max()), float(kept.min())
    p_value, about = _least(
        (math.exp(kept.size * float(stats.norm.logcdf(end))), words)
        for end, words in ((high, f"no number above {high:.2f}"), (-low, f"no number below {low:.2f}"))
    )
    return Check("noise: ends of its range", f"{about} among {kept.size}", p_value)


def _tails(kept: Array) -> Check:
    """How many numbers lie far out: binomial, too few where the tails are light."""
    tests = []
    for far in _TAILS:
        count, rate = int((np.abs(kept) > far).sum()), 2 * float(stats.norm.sf(far))
        words = f"{count} beyond {far:g} deviations, expected {rate * kept.size:.0f}"
        tests.append((float(stats.binom.cdf(count, kept.size, rate)), words))
    p_value, about = _least(tests)
    return Check("noise: tails", about, p_value)


def _lengths(kept: Array) -> Check:
    """The length of each release's noise: χ² of as many numbers, a new one every time."""
    result = stats.kstest(np.square(kept).sum(1), stats.chi2(kept.shape[1]).cdf, method="asymp")
    return Check("noise: length", f"distance of its squares from χ²: {result.statistic:.3f}", float(result.pvalue))


def grid_check(kept: Array, name: str) -> Check:
    """Values that nearly coincide: numbers with few digits lie on a grid, and many are equal.

    Between n sorted uniform values the distances, times n, are exponential; how many are below x has at most the
    variance of a binomial.
    """
    values = np.sort(stats.norm.cdf(kept.ravel()[:_MOST_COMPARED]))
    near = int((np.diff(values) * len(values) < _NEAR).sum())
    rate, count = -math.expm1(-_NEAR), len(values) - 1
    deviations = (near - rate * count) / math.sqrt(count * rate * (1 - rate))
    words = f"{near / count:.1%} of neighbouring values nearly coincide, expected {rate:.1%}"
    return Check(name, words, float(stats.norm.sf(deviations)))


def last_bits_check(ends: int, count: int) -> Check:
    """Numbers whose last eight bits are 0: all of them where noise of 16 bits was widened to 32.

    Of even bits it would be one number in 256. Those of a sound source are not quite even: one in 16 is allowed.
    """
    words = f"{ends / count:.2%} of the released numbers end in eight zeros, up to {_ENDS:.2%} is usual"
    return Check("noise: last bits", words, float(stats.binom.sf(ends - 1, count, _ENDS)))
