"""Spectra, and the rule that turns them into noise scales.

The rule, shared by every guidance that has a spectrum (lambda_1 .. lambda_k with eigenvectors U):

    v_i = (lambda_i / mean lambda + floor)^p,  then scaled so that sum v_i^2 = k;   A = U diag(v) U^T

The spectrum comes from a full `eigh` or, for large k, from a block subspace iteration that never forms the
k x k matrix: r leading directions, and one mean value for all others (the trace is known exactly).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dphero.geometry.basis import orthonormality_defect
from dphero.geometry.dense import Dense, Singular
from dphero.geometry.diagonal import Diagonal
from dphero.geometry.factor import Factor
from dphero.geometry.low_rank import LowRank
from dphero.guidance.subspace import Iterations, Ritz, Solved, Start
from dphero.numerics.transfer import Fetched, sent

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="dphero-spectra")
_FEW = 128  # rows of a matrix up to which it is decomposed in float64: that takes no longer, and U is orthonormal then


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What is known of a symmetric positive semidefinite `size x size` matrix."""

    name: str  # whose it is, for error messages
    values: Tensor  # (r,) the resolved eigenvalues, never negative
    basis: Tensor | None  # (size, r) their eigenvectors; None for the coordinate axes
    size: int  # k
    total: float  # the trace, resolved or not
    rest: float = 0.0  # the value given to each of the size - r directions not resolved
    copies: int = 1  # how many times the spectrum counts in a normalisation with others
    defect: float | None = None  # how far basis^T basis is from I at most, where that is known


@dataclass(frozen=True, eq=False)
class Wanted:
    """A spectrum to be found: that of M M^T, for M of k x m.

    All of it by `eigh` takes k^2 m + about 10 k^3 operations; the leading r < k directions by block subspace iteration,
    which forms no k x k matrix, about 2 k m r.
    """

    matrix: Tensor  # M, of any floating dtype; computed in float32 at least
    name: str  # whose it is
    components: int | None = None  # r; None for all of it
    start: Start | None = None  # what the last iteration returned; None or of another shape: anew, with some sweeps
    wide: bool = False  # in float64, for a floor of 0: in float32, eigenvalues below 1e-5 of the largest are rounding


class Search:
    """Finds spectra: what a device does is under way from the start, all else is done by `begin` or by `results`.

    The values by iteration are those of Rayleigh and Ritz (see :mod:`dphero.guidance.subspace`), and the directions not
    resolved get the exact mean of what is left, (||M||_F^2 - sum theta) / (k - r). Deterministic: the first basis comes
    from a generator of its own. All small matrices are decomposed on the CPU, where that is fastest.
    """

    def __init__(self, wanted: Sequence[Wanted]):
        least = [torch.float64 if w.wide else torch.promote_types(w.matrix.dtype, torch.float32) for w in wanted]
        self._wanted, self._matrices = wanted, [w.matrix.to(dtype) for w, dtype in zip(wanted, least, strict=True)]
        self._whole = [number for number, w in enumerate(wanted) if w.components is None]
        self._part = [(number, w, w.components) for number, w in enumerate(wanted) if w.components is not None]
        self._grams = Fetched([self._matrices[number] @ self._matrices[number].mT for number in self._whole])
        self._iterations = Iterations(
            [self._matrices[number] for number, _, _ in self._part],
            [w.start for _, w, _ in self._part],
            [components for _, _, components in self._part],
        )
        self._solved: Future[tuple[list[_Decomposed], list[Solved]]] | None = None

    def begin(self) -> None:
        """Does what is done on the CPU in a thread, as soon as the devices have done their part."""
        self._solved = _THREAD.submit(self._solve)

    def _solve(self) -> tuple[list[_Decomposed], list[Solved]]:
        grams = self._grams.arrived()
        for number, gram in zip(self._whole, grams, strict=True):
            _check(self._wanted[number].name, float(gram.trace()))
        with torch.no_grad():
            return [_decomposed(gram) for gram in grams], self._iterations.solve()

    def results(self) -> list[tuple[Spectrum, Start | None]]:
        """Returns the spectra, and for those by iteration what to start from next time."""
        decomposed, solved = self._solve() if self._solved is None else self._solved.result()
        found: dict[int, tuple[Spectrum, Start | None]] = {}
        bases = sent([each.basis for each in decomposed], [self._matrices[number].device for number in self._whole])
        for number, each, basis in zip(self._whole, decomposed, bases, strict=True):
            name, rounding = self._wanted[number].name, max(self._matrices[number].shape)
            found[number] = (_resolved(each, basis, name, rounding), None)
        for (number, w, components), ritz in zip(self._part, self._iterations.results(solved), strict=True):
            _check(w.name, ritz.total)
            found[number] = (_leading(ritz, w.name, components, self._matrices[number]), ritz.start)
        return [found[number] for number in range(len(self._wanted))]


def of_symmetric(symmetric: Tensor, name: str) -> Spectrum:
    """Returns the spectrum of a symmetric matrix; what is negative or below rounding error becomes zero."""
    found = _decomposed(symmetric.cpu())
    return _resolved(found, found.basis.to(symmetric.device), name, len(symmetric))


class _Decomposed(NamedTuple):
    """Eigenvalues, in float64, and eigenvectors U on the CPU, and how far U^T U is from I: known, or measured here."""

    values: Tensor
    basis: Tensor
    defect: float


