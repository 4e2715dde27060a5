"""What every factor does: a symmetric positive definite operator on one axis of a tensor.

Every constructor but that of :class:`~dphero.geometry.dense.Singular` refuses a singular operator and keeps an
ill-conditioned one in float64, so that `whiten` and `colour` cancel to a relative error of about 1e-4 or better.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dphero.numerics.partial_norms import PartialNorm, square_norms
from dphero.numerics.precision import matmul_tf32


class InnerProducts(NamedTuple):
    """What inner products of whitened vectors are made of: <A^-1 a, A^-1 b> = scale^2 (<a, b> + <near a, far b>).

    Attributes:
        x: the vectors, along the last axis; whitened, where the other attributes do not do that.
        scale: a number.
        near: a few numbers for each vector, or None for none.
        far: as many.
        stretch: at least ||A^-1|| / scale: by how much what is added up here may be longer than x.
    """

    x: Tensor
    scale: float | Tensor = 1.0
    near: Tensor | None = None
    far: Tensor | None = None
    stretch: float | Tensor = 1.0


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

    def inner_products(self, x: Tensor) -> InnerProducts:
        """Returns what the inner products of A^-1 x with each other, along the last axis, are made of."""
        with matmul_tf32(x, allow=False):
            return InnerProducts(self._apply(self._enter(x, -1), -1, inverse=True))

    def scaled(self, c: float) -> Self:
        """Returns the factor of c A, for c > 0."""
        sized = ("scale", "scales", "rest")
        return type(self)(**{n: v * c if n in sized else v for n, v in self._values().items()})

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Returns the factor on another device or in another precision (float64 where it needs that)."""
        moved = {n: v.to(device, dtype) if isinstance(v, Tensor) else v for n, v in self._values().items()}
        return type(self)(**moved)

    def state(self) -> dict[str, Any]:
        """Returns tensors, numbers and strings from which `factor_from_state` makes the same factor, bit for bit."""
        return {"kind": type(self).__name__, **self._values()}

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


def times(matrix: Tensor, x: Tensor, add: Tensor | None = None, beta: float = 1.0) -> Tensor:
    """Returns matrix @ x, or beta * add + matrix @ x, for x of shape (..., k, m), without copies."""
    if x.dim() == 2:
        return matrix @ x if add is None else torch.addmm(add, matrix, x, beta=beta)
    flat = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    spread = matrix.expand(len(flat), -1, -1)
    if add is None:
        return torch.bmm(spread, flat).reshape(*x.shape[:-2], len(matrix), x.shape[-1])
    return torch.baddbmm(add.reshape(len(flat), *add.shape[-2:]), spread, flat, beta=beta).reshape(add.shape)
