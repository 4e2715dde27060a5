"""Spectra, and the rule that turns them into noise scales.

The rule, shared by every guidance that has a spectrum (lambda_1 .. lambda_k with eigenvectors U):

    v_i = (lambda_i / mean lambda + floor)^p,  then scaled so that sum v_i^2 = k;   A = U diag(v) U^T

The spectrum comes from a full `eigh` or, for large k, from a block subspace iteration that never forms the
k x k matrix: r leading directions, and one mean value for all others (the trace is known exactly).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dphero.factors import Dense, Diagonal, Factor, LowRank, Singular

_OVERSAMPLE = 8  # directions iterated beyond those kept: they make the kept ones converge faster
_COLD_SWEEPS = 6  # sweeps of a first iteration, from a random basis
_WARM_SWEEPS = 1  # sweeps of a later one, from the last basis: the weights have hardly moved
_SEED = 2409_03344
_MOST_DEFECT = 1e-3  # of an orthonormal basis
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What is known of a symmetric positive semidefinite `size x size` matrix.

    Attributes:
        name: whose it is, for error messages.
        values: (r,) the resolved eigenvalues, never negative.
        basis: (size, r) their eigenvectors; None for the coordinate axes.
        size: k.
        total: the trace, resolved or not.
        rest: the value given to each of the size - r directions not resolved.
        copies: how many times the spectrum counts in a normalisation with others.
    """

    name: str
    values: Tensor
    basis: Tensor | None
    size: int
    total: float
    rest: float = 0.0
    copies: int = 1


@dataclass(frozen=True, eq=False)
class Wanted:
    """A spectrum to be found: that of M M^T, for M of k x m.

    Attributes:
        matrix: M, of any floating dtype; computed in float32 at least.
        name: whose it is.
        components: None for all of it, by `eigh`: k^2 m + about 10 k^3 operations. Else r < k: the leading r
            directions by block subspace iteration, which forms no k x k matrix: about 4 k m r operations a sweep.
        start: for the iteration, the basis the last one returned; None, or one of another shape, starts anew
            with more sweeps.
        wide: compute in float64. Without a floor the smallest eigenvalues matter, and in float32 those below
            about 1e-5 of the largest are rounding error.
    """

    matrix: Tensor
    name: str
    components: int | None = None
    start: Tensor | None = None
    wide: bool = False


def find(wanted: Sequence[Wanted]) -> list[tuple[Spectrum, Tensor | None]]:
    """Returns spectra, and for those by iteration the basis to start from next time.

    One sweep of the iteration is Q <- qr(M (M^T Q)); the values are those of Rayleigh and Ritz, theta = eigh(Q^T M
    M^T Q), so their sum never exceeds the trace ||M||_F^2, and the directions not resolved get the exact mean of
    what is left, (||M||_F^2 - sum theta) / (k - r). Deterministic: the first basis comes from a generator of its own.

    All small matrices are decomposed on the CPU, where that is fastest; those on a GPU travel together, since every
    journey waits for all that the GPU has to do.
    """
    least = [torch.float64 if w.wide else torch.promote_types(w.matrix.dtype, torch.float32) for w in wanted]
    matrices = [w.matrix.to(dtype) for w, dtype in zip(wanted, least, strict=True)]
    traces = _traces(matrices, [w.name for w in wanted])
    bases = [_iterate(m, w, _orthonormal) for m, w in zip(matrices, wanted, strict=True)]
    grams = [_gram(m, q) for m, q in zip(matrices, bases, strict=True)]
    defects = [_defect(g, q) for g, q in zip(grams, bases, strict=True)]
    travelled = _moved([*grams, *defects], [_CPU] * (2 * len(grams)))
    small = travelled[: len(grams)]
    for number, defect in enumerate(travelled[len(grams) :]):
        if not float(defect) < _MOST_DEFECT:  # nearly dependent columns: the safe way
            bases[number] = _iterate(matrices[number], wanted[number], _by_qr)
            small[number] = _gram(matrices[number], bases[number]).cpu()
    decomposed = _decomposed(small, [matrix.device for matrix in matrices])
    found: list[tuple[Spectrum, Tensor | None]] = []
    for w, matrix, trace, basis, (values, vectors) in zip(wanted, matrices, traces, bases, decomposed, strict=True):
        if basis is None or w.components is None:
            found.append((_resolved(values, vectors, w.name, max(matrix.shape)), None))
        else:
            turned = basis @ vectors.flip(1)
            found.append((_leading(values, turned, w.name, w.components, trace, matrix), turned))
    return found