def _decomposed(gram: Tensor) -> _Decomposed:
    if gram.dtype == torch.float64 or len(gram) > _FEW:
        values, basis = torch.linalg.eigh(gram)
        return _Decomposed(values.double(), basis, orthonormality_defect(basis))
    values, wide = torch.linalg.eigh(gram.double())
    basis = wide.to(gram.dtype)  # rounding each entry of U by eps / 2 changes no entry of U^T U by more than eps
    return _Decomposed(values, basis, 2.0 * torch.finfo(basis.dtype).eps)


def _resolved(found: _Decomposed, basis: Tensor, name: str, rounding: int) -> Spectrum:
    error = torch.finfo(basis.dtype).eps * rounding * float(found.values[-1])
    values = functional.threshold(found.values, max(error, 0.0), 0.0)
    return Spectrum(name, values, basis, len(values), float(values.sum()), defect=found.defect)


def _leading(ritz: Ritz, name: str, components: int, matrix: Tensor) -> Spectrum:
    size = len(matrix)
    kept = ritz.values[:components].clamp_min(0.0)
    left = ritz.total - float(kept.sum())
    # Rounding alone can leave a trifle of a matrix of low rank: that is a zero, not a spectrum.
    left = left if left > torch.finfo(matrix.dtype).eps * max(matrix.shape) * ritz.total else 0.0
    rest, basis = left / (size - components), ritz.basis[:, :components]
    return Spectrum(name, kept, basis, size, ritz.total, rest, defect=ritz.defect)


def _check(name: str, trace: float) -> None:
    if not math.isfinite(trace):
        raise ValueError(f"block {name!r} holds NaN or infinite values: the training has diverged")


def limited(spectrum: Spectrum, rank: int) -> Spectrum:
    """Returns the spectrum with only its `rank` largest values; the others count as zero (so: the floor)."""
    if rank >= spectrum.size or spectrum.basis is None:
        return spectrum
    values, order = spectrum.values.sort(descending=True)
    basis = spectrum.basis[:, order[:rank].to(spectrum.basis.device)]
    return replace(spectrum, values=values[:rank], basis=basis, rest=0.0)


def factors(
    spectra: Sequence[Spectrum], exponent: float, floor: float, *, bare: bool = False, scope: str = "layer"
) -> list[Factor]:
    """Applies the rule of this module to spectra: to each alone ("layer"), or to all together ("model").

    With `bare`, directions may be left without any noise (a positive exponent and floor 0 where a weight is rank
    deficient): a :class:`~dphero.geometry.dense.Singular` factor.

    Raises:
        ValueError: where a scale would be zero or infinite, which only a floor of 0 can bring about.
    """
    groups = [spectra] if scope == "model" else [[spectrum] for spectrum in spectra]
    return [factor for group in groups for factor in _together(group, exponent, floor, bare)]


def _together(spectra: Sequence[Spectrum], exponent: float, floor: float, bare: bool) -> list[Factor]:
    """Normalises spectra together: one mean lambda, one sum of v^2."""
    count = sum(s.copies * s.size for s in spectra)
    mean = sum(s.copies * s.total for s in spectra) / count if spectra else 0.0
    raised = []
    for s in spectra:
        unknown = s.rest <= 0.0 and len(s.values) < s.size
        if floor == 0.0 and (unknown or float(s.values.min()) <= 0.0) and not (bare and exponent > 0 and not unknown):
            raise ValueError(
                f"block {s.name!r} is rank deficient ({int((s.values > 0).sum())} of {s.size} eigenvalues "
                "are positive): without a floor its geometry is singular and gives no privacy; set floor > 0"
            )
        # A model that is all zeros knows nothing: isotropic.
        values, rest = (s.values / mean, s.rest / mean) if mean > 0 else (torch.ones_like(s.values), 1.0)
        scales = _power(values.add_(floor), exponent)
        raised.append((scales, (rest + floor) ** exponent if len(values) < s.size else 0.0))
    power = 0.0
    for s, (scales, rest) in zip(spectra, raised, strict=True):
        power += s.copies * (float(scales.square().sum()) + (s.size - len(scales)) * rest**2)
    unit = math.sqrt(count / power) if power > 0.0 else 1.0
    return [_factor(s, scales * unit, rest * unit, bare) for s, (scales, rest) in zip(spectra, raised, strict=True)]


def _power(x: Tensor, exponent: float) -> Tensor:
    """Returns x^exponent; roots of two are an order of magnitude cheaper than `pow` on a CPU."""
    if exponent == 0.25:
        return x.sqrt().sqrt()
    return x.sqrt() if exponent == 0.5 else x**exponent


def _factor(spectrum: Spectrum, scales: Tensor, rest: float, bare: bool) -> Factor:
    try:
        if spectrum.basis is None:
            return Diagonal(scales)
        if bare and len(scales) == spectrum.size and float(scales.min()) == 0.0:
            return Singular(spectrum.basis, scales)
        if len(scales) == spectrum.size:
            return Dense(spectrum.basis, scales, defect=spectrum.defect)
        return LowRank(spectrum.basis, scales, rest, defect=spectrum.defect)
    except ValueError as error:
        raise ValueError(f"block {spectrum.name!r}: {error}") from error
