"""Spectra of matrices M M^T; :mod:`dphero.guidance.rule` turns them into noise scales.

A spectrum comes from a full `eigh` or, for large k, from a block subspace iteration that never forms the
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
from dphero.guidance.subspace import Iterations, Ritz, Solved, Start

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="dphero-spectra")
_FEW = 128  # rows of a matrix up to which it is decomposed in float64: that takes no longer, and U is orthonormal then


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What is known of a symmetric positive semidefinite `size x size` matrix."""

    name: str  # whose it is, for error messages
    values: Tensor  # (r,) the resolved eigenvalues, never negative
    basis: Tensor | None  # (size, r) their eigenvectors, on the device or still on the CPU; None for coordinate axes
    size: int  # k
    total: float  # the trace, resolved or not
    rest: float = 0.0  # the value given to each of the size - r directions not resolved
    copies: int = 1  # how many times the spectrum counts in a normalisation with others
    defect: float | None = None  # how far basis^T basis is from I at most, where that is known
    device: torch.device | None = None  # where the matrix is; None: where the basis is


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
        self._iterations = Iterations(
            [self._matrices[number] for number, _, _ in self._part],
            [w.start for _, w, _ in self._part],
            [components for _, _, components in self._part],
            company=[self._matrices[number] @ self._matrices[number].mT for number in self._whole],
        )
        self._solved: Future[tuple[list[_Decomposed], list[Solved]]] | None = None

    def begin(self) -> None:
        """Does what is done on the CPU in a thread, as soon as the devices have done their part."""
        self._solved = _THREAD.submit(self._solve)

    def _solve(self) -> tuple[list[_Decomposed], list[Solved]]:
        grams = self._iterations.company()
        for number, gram in zip(self._whole, grams, strict=True):
            _check(self._wanted[number].name, float(gram.trace()))
        with torch.no_grad():
            terms = [max(self._matrices[number].shape) for number in self._whole]
            return [_decomposed(*each) for each in zip(grams, terms, strict=True)], self._iterations.solve()

    def results(self) -> list[tuple[Spectrum, Start | None]]:
        """Returns the spectra, and for those by iteration what to start from next time.

        Bases by `eigh` are on the CPU still, from where they may go on in company.
        """
        decomposed, solved = self._solve() if self._solved is None else self._solved.result()
        found: dict[int, tuple[Spectrum, Start | None]] = {}
        for number, each in zip(self._whole, decomposed, strict=True):
            found[number] = (each.spectrum(self._wanted[number].name, self._matrices[number].device), None)
        for (number, w, components), ritz in zip(self._part, self._iterations.results(solved), strict=True):
            _check(w.name, ritz.total)
            found[number] = (_leading(ritz, w.name, components, self._matrices[number]), ritz.start)
        return [found[number] for number in range(len(self._wanted))]


def of_symmetric(symmetric: Tensor, name: str) -> Spectrum:
    """Returns the spectrum of a symmetric matrix; what is negative or below rounding error becomes zero."""
    return _decomposed(symmetric.cpu(), len(symmetric)).spectrum(name, symmetric.device)


class _Decomposed(NamedTuple):
    """Eigenvalues, in float64, and eigenvectors U on the CPU, and how far U^T U is from I: known, or measured here."""

    values: Tensor
    total: float
    basis: Tensor
    defect: float

    def spectrum(self, name: str, device: torch.device) -> Spectrum:
        return Spectrum(name, self.values, self.basis, len(self.values), self.total, defect=self.defect, device=device)


def _decomposed(gram: Tensor, terms: int) -> _Decomposed:
    """Decomposes a matrix that was added up from so many terms; values that may be their rounding become zero."""
    if gram.dtype == torch.float64 or len(gram) > _FEW:
        values, basis = torch.linalg.eigh(gram)
        values, defect = values.double(), orthonormality_defect(basis)
    else:
        values, wide = torch.linalg.eigh(gram.double())
        basis = wide.to(gram.dtype)  # rounding each entry of U by eps / 2 changes no entry of U^T U by more than eps
        defect = 2.0 * torch.finfo(basis.dtype).eps
    error = torch.finfo(basis.dtype).eps * terms * float(values[-1])
    values = functional.threshold(values, max(error, 0.0), 0.0)
    return _Decomposed(values, float(values.sum()), basis, defect)


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