def of_symmetric(symmetric: Tensor, name: str) -> Spectrum:
    """Returns the spectrum of a symmetric matrix; what is negative or below rounding error becomes zero."""
    ((values, basis),) = _decomposed([symmetric.cpu()], [symmetric.device])
    return _resolved(values, basis, name, len(symmetric))


def _resolved(values: Tensor, basis: Tensor, name: str, rounding: int) -> Spectrum:
    error = torch.finfo(values.dtype).eps * rounding
    values = values.double()
    values = torch.where(values > error * values[-1], values, 0.0).clamp_min(0.0)
    return Spectrum(name, values, basis, len(values), float(values.sum()))


def _leading(values: Tensor, basis: Tensor, name: str, components: int, total: float, matrix: Tensor) -> Spectrum:
    size = len(matrix)
    kept = values.double().flip(0)[:components].clamp_min(0.0)
    left = total - float(kept.sum())
    # Rounding alone can leave a trifle of a matrix of low rank: that is a zero, not a spectrum.
    left = left if left > torch.finfo(matrix.dtype).eps * max(matrix.shape) * total else 0.0
    return Spectrum(name, kept, basis[:, :components], size, total, left / (size - components))


def _iterate(matrix: Tensor, wanted: Wanted, orthonormal: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Returns an orthonormal basis near the leading directions; None where all of them are wanted."""
    if wanted.components is None:
        return None
    size, columns = len(matrix), width(len(matrix), wanted.components)
    if wanted.start is None or wanted.start.shape != (size, columns):
        basis, sweeps = first_basis(size, columns).to(matrix), _COLD_SWEEPS
    else:
        basis, sweeps = wanted.start.to(matrix), _WARM_SWEEPS
    for _ in range(sweeps):
        # (Q^T M)^T, not M^T Q: on a CPU twice as fast for the row-major weight
        basis = orthonormal(matrix @ (basis.mT @ matrix).mT)
    return basis


def _gram(matrix: Tensor, basis: Tensor | None) -> Tensor:
    """Returns M M^T, or Q^T M M^T Q."""
    inner = matrix if basis is None else basis.mT @ matrix
    return inner @ inner.mT


def _defect(gram: Tensor, basis: Tensor | None) -> Tensor:
    """Returns how far Q^T Q is from I; NaN where Q is not finite."""
    if basis is None:
        return gram.new_zeros(())
    inner = basis.mT @ basis
    inner.diagonal().sub_(1.0)
    return inner.abs().amax()


def _orthonormal(columns: Tensor) -> Tensor:
    """Returns an orthonormal basis of the columns' span; QR of a thin matrix is slow on a GPU, and waits for it."""
    return _by_qr(columns) if columns.device.type == "cpu" else _by_cholesky(columns)


def _by_cholesky(columns: Tensor) -> Tensor:
    """Twice Y L^-T, L the Cholesky factor of Y^T Y in float64. Nearly dependent columns: it may fail, and be NaN."""
    wide = columns.double()
    for _ in range(2):
        factor, failed = torch.linalg.cholesky_ex(wide.mT @ wide)
        factor = torch.where(failed > 0, torch.nan, factor)
        wide = torch.linalg.solve_triangular(factor.mT, wide, upper=True, left=False)
    return wide.to(columns.dtype)


def _by_qr(columns: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(columns)[0]
    return basis


def _decomposed(symmetric: Sequence[Tensor], devices: Sequence[torch.device]) -> list[tuple[Tensor, Tensor]]:
    """Returns eigenvalues, on the CPU, and eigenvectors, on the devices asked for, of small symmetric matrices."""
    pairs = [torch.linalg.eigh(matrix) for matrix in symmetric]
    bases = _moved([vectors for _, vectors in pairs], devices)
    return [(values, basis) for (values, _), basis in zip(pairs, bases, strict=True)]


def _moved(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Moves tensors, each to its device, all that take the same way in one piece."""
    moved = list(tensors)
    ways: dict[tuple[torch.device, torch.device, torch.dtype], list[int]] = {}
    for number, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
        if tensor.device != device:
            ways.setdefault((tensor.device, device, tensor.dtype), []).append(number)
    for (_, device, _), numbers in ways.items():
        piece = torch.cat([tensors[number].flatten() for number in numbers]).to(device)
        parts = piece.split([tensors[number].numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            moved[number] = part.view(tensors[number].shape)
    return moved


def width(size: int, components: int) -> int:
    """Returns how many directions to iterate in order to keep `components` of them."""
    return min(components + _OVERSAMPLE, size)


def first_basis(size: int, columns: int) -> Tensor:
    """Returns an orthonormal basis of a random subspace: the same at every call, whatever the global seed."""
    generator = torch.Generator().manual_seed(_SEED)
    basis: Tensor = torch.linalg.qr(torch.randn(size, columns, generator=generator))[0]
    return basis


def limited(spectrum: Spectrum, rank: int) -> Spectrum:
    """Returns the spectrum with only its `rank` largest values; the others count as zero (so: the floor)."""
    if rank >= spectrum.size or spectrum.basis is None:
        return spectrum
    values, order = spectrum.values.sort(descending=True)
    basis = spectrum.basis[:, order[:rank].to(spectrum.basis.device)]
    return replace(spectrum, values=values[:rank], basis=basis, rest=0.0)


def factors(spectra: Sequence[Spectrum], exponent: float, floor: float, bare: bool = False) -> list[Factor]:
    """Applies the rule of this module to spectra normalised together: one mean lambda, one sum of v^2.

    With `bare`, directions may be left without any noise (a positive exponent and floor 0 where a weight is rank
    deficient): a :class:`~dphero.factors.Singular` factor.

    Raises:
        ValueError: where a scale would be zero or infinite, which only a floor of 0 can bring about.
    """
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
        scales = _power(values + floor, exponent)
        raised.append((scales, (rest + floor) ** exponent if len(values) < s.size else 0.0))
    power = 0.0
    for s, (scales, rest) in zip(spectra, raised, strict=True):
        power += s.copies * (float(scales.square().sum()) + (s.size - len(scales)) * rest**2)
    unit = math.sqrt(count / power) if power > 0.0 else 1.0
    return [_factor(s, scales * unit, rest * unit) for s, (scales, rest) in zip(spectra, raised, strict=True)]


def _power(x: Tensor, exponent: float) -> Tensor:
    """Returns x^exponent; roots of two are an order of magnitude cheaper than `pow` on a CPU."""
    if exponent == 0.25:
        return x.sqrt().sqrt()
    return x.sqrt() if exponent == 0.5 else x**exponent


def _factor(spectrum: Spectrum, scales: Tensor, rest: float) -> Factor:
    try:
        if spectrum.basis is None:
            return Diagonal(scales)
        if len(scales) == spectrum.size and float(scales.min()) == 0.0:
            return Singular(spectrum.basis, scales)
        if len(scales) == spectrum.size:
            return Dense(spectrum.basis, scales)
        return LowRank(spectrum.basis, scales, rest)
    except ValueError as error:
        raise ValueError(f"block {spectrum.name!r}: {error}") from error


def _traces(matrices: Sequence[Tensor], names: Sequence[str]) -> list[float]:
    """Returns each ||M||_F^2 (row by row: one float32 sum of millions of squares is wrong in the third digit)."""
    rows = [torch.linalg.vector_norm(matrix, dim=1 if matrix.stride(1) == 1 else 0) for matrix in matrices]
    traces = [float(norms.double().square().sum()) for norms in _moved(rows, [_CPU] * len(rows))]
    for name, trace in zip(names, traces, strict=True):
        if not math.isfinite(trace):
            raise ValueError(f"block {name!r} holds NaN or infinite values: the training has diverged")
    return traces
