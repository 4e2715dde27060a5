"""Block subspace iteration: the leading eigenvectors of M M^T for many M at once, and no k x k matrix is formed.

One sweep is Y = M (M^T Q), from the last basis Q. What is small is done on the CPU in float64, for all matrices of a
size at once, so a GPU gets few orders and is waited for once:

    Y^T Y = L L^T,     L^-1 (Y^T M M^T Y) L^-T = V diag(theta) V^T,     U = Y L^-T V

U is orthonormal, and theta are the values of Rayleigh and Ritz in the span of Y, so their sum never exceeds the trace
||M||_F^2. The growth ||L^-1||^2 says by how much this magnifies rounding errors: where it is large (nearly dependent
columns, a matrix of low rank) the basis comes from a QR of Y instead, which is slow on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_OVERSAMPLE = 8  # directions iterated beyond those kept: they make the kept ones converge faster
_COLD_SWEEPS = 6  # sweeps of a first iteration, from a random basis
_WARM_SWEEPS = 1  # sweeps of a later one, from the last basis: the weights have hardly moved
_SEED = 2409_03344
_MOST_GROWTH = 2.0  # mean square length of the rows of L^-1, for columns of length 1; orthonormal ones have 1
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Ritz:
    """What an iteration found.

    Attributes:
        values: (columns,) the Ritz values, largest first; float64, on the CPU.
        basis: (k, columns) their vectors, where and as the matrix is.
        total: the trace ||M||_F^2; not finite where M is not, and then nothing else means anything.
        defect: how far basis^T basis is from I at most; None where that is not known.
    """

    values: Tensor
    basis: Tensor
    total: float
    defect: float | None


class Iterations:
    """Iterations for several matrices: under way on their devices from the start, waited for by `results`.

    Args:
        matrices: each M, k x m.
        starts: for each, the basis that the last iteration returned; None, or one of another shape, starts anew with
            more sweeps.
        components: for each, how many directions are wanted.
    """

    def __init__(self, matrices: Sequence[Tensor], starts: Sequence[Tensor | None], components: Sequence[int]):
        self._matrices = matrices
        self._columns = [
            _swept(matrix, start, width(len(matrix), wanted))
            for matrix, start, wanted in zip(matrices, starts, components, strict=True)
        ]
        self._groups = alike(self._columns)
        stacks = [torch.stack([self._columns[number] for number in group]) for group in self._groups]
        units = [columns * columns.square().sum(1, keepdim=True).rsqrt() for columns in stacks]
        self._wide = [unit.double() for unit in units]
        self._outer = [wide.mT @ wide for wide in self._wide]
        order = [number for group in self._groups for number in group]
        unit = dict(zip(order, [each for stack in units for each in stack], strict=True))
        self._inner = [_gram(matrix, unit[number]) for number, matrix in enumerate(matrices)]
        # Row by row: one float32 sum of millions of squares is wrong in the third digit.
        self._norms = [torch.linalg.vector_norm(m, dim=1 if m.stride(1) == 1 else 0) for m in matrices]

    def results(self) -> list[Ritz]:
        """Waits for the devices, and returns what was found for each matrix."""
        travellers = [self._outer, self._inner, self._norms]
        arrived = iter(moved([each for some in travellers for each in some]))
        outer, inner, norms = ([next(arrived) for _ in some] for some in travellers)
        totals = [float(torch.dot(each, each)) for each in map(Tensor.double, norms)]
        solved = [
            _solved(gram, torch.stack([inner[number] for number in group]).double())
            for group, gram in zip(self._groups, outer, strict=True)
        ]
        turns = moved([turn for _, turn, _ in solved], [wide.device for wide in self._wide])
        found: dict[int, Ritz] = {}
        for group, wide, (values, _, errors), turn in zip(self._groups, self._wide, solved, turns, strict=True):
            dtype, size = self._matrices[group[0]].dtype, wide.shape[1]
            bases = (wide @ turn).to(dtype)
            for place, (number, error) in enumerate(zip(group, errors.tolist(), strict=True)):
                if math.isnan(error) and math.isfinite(totals[number]):
                    found[number] = _by_qr(self._matrices[number], self._columns[number], totals[number])
                else:
                    # Rounding each entry of U by eps / 2 changes no entry of U^T U by more than eps.
                    defect = size * error + 2.0 * torch.finfo(dtype).eps
                    found[number] = Ritz(values[place], bases[place], totals[number], defect)
        return [found[number] for number in range(len(self._matrices))]


def _swept(matrix: Tensor, start: Tensor | None, columns: int) -> Tensor:
    """Returns Y = M (M^T Q)."""
    if start is None or start.shape != (len(matrix), columns):
        basis, sweeps = first_basis(len(matrix), columns).to(matrix), _COLD_SWEEPS
    else:
        basis, sweeps = start.to(matrix), _WARM_SWEEPS
    for _ in range(sweeps - 1):
        basis = torch.linalg.qr(_sweep(matrix, basis))[0]
    return _sweep(matrix, basis)


def _sweep(matrix: Tensor, basis: Tensor) -> Tensor:
    # (Q^T M)^T, not M^T Q: on a CPU twice as fast for the row-major weight
    return matrix @ (basis.mT @ matrix).mT


def _gram(matrix: Tensor, columns: Tensor) -> Tensor:
    """Returns Y^T M M^T Y."""
    inner = columns.mT @ matrix
    return inner @ inner.mT


def _solved(outer: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for stacks of Y^T Y and Y^T M M^T Y: theta, L^-T V, and the rounding error of U^T U for each row of Y.

    The error is NaN where the columns are too close to dependent, and what is returned with it is of no use.
    """
    eye = torch.eye(outer.shape[-1], dtype=outer.dtype)
    lower, failed = torch.linalg.cholesky_ex(outer)
    inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    growth = inverse.square().sum((-2, -1))
    sound = (failed == 0) & (growth < _MOST_GROWTH * len(eye))  # and never where it is NaN
    small = torch.where(sound[:, None, None], inverse @ inner @ inverse.mT, eye)
    values, vectors = torch.linalg.eigh(small)
    turn = (inverse.mT @ vectors).flip(-1)
    measured = (turn.mT @ outer @ turn - eye).abs().amax((-2, -1))
    error = measured + growth * torch.finfo(outer.dtype).eps
    return values.flip(-1), turn, torch.where(sound, error, torch.nan)


