"""Spectra, and the rule that turns them into noise scales.

The rule, shared by every guidance that has a spectrum (lambda_1 .. lambda_k with eigenvectors U):

    v_i = (lambda_i / mean lambda + floor)^p,  then scaled so that sum v_i^2 = k;   A = U diag(v) U^T

The spectrum comes from a full `eigh` or, for large k, from a block subspace iteration that never forms the
k x k matrix: r leading directions, and one mean value for all others (the trace is known exactly).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dphero.factors import Dense, Diagonal, Factor, LowRank, Singular

_OVERSAMPLE = 8  # directions iterated beyond those kept: they make the kept ones converge faster
_COLD_SWEEPS = 6  # sweeps of a first iteration, from a random basis
_WARM_SWEEPS = 1  # sweeps of a later one, from the last basis: the weights have hardly moved
_SEED = 2409_03344


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


def exact(matrix: Tensor, name: str, wide: bool = False) -> Spectrum:
    """Returns the spectrum of M M^T (M is k x m) by `eigh`: k^2 m + about 10 k^3 operations.

    Args:
        matrix: M, of any floating dtype; computed in float32 at least.
        name: whose it is.
        wide: compute in float64. Without a floor the smallest eigenvalues matter, and in float32 those below
            about 1e-5 of the largest are rounding error.
    """
    matrix = matrix.to(torch.float64 if wide else torch.promote_types(matrix.dtype, torch.float32))
    _trace(matrix, name)
    return of_symmetric(matrix @ matrix.mT, name, max(matrix.shape))


def of_symmetric(symmetric: Tensor, name: str, rounding: int | None = None) -> Spectrum:
    """Returns the spectrum of a symmetric matrix; what is negative or below rounding error becomes zero."""
    values, basis = _eigh(symmetric)
    error = torch.finfo(values.dtype).eps * (rounding or len(symmetric))
    values = values.cpu().double()
    values = torch.where(values > error * values[-1], values, 0.0).clamp_min(0.0)
    return Spectrum(name, values, basis, len(values), float(values.sum()))


def subspace(matrix: Tensor, name: str, components: int, start: Tensor | None = None) -> tuple[Spectrum, Tensor]:
    """Returns the leading spectrum of M M^T by block subspace iteration, and the basis for the next call.

    One sweep is Q <- qr(M (M^T Q)); the values are those of Rayleigh and Ritz, theta = eigh(Q^T M M^T Q), so
    their sum never exceeds the trace ||M||_F^2, and the directions not resolved get the exact mean of what is
    left, (||M||_F^2 - sum theta) / (k - r). About 4 k m r operations a sweep, and no k x k matrix.
    Deterministic: the first basis comes from a generator of its own.

    Args:
        matrix: M, k x m.
        name: whose it is.
        components: r, with r < k.
        start: the basis the last call returned; None, or one of another shape, starts anew with more sweeps.
    """
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    size, total = len(matrix), _trace(matrix, name)
    if start is None or start.shape != (size, width(size, components)):
        basis, sweeps = first_basis(size, width(size, components)).to(matrix), _COLD_SWEEPS
    else:
        basis, sweeps = start.to(matrix), _WARM_SWEEPS
    for _ in range(sweeps):
        # (Q^T M)^T, not M^T Q: on a CPU twice as fast for the row-major weight
        basis = _orthonormal(matrix @ (basis.mT @ matrix).mT)
    inner = basis.mT @ matrix
    values, rotation = _eigh(inner @ inner.mT)
    basis = basis @ rotation.flip(1)
    kept = values.cpu().double().flip(0)[:components].clamp_min(0.0)
    left = total - float(kept.sum())
    # Rounding alone can leave a trifle of a matrix of low rank: that is a zero, not a spectrum.
    left = left if left > torch.finfo(matrix.dtype).eps * max(matrix.shape) * total else 0.0
    rest = left / (size - components)
    return Spectrum(name, kept, basis[:, :components], size, total, rest), basis


def _eigh(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose a small matrix on the CPU, where that is fastest even for one that lives on a GPU."""
    values, basis = torch.linalg.eigh(symmetric.cpu())
    return values.to(symmetric.device), basis.to(symmetric.device)


def _orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns' span.

    On a GPU, where QR of a thin matrix is slow: twice Y (Y^T Y)^(-1/2), the small matrix in float64.
    """
    if columns.device.type == "cpu":
        basis: Tensor = torch.linalg.qr(columns)[0]
        return basis
    for _ in range(2):
        wide = columns.double()
        values, rotation = _eigh(wide.mT @ wide)
        if float(values[0]) <= 1e-12 * float(values[-1]):
            return torch.linalg.qr(columns)[0]  # nearly dependent columns: the safe way
        columns = (wide @ (rotation * values.rsqrt())).to(columns.dtype)
    return columns


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


def _trace(matrix: Tensor, name: str) -> float:
    """Returns ||M||_F^2 (row by row: one float32 sum of millions of squares is wrong in the third digit)."""
    along = 1 if matrix.stride(1) == 1 else 0
    trace = float(torch.linalg.vector_norm(matrix, dim=along).cpu().double().square().sum())
    if not math.isfinite(trace):
        raise ValueError(f"block {name!r} holds NaN or infinite values: the training has diverged")
    return trace
