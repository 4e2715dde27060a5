"""Factors: symmetric positive definite operators on one axis of a tensor, from which a geometry is made.

Every constructor but that of :class:`Singular` refuses a singular operator and keeps an ill-conditioned one in float64,
so that `whiten` and `colour` cancel to a relative error of about 1e-4 or better.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dphero.numerics.partial_norms import PartialNorm, square_norms
from dphero.numerics.precision import matmul_tf32
from dphero.numerics.transfer import to_device

__all__ = ["Dense", "Diagonal", "Factor", "LowRank", "Scalar", "Singular", "times"]

_TOLERANCE = 1e-4  # relative error allowed in whiten(colour(x)) == x
_ROUNDINGS = 4  # times the square root of the terms: units of the last place that a product may lose
_CANCELLING = 4  # times as much as a product alone does s x + U (...) U^T x lose where the two nearly cancel


class Factor(ABC):
    """A symmetric positive definite `size x size` operator A on one axis of a tensor.

    It acts on the last axis, or on the rows of a matrix (`axis=-2`) without transposing anything. It computes
    in its own precision (`dtype`) and answers in the precision it was given. A factor never changes: what it is
    made from is copied.

    Attributes:
        size: k, the length of the axis it acts on.
        smallest: the smallest singular value of A.
        largest: the largest singular value of A.
        dtype: the precision it computes in; None where it holds no tensor.
    """

    size: int
    smallest: float
    largest: float
    dtype: torch.dtype | None = None
    _arguments: ClassVar[tuple[str, ...]]

    @abstractmethod
    def _apply(self, x: Tensor, axis: int, inverse: bool) -> Tensor: ...

    @abstractmethod
    def variance(self) -> Tensor:
        """Returns the diagonal of A A^T: the variance of each coordinate of coloured unit noise."""

    def act(self, x: Tensor, axis: int, inverse: bool) -> Tensor:
        """Returns A x, or A^-1 x if `inverse`, along `axis` (-1 or -2), in full precision whatever the caller's is.

        A shorter format's errors would be magnified by A's condition, and no norm leaves room for that.
        """
        with matmul_tf32(x, allow=False):
            found = self._apply(self._enter(x, axis), axis, inverse)
        return found if found.dtype == x.dtype else found.to(x.dtype)

    def colour(self, x: Tensor, axis: int = -1) -> Tensor:
        """Returns A x along `axis` (-1 or -2)."""
        return self.act(x, axis, inverse=False)

    def colour_(self, x: Tensor, axis: int = -1) -> None:
        """Replaces x by A x, in place."""
        x.copy_(self.colour(x, axis))

    def whiten(self, x: Tensor, axis: int = -1) -> Tensor:
        """Returns A^-1 x along `axis` (-1 or -2)."""
        return self.act(x, axis, inverse=True)

    def square_norm(self, x: Tensor, axis: int = -1) -> Tensor:
        """Returns ||A^-1 x||^2 summed over `axis`, at least in float32."""
        return square_norms([self.lengths(x, axis)])[0]

    def lengths(self, x: Tensor, axis: int = -1) -> PartialNorm:
        """Returns what ||A^-1 x||^2 is made of, which :func:`square_norms` puts together."""
        with matmul_tf32(x, allow=False):
            return PartialNorm(
                torch.linalg.vector_norm(self._apply(self._enter(x, axis), axis, inverse=True), dim=axis)
            )

    def scaled(self, c: float) -> Self:
        """Returns the factor of c A, for c > 0."""
        sized = ("scale", "scales", "rest")
        return type(self)(**{n: v * c if n in sized else v for n, v in self._values().items()})

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Returns the factor on another device or in another precision (float64 where it needs that)."""
        moved = {n: v.to(device, dtype) if isinstance(v, Tensor) else v for n, v in self._values().items()}
        return type(self)(**moved)

    def state(self) -> dict[str, Any]:
        """Returns tensors, numbers and strings from which `from_state` makes the same factor, bit for bit."""
        return {"kind": type(self).__name__, **self._values()}

    @staticmethod
    def from_state(state: dict[str, Any]) -> Factor:
        """Makes a factor from what `state` returned."""
        kinds: dict[str, type[Factor]] = {c.__name__: c for c in (Scalar, Diagonal, Dense, LowRank, Singular)}
        if state.get("kind") not in kinds:
            raise ValueError(f"unknown kind of factor {state.get('kind')!r}: expected one of {', '.join(kinds)}")
        if "defect" in state:  # a claim about the basis: here it is measured
            raise ValueError("the state of a factor has no 'defect': take what `state` returned, as it is")
        return kinds[state["kind"]](**{name: value for name, value in state.items() if name != "kind"})

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._arguments}

    def _enter(self, x: Tensor, axis: int) -> Tensor:
        if axis not in (-1, -2) or x.dim() < -axis or x.shape[axis] != self.size:
            raise ValueError(f"a factor of size {self.size} cannot act on axis {axis} of shape {tuple(x.shape)}")
        wanted = self.dtype or torch.promote_types(x.dtype, torch.float32)
        return x if x.dtype == wanted else x.to(wanted)

    def _admit(self, *scales: float) -> None:
        self.smallest, self.largest = min(scales), max(scales)
        if not (all(map(math.isfinite, scales)) and self.smallest > 0.0):
            raise ValueError(
                f"the scales of a {type(self).__name__} factor must be positive and finite; these lie in "
                f"[{self.smallest}, {self.largest}]. Singular geometry, no privacy: give the spectrum a floor"
            )