def _by_qr(matrix: Tensor, columns: Tensor, total: float) -> Ritz:
    """The safe way: any columns have an orthonormal basis whose span holds theirs."""
    basis = torch.linalg.qr(columns)[0]
    values, vectors = torch.linalg.eigh(_gram(matrix, basis).cpu())
    return Ritz(values.double().flip(0), basis @ vectors.flip(1).to(basis.device), total, None)


def width(size: int, components: int) -> int:
    """Returns how many directions to iterate in order to keep `components` of them."""
    return min(components + _OVERSAMPLE, size)


def first_basis(size: int, columns: int) -> Tensor:
    """Returns an orthonormal basis of a random subspace: the same at every call, whatever the global seed."""
    generator = torch.Generator().manual_seed(_SEED)
    basis: Tensor = torch.linalg.qr(torch.randn(size, columns, generator=generator))[0]
    return basis


def alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns the places of the tensors that can be stacked: those of one shape, dtype and device."""
    groups: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(number)
    return list(groups.values())


def moved(tensors: Sequence[Tensor], devices: Sequence[torch.device] | None = None) -> list[Tensor]:
    """Moves tensors, each to its device (None: to the CPU), all that take the same way in one piece.

    Every journey from a GPU waits for all it has to do; one to a GPU does not.
    """
    devices = [_CPU] * len(tensors) if devices is None else devices
    arrived = list(tensors)
    ways: dict[tuple[torch.device, torch.device, torch.dtype], list[int]] = {}
    for number, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
        if tensor.device != device:
            ways.setdefault((tensor.device, device, tensor.dtype), []).append(number)
    for (_, device, _), numbers in ways.items():
        piece = torch.cat([tensors[number].flatten() for number in numbers])
        piece = piece.to(device, non_blocking=device.type == "cuda")
        parts = piece.split([tensors[number].numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            arrived[number] = part.view(tensors[number].shape)
    return arrived
