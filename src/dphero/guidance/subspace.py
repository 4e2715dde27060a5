"""Block subspace iteration: the leading eigenvectors of M M^T for many M at once, and no k x k matrix is formed.

Given columns Y, two thin products give what M says of their span, and the columns to start from next time. What is
small is done on the CPU in float64, for all of a size at once, so a GPU gets few orders and is waited for once:

    Z = M^T Y,     Y^T Y = L L^T,     L^-1 (Z^T Z) L^-T = V diag(theta) V^T,     U = Y L^-T V,     Y' = M (Z L^-T V)

U is orthonormal, and theta are the values of Rayleigh and Ritz of this M in the span of Y, so their sum never exceeds
the trace ||M||_F^2. Y' = M M^T U is one sweep on. The growth ||L^-1||^2 says by how much rounding errors are magnified:
where it is large (nearly dependent columns, a matrix of low rank) the basis comes from a QR of Y instead, which is slow
on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dphero.transfer import Fetched, grouped, sent

_OVERSAMPLE = 8  # directions iterated beyond those kept: they make the kept ones converge faster
_COLD_SWEEPS = 6  # sweeps of a first iteration, from a random basis; a later one starts from the last sweep
_SEED = 2409_03344
_MOST_GROWTH = 2.0  # mean square length of the rows of L^-1, for columns of length 1; orthonormal ones have 1


@dataclass(frozen=True, eq=False)
class Ritz:
    """What an iteration found.

    Attributes:
        values: (columns,) the Ritz values, largest first; float64, on the CPU.
        basis: (k, columns) their vectors, where and as the matrix is.
        start: (k, columns) the columns to start from next time.
        total: the trace ||M||_F^2; not finite where M is not, and then nothing else means anything.
        defect: how far basis^T basis is from I at most; None where that is not known.
    """

    values: Tensor
    basis: Tensor
    start: Tensor
    total: float
    defect: float | None


@dataclass(frozen=True, eq=False)
class Solved:
    """What was done on the CPU for a matrix.

    Attributes:
        values: theta;
        turn: L^-T V;
        error: the rounding error of U^T U for each row of Y. NaN where the columns are too close to dependent, and
            what is returned with it is of no use;
        total: ||M||_F^2.
    """

    values: Tensor
    turn: Tensor
    error: float
    total: float


class Iterations:
    """Iterations for several matrices, under way on their devices from the start.

    Args:
        matrices: each M, k x m.
        starts: for each, the `start` that the last iteration returned; None, or one of another shape, starts anew with
            some sweeps.
        components: for each, how many directions are wanted.
    """

    def __init__(self, matrices: Sequence[Tensor], starts: Sequence[Tensor | None], components: Sequence[int]):
        self._matrices = matrices
        self._columns = [
            _columns(matrix, start, width(len(matrix), wanted))
            for matrix, start, wanted in zip(matrices, starts, components, strict=True)
        ]
        self._groups = alike(self._columns)
        stacks = [torch.stack([self._columns[number] for number in group]) for group in self._groups]
        units = [columns * columns.square().sum(1, keepdim=True).rsqrt() for columns in stacks]
        self._wide = [unit.double() for unit in units]
        outer = [wide.mT @ wide for wide in self._wide]
        unit = self._apart(units)
        # (Y^T M)^T, not M^T Y: on a CPU twice as fast for the row-major weight
        self._images = [unit[number].mT @ matrix for number, matrix in enumerate(matrices)]
        inner = [image @ image.mT for image in self._images]
        # Row by row: one float32 sum of millions of squares is wrong in the third digit.
        norms = [torch.linalg.vector_norm(m, dim=1 if m.stride(1) == 1 else 0) for m in matrices]
        self._fetched = Fetched([*outer, *inner, *norms])

    def solve(self) -> list[Solved]:
        """Waits for the devices and does what is done on the CPU; a thread of its own may do that."""
        arrived, groups, matrices = self._fetched.arrived(), len(self._groups), len(self._matrices)
        stacks, inner, norms = arrived[:groups], arrived[groups : groups + matrices], arrived[groups + matrices :]
        outer = self._apart(stacks)
        totals = [float(torch.dot(each, each)) for each in (norm.double() for norm in norms)]
        found: dict[int, Solved] = {}
        for same in grouped(gram.shape for gram in inner):
            some = [torch.stack([grams[n] for n in same]) for grams in (outer, inner)]
            found.update(zip(same, _solved(some[0], some[1].double(), [totals[n] for n in same]), strict=True))
        return [found[number] for number in range(matrices)]

    def results(self, solved: list[Solved]) -> list[Ritz]:
        """Returns what was found for each matrix, given what :meth:`solve` returned."""
        stacks = [torch.stack([solved[number].turn for number in group]) for group in self._groups]
        turns = sent(stacks, [wide.device for wide in self._wide])
        found: dict[int, Ritz] = {}
        for group, wide, turn in zip(self._groups, self._wide, turns, strict=True):
            dtype, size = self._matrices[group[0]].dtype, wide.shape[1]
            bases, narrow = (wide @ turn).to(dtype), turn.to(dtype)
            for place, number in enumerate(group):
                each = solved[number]
                if math.isnan(each.error) and math.isfinite(each.total):
                    found[number] = _by_qr(self._matrices[number], self._columns[number])
                else:
                    # Rounding each entry of U by eps / 2 changes no entry of U^T U by more than eps.
                    defect = size * each.error + 2.0 * torch.finfo(dtype).eps
                    start = self._matrices[number] @ (self._images[number].mT @ narrow[place])
                    found[number] = Ritz(each.values, bases[place], start, each.total, defect)
        return [found[number] for number in range(len(self._matrices))]

    def _apart(self, stacks: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return what is stacked for each group by the numbers of its matrices."""
        return {
            number: each
            for group, stack in zip(self._groups, stacks, strict=True)
            for number, each in zip(group, stack, strict=True)
        }