class Scalar(Factor):
    """A = scale I. Holds no tensor, so it suits every device and precision."""

    _arguments = ("size", "scale")

    def __init__(self, size: int, scale: float = 1.0):
        self.size, self.scale = size, float(scale)
        self._admit(self.scale)

    def _apply(self, x: Tensor, axis: int, inverse: bool) -> Tensor:
        return x / self.scale if inverse else x * self.scale

    def variance(self) -> Tensor:
        """Returns scale^2 for each coordinate."""
        return torch.full((self.size,), self.scale**2, dtype=torch.float64)


class Diagonal(Factor):
    """A = diag(scales)."""

    _arguments = ("scales",)

    def __init__(self, scales: Tensor):
        self.scales = scales.detach().to(torch.promote_types(scales.dtype, torch.float32), copy=True)
        self.size, self.dtype = len(scales), self.scales.dtype
        self._admit(*map(float, torch.aminmax(self.scales)))  # NaN spreads to both

    def _apply(self, x: Tensor, axis: int, inverse: bool) -> Tensor:
        scales = self.scales if axis == -1 else self.scales[:, None]
        return x / scales if inverse else x * scales

    def variance(self) -> Tensor:
        """Returns scales^2."""
        return self.scales.square()


class Dense(Factor):
    """A = U diag(v) U^T for a full orthonormal basis U; both k x k matrices, A and A^-1, are formed once.

    Args:
        basis: U.
        scales: v.
        defect: how far U^T U is from I at most, for those who know: measuring it waits for a GPU. None: measured.
    """

    _arguments = ("basis", "scales")

    def __init__(self, basis: Tensor, scales: Tensor, *, defect: float | None = None):
        if basis.dim() != 2 or basis.shape[0] != basis.shape[1] or scales.shape != basis.shape[:1]:
            raise ValueError(f"Dense needs basis k x k and scales k, not {(*basis.shape,)} and {(*scales.shape,)}")
        self._admit(*scales.tolist())
        self.basis = _orthonormal(basis.detach(), self.largest / self.smallest, defect)
        self.size, self.dtype = len(basis), self.basis.dtype
        v = scales.to(self.dtype).tolist()
        self._admit(*v)  # once more, rounded
        rows = _sent([v, [1.0 / x for x in v]], self.basis)
        self.scales = rows[0]
        self.matrix, self.inverse = ((self.basis * rows[:, None]) @ self.basis.mT).unbind()

    def _apply(self, x: Tensor, axis: int, inverse: bool) -> Tensor:
        matrix = self.inverse if inverse else self.matrix
        return x @ matrix if axis == -1 else times(matrix, x)

    def variance(self) -> Tensor:
        """Returns the diagonal of A A^T."""
        return self.matrix.square().sum(0)


