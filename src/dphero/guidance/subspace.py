"""Block subspace iteration: the leading singular directions of many M at once, and no k x k matrix is formed.

It goes to and fro between the two sides of M, a product at a time. From orthonormal columns Q of either side:

    left to right     Z = Q^T M,     Z Z^T = V diag(theta) V^T,     U = Q V,                   next Q = Z^T V theta^-1/2
    right to left     X = M Q,       X^T X = V diag(theta) V^T,     U = X V theta^-1/2,        next Q = U

U is orthonormal either way. theta are the values of Rayleigh and Ritz of this M in the span of Q, so their sum does not
exceed the trace ||M||_F^2. Two products are one sweep of the classic iteration with M M^T; a matrix that changes little
between two calls, such as a weight in training, is followed by one.

What is small is done on the CPU in float64, for all of a size at once, so a GPU gets few orders and is waited for once.
How far U^T U is from I is known: measured, or bounded by the spread of theta. Where that is too far (X of nearly
dependent columns, as a matrix of low rank has them), U comes from a QR instead, which is slow on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dphero.numerics.transfer import Fetched, grouped, sent

_OVERSAMPLE = 8  # directions iterated beyond those kept: they make the kept ones converge faster
_COLD_SWEEPS = 6  # sweeps of a first iteration, from a random basis; a later one starts where the last one ended
_SEED = 2409_03344
_ROUNDINGS = 4  # times the square root of the terms: units of the last place that a sum may lose
_MOST_ERROR = 1e-6  # of an entry of U^T U; where Q was rounded to float32, about 1e-7 is usual


class Start(NamedTuple):
    """Orthonormal columns to start from, and the side of M that they belong to: (k, columns) or (m, columns)."""

    side: Literal["left", "right"]
    columns: Tensor


@dataclass(frozen=True, eq=False)
class Ritz:
    """What an iteration found."""

    values: Tensor  # (columns,) the Ritz values, largest first; float64, on the CPU
    basis: Tensor  # (k, columns) the left vectors, where and as the matrix is
    start: Start  # what to start from next time
    total: float  # the trace ||M||_F^2; not finite where M is not, and then nothing else means anything
    defect: float | None  # how far basis^T basis is from I at most; None where that is not known


@dataclass(frozen=True, eq=False)
class Solved:
    """What was done on the CPU for a matrix."""

    values: Tensor  # theta, largest first
    turn: Tensor  # V
    scaled: Tensor  # V theta^-1/2
    error: float  # how far U^T U is from I, before U is rounded; NaN: too far, or M is not finite, and all this no use
    total: float  # ||M||_F^2


class Iterations:
    """Iterations for several matrices M, under way on their devices from the start, for so many components of each.

    A start that is None, or of another shape than the last iteration's, starts anew with some sweeps.
    """

    def __init__(self, matrices: Sequence[Tensor], starts: Sequence[Start | None], components: Sequence[int]):
        self._matrices = matrices
        self._starts = [
            _start(matrix, start, width(len(matrix), wanted))
            for matrix, start, wanted in zip(matrices, starts, components, strict=True)
        ]
        # Q^T M, not M^T Q: on a CPU twice as fast for a row-major weight
        self._images = [
            columns.mT @ matrix if side == "left" else matrix @ columns
            for (side, columns), matrix in zip(self._starts, matrices, strict=True)
        ]
        sources = [
            columns if side == "left" else image
            for (side, columns), image in zip(self._starts, self._images, strict=True)
        ]
        self._groups = grouped((each.shape, each.dtype, each.device) for each in sources)
        self._wide = [torch.stack([sources[number] for number in group]).double() for group in self._groups]
        outer = [wide.mT @ wide for wide in self._wide]
        inner = [
            image @ image.mT for (side, _), image in zip(self._starts, self._images, strict=True) if side == "left"
        ]
        # Row by row: one float32 sum of millions of squares is wrong in the third digit.
        norms = [torch.linalg.vector_norm(m, dim=1 if m.stride(1) == 1 else 0) for m in matrices]
        self._fetched = Fetched([*outer, *inner, *norms])

    def solve(self) -> list[Solved]:
        """Waits for the devices and does what is done on the CPU; a thread of its own may do that."""
        arrived, matrices = iter(self._fetched.arrived()), range(len(self._matrices))
        stacks = [next(arrived) for _ in self._groups]
        outer = {
            number: gram
            for group, stack in zip(self._groups, stacks, strict=True)
            for number, gram in zip(group, stack, strict=True)
        }
        inner = [next(arrived).double() if side == "left" else outer[n] for n, (side, _) in enumerate(self._starts)]
        totals = [float(torch.dot(each, each)) for each in (norms.double() for norms in arrived)]
        found: dict[int, Solved] = {}
        for same in grouped((self._starts[n].side, inner[n].shape) for n in matrices):
            some = [torch.stack([grams[n] for n in same]) for grams in (outer, inner)]
            side, size = self._starts[same[0]].side, max(len(self._matrices[n]) for n in same)
            found.update(zip(same, _solved(side, size, some[0], some[1], [totals[n] for n in same]), strict=True))
        return [found[number] for number in matrices]

    def results(self, solved: list[Solved]) -> list[Ritz]:
        """Returns what was found for each matrix, given what :meth:`solve` returned."""
        turns = [
            each.turn if start.side == "left" else each.scaled for each, start in zip(solved, self._starts, strict=True)
        ]
        stacks = [torch.stack([turns[number] for number in group]) for group in self._groups]
        onward = [number for number, start in enumerate(self._starts) if start.side == "left"]
        narrow = [solved[number].scaled.to(self._matrices[number].dtype) for number in onward]
        devices = [*(wide.device for wide in self._wide), *(self._matrices[number].device for number in onward)]
        there = sent([*stacks, *narrow], devices)
        rights = dict(zip(onward, there[len(stacks) :], strict=True))
        found: dict[int, Ritz] = {}
        for group, wide, turn in zip(self._groups, self._wide, there[: len(stacks)], strict=True):
            bases = (wide @ turn).to(self._matrices[group[0]].dtype)
            for basis, number in zip(bases, group, strict=True):
                found[number] = self._result(number, solved[number], basis, rights.get(number))
        return [found[number] for number in range(len(self._matrices))]

    def _result(self, number: int, solved: Solved, basis: Tensor, right: Tensor | None) -> Ritz:
        if math.isnan(solved.error) and math.isfinite(solved.total):
            return _by_qr(self._matrices[number], self._starts[number])
        # Rounding each entry of U by eps / 2 changes no entry of U^T U by more than eps.
        defect = solved.error + 2.0 * torch.finfo(basis.dtype).eps
        start = Start("left", basis) if right is None else Start("right", self._images[number].mT @ right)
        return Ritz(solved.values, basis, start, solved.total, defect)


def _start(matrix: Tensor, start: Start | None, columns: int) -> Start:
    """Returns what to start from: that of last time, or the end of some sweeps from a random basis."""
    if start is not None and start.columns.shape == (matrix.shape[start.side == "right"], columns):
        return Start(start.side, start.columns.to(matrix))
    found = _sweep(matrix, first_basis(len(matrix), columns).to(matrix))
    for _ in range(_COLD_SWEEPS - 1):
        found = _sweep(matrix, torch.linalg.qr(found)[0])
    return Start("left", torch.linalg.qr(found.double())[0].to(matrix))


def _sweep(matrix: Tensor, basis: Tensor) -> Tensor:
    return matrix @ (basis.mT @ matrix).mT


def _solved(side: str, size: int, outer: Tensor, inner: Tensor, totals: list[float]) -> list[Solved]:
    """Solves what is small, for stacks of Q^T Q and Z Z^T, or of X^T X twice; `size` is k at most."""
    finite = [math.isfinite(each) for each in inner.sum((1, 2)).tolist()]
    if not all(finite):  # what stands in their place is of no use, and does no harm
        inner = torch.where(torch.tensor(finite)[:, None, None], inner, torch.eye(inner.shape[-1], dtype=inner.dtype))
    values, vectors = (each.flip(-1) for each in torch.linalg.eigh(inner))
    least = values[:, :1].clamp_min(torch.finfo(torch.float32).tiny) * torch.finfo(torch.float32).eps ** 2
    scaled = vectors * values.maximum(least).rsqrt()[:, None]
    # What products and `eigh` round, relative to the longest columns.
    rounded = _ROUNDINGS * math.sqrt(size) * inner.shape[-1] * torch.finfo(inner.dtype).eps
    if side == "left":
        grams = vectors.mT @ outer @ vectors
        grams.diagonal(dim1=1, dim2=2).sub_(1.0)
        errors = [rounded + each for each in grams.abs().amax((1, 2)).tolist()]
    else:
        errors = [rounded * each[0] / each[-1] if each[-1] > 0.0 else math.inf for each in values.tolist()]
    known = [error if good and error < _MOST_ERROR else math.nan for error, good in zip(errors, finite, strict=True)]
    return [Solved(*each) for each in zip(values, vectors, scaled, known, totals, strict=True)]


def _by_qr(matrix: Tensor, start: Start) -> Ritz:
    """The safe way: any columns have an orthonormal basis whose span holds theirs.

    All but the start is computed anew: the matrix may have changed since.
    """
    columns = start.columns if start.side == "left" else matrix @ start.columns
    basis = torch.linalg.qr(columns.double())[0]
    inner = basis.to(matrix.dtype).mT @ matrix
    values, vectors = torch.linalg.eigh((inner @ inner.mT).cpu().double())
    total = float(torch.linalg.vector_norm(matrix, dim=1).double().square().sum())
    basis = (basis @ vectors.flip(1).to(basis.device)).to(matrix.dtype)
    return Ritz(values.flip(0), basis, Start("left", basis), total, None)


def width(size: int, components: int) -> int:
    """Returns how many directions to iterate in order to keep `components` of them."""
    return min(components + _OVERSAMPLE, size)


def first_basis(size: int, columns: int) -> Tensor:
    """Returns an orthonormal basis of a random subspace: the same at every call, whatever the global seed."""
    generator = torch.Generator("cpu").manual_seed(_SEED)
    basis: Tensor = torch.linalg.qr(torch.randn(size, columns, generator=generator, device="cpu"))[0]
    return basis