def _columns(matrix: Tensor, start: Tensor | None, columns: int) -> Tensor:
    """Returns the columns to start from: those of last time, or M M^T Q after some sweeps from a random basis."""
    if start is not None and start.shape == (len(matrix), columns):
        return start.to(matrix)
    found = _sweep(matrix, first_basis(len(matrix), columns).to(matrix))
    for _ in range(_COLD_SWEEPS - 1):
        found = _sweep(matrix, torch.linalg.qr(found)[0])
    return found


def _sweep(matrix: Tensor, basis: Tensor) -> Tensor:
    return matrix @ (basis.mT @ matrix).mT


def _solved(outer: Tensor, inner: Tensor, totals: list[float]) -> list[Solved]:
    """Solves what is small, for stacks of Y^T Y and Y^T M M^T Y."""
    eye = torch.eye(outer.shape[-1], dtype=outer.dtype)
    lower, failed = torch.linalg.cholesky_ex(outer)
    inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    growth = inverse.square().sum((-2, -1))
    sound = (failed == 0) & (growth < _MOST_GROWTH * len(eye))  # and never where it is NaN,
    sound &= inner.flatten(1).isfinite().all(1)  # or where M has diverged
    small = torch.where(sound[:, None, None], inverse @ inner @ inverse.mT, eye)
    values, vectors = torch.linalg.eigh(small)
    turn = (inverse.mT @ vectors).flip(-1)
    measured = (turn.mT @ outer @ turn - eye).abs().amax((-2, -1))
    error = measured + growth * torch.finfo(outer.dtype).eps
    errors = torch.where(sound, error, torch.nan).tolist()
    return [Solved(*each) for each in zip(values.flip(-1), turn, errors, totals, strict=True)]


def _by_qr(matrix: Tensor, columns: Tensor) -> Ritz:
    """The safe way: any columns have an orthonormal basis whose span holds theirs.

    All but the columns is computed anew: the matrix may have changed since.
    """
    basis = torch.linalg.qr(columns)[0]
    inner = basis.mT @ matrix
    values, vectors = torch.linalg.eigh((inner @ inner.mT).cpu())
    total = float(torch.linalg.vector_norm(matrix, dim=1).double().square().sum())
    basis = basis @ vectors.flip(1).to(basis.device)
    return Ritz(values.double().flip(0), basis, _sweep(matrix, basis), total, None)


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
    return grouped([(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors])