class Singular(Factor):
    """A = U diag(v) U^T where some v_i are 0: noise that leaves directions bare. It colours; nothing can be whitened.

    Only the published recipe is run with it, for study: its price is infinite.
    """

    _arguments = ("basis", "scales")

    def __init__(self, basis: Tensor, scales: Tensor):
        if not bool(scales.isfinite().all()) or float(scales.min()) != 0.0:
            raise ValueError("the scales of a Singular factor are finite, and the smallest is 0")
        self.basis, self.scales = basis.detach().clone(), scales.detach().to(basis)
        self.size, self.dtype = len(basis), self.basis.dtype
        self.smallest, self.largest = 0.0, float(scales.max())
        self.matrix = (self.basis * self.scales) @ self.basis.mT

    def _apply(self, x: Tensor, axis: int, inverse: bool) -> Tensor:
        if inverse:
            raise ValueError("a singular geometry cannot whiten: no privacy; give the spectrum a floor")
        return x @ self.matrix if axis == -1 else times(self.matrix, x)

    def variance(self) -> Tensor:
        """Returns the diagonal of A A^T."""
        return self.matrix.square().sum(0)


class LowRank(Factor):
    """A = s (I + U (diag(v / s) - I) U^T): scale v_i along r orthonormal directions, s along all others.

    Costs two thin matrix products (2 k r for a vector) and needs no full eigendecomposition.

    Args:
        basis: U, k x r.
        scales: v.
        rest: s.
        defect: how far U^T U is from I at most, for those who know: measuring it waits for a GPU. None: measured.
    """

    _arguments = ("basis", "scales", "rest")

    def __init__(self, basis: Tensor, scales: Tensor, rest: float, *, defect: float | None = None):
        if basis.dim() != 2 or not 0 < basis.shape[1] < basis.shape[0] or scales.shape != basis.shape[1:]:
            shapes = f"{(*basis.shape,)} and {(*scales.shape,)}"
            raise ValueError(f"LowRank needs basis k x r and scales r with 0 < r < k, not {shapes}")
        self.rest = float(rest)
        self._admit(*scales.tolist(), self.rest)
        self.basis = _orthonormal(basis.detach(), _CANCELLING * self.largest / self.smallest, defect)
        self.size, self.dtype = len(basis), self.basis.dtype
        v, s = scales.to(self.dtype).tolist(), self.rest
        self._admit(*v, s)  # once more, rounded
        w, t = [1.0 / x for x in v], 1.0 / s
        # where a v_i is below s there is no root
        whole = self.smallest >= s
        outer = [[x - s for x in v], [y - t for y in w], *([[math.sqrt(t * t - y * y) for y in w]] if whole else [])]
        self._room = _ROUNDINGS * math.sqrt(self.size) * torch.finfo(self.dtype).eps
        within = [y * y - t * t for y in w]
        rows = _sent([v, within, [(1.0 + self._room) * t * t] * len(v), *outer], self.basis)
        self.scales, self._inverse_squares, self._whole_scale = rows[0], rows[1], rows[2, :1]
        turned = (self.basis * rows[3:, None]).unbind()
        self._spread, self._gather = turned[:2]
        self._taken = turned[2] if whole else None
        # The short norm takes ||U^T x||^2 from ||x||^2: beyond this condition the rounding would show.
        self._short_norm = (self.largest / self.rest) ** 2 * torch.finfo(self.dtype).eps <= _TOLERANCE

    def _apply(self, x: Tensor, axis: int, inverse: bool) -> Tensor:
        rest, out = (1.0 / self.rest, self._gather) if inverse else (self.rest, self._spread)
        if axis == -1:
            flat = x.reshape(-1, self.size)
            return torch.addmm(flat, flat @ self.basis, out.mT, beta=rest).reshape(x.shape)
        return times(out, times(self.basis.mT, x), add=x, beta=rest)

    def colour_(self, x: Tensor, axis: int = -1) -> None:
        """Replaces x by A x with no copy of x: noise is large."""
        if x.dim() != 2 or x.dtype != self.dtype:
            super().colour_(x, axis)
            return
        with matmul_tf32(x, allow=False):  # as in `act`
            left, right = (self._spread, self.basis.mT @ x) if axis == -2 else (x @ self.basis, self._spread.mT)
            x.addmm_(left, right, beta=self.rest)

    def lengths(self, x: Tensor, axis: int = -1) -> PartialNorm:
        """Returns what ||x||^2 / s^2 + sum_i (1 / v_i^2 - 1 / s^2) <u_i, x>^2 is made of: nothing is whitened.

        It is a difference, along a strong direction of much larger terms. So it leaves room for their rounding: a norm
        that is too small would let an example through with more than its share.
        """
        whitened = None if self._short_norm else super().lengths(x, axis).whole
        x = self._enter(x, axis)
        whole = torch.linalg.vector_norm(x, dim=axis)
        if whitened is not None:
            return PartialNorm(whitened.add_(whole * (self._room / self.rest)))
        with matmul_tf32(x, allow=False):
            if self._taken is not None:  # no direction gets less noise than the rest, so all terms are of one sign
                inner = x @ self._taken if axis == -1 else times(self._taken.mT, x)
                return PartialNorm(whole, self._whole_scale, torch.linalg.vector_norm(inner, dim=axis))
            inner = (x @ self.basis if axis == -1 else times(self.basis.mT, x)).square_()
            within = inner @ self._inverse_squares if axis == -1 else self._inverse_squares @ inner
        return PartialNorm(whole.square_().mul_(self._whole_scale[0]).add_(within).clamp_(min=0.0).sqrt_())

    def variance(self) -> Tensor:
        """Returns s^2 + sum_i U_i^2 (v_i^2 - s^2)."""
        return self.rest**2 + self.basis.square() @ (self.scales.square() - self.rest**2)


def times(matrix: Tensor, x: Tensor, add: Tensor | None = None, beta: float = 1.0) -> Tensor:
    """Returns matrix @ x, or beta * add + matrix @ x, for x of shape (..., k, m), without copies."""
    if x.dim() == 2:
        return matrix @ x if add is None else torch.addmm(add, matrix, x, beta=beta)
    flat = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    spread = matrix.expand(len(flat), -1, -1)
    if add is None:
        return torch.bmm(spread, flat).reshape(*x.shape[:-2], len(matrix), x.shape[-1])
    return torch.baddbmm(add.reshape(len(flat), *add.shape[-2:]), spread, flat, beta=beta).reshape(add.shape)


def _sent(rows: Sequence[Sequence[float]], beside: Tensor) -> Tensor:
    """Returns rows of numbers where and as another tensor is: one journey, and nothing is waited for."""
    return to_device(torch.tensor(rows, dtype=beside.dtype, device="cpu"), beside.device)


def _orthonormal(basis: Tensor, condition: float, defect: float | None) -> Tensor:
    """Returns the basis, in float64 and orthonormalised anew where A's condition number needs that."""
    # A copy, into which nobody else can write; but not of what was made here, of which the defect is known.
    basis = basis.to(torch.promote_types(basis.dtype, torch.float32), copy=defect is None)
    defect = orthonormality_defect(basis) if defect is None else defect
    if not defect < 1e-2:
        raise ValueError(f"the basis of a factor must be orthonormal, and U^T U differs from I by {defect:.3g}")
    if condition * defect > _TOLERANCE:
        # The signs of the columns may change; U diag(v) U^T does not.
        basis = torch.linalg.qr(basis.double())[0]
        if condition * orthonormality_defect(basis) > _TOLERANCE:
            raise ValueError(f"condition number {condition:.3g} is singular even in float64: give the spectrum a floor")
    return basis


def orthonormality_defect(basis: Tensor) -> float:
    """Returns the largest entry of U^T U - I, or 2 eps if that is more; NaN where U is not finite.

    Products with the best of bases round, hence 2 eps. Measured in float64, so that a basis rounded from an orthonormal
    one has exactly that. It waits for a GPU.
    """
    wide = basis.double()
    gram = wide.mT @ wide
    gram.diagonal().sub_(1.0)
    return max(float(gram.abs().max()), 2.0 * torch.finfo(basis.dtype).eps)
