"""The shape of the noise: invertible operators that whiten and colour one parameter.

A release clips in whitened space and adds noise in parameter space (A is fixed before the lot is drawn):

    whiten   w = A^-1 g            its norm is what is clipped
    colour   A z                   the noise added to the clipped sum, of covariance A A^T

Formal guarantee: the price of a release does not depend on A, provided that `whiten` really is the inverse
of `colour`; the constructors of the factors see to that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dphero.geometry.dense import Dense, Singular
from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.factor import Factor
from dphero.geometry.low_rank import LowRank
from dphero.numerics.transfer import Fetched, mark


@dataclass(frozen=True, eq=False)
class Geometry:
    """The operator A of one parameter, seen as a matrix of `shape[0]` rows and all the rest as columns.

    Either Kronecker, `A G = L G R` (`left` on rows, `right` on columns, None for the identity), or `flat` on
    the flattened parameter. With none of the three it is the identity: DP-SGD. Methods take tensors of shape
    `(*batch, *shape)` with any number of batch axes.

    Attributes:
        shape: the parameter's shape.
        left: L, of size rows.
        right: R, of size columns; only for parameters of two or more axes.
        flat: A, of size rows * columns; excludes `left` and `right`.
    """

    shape: tuple[int, ...]
    left: Factor | None = None
    right: Factor | None = None
    flat: Factor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.flat is not None and not (self.left is None and self.right is None):
            raise ValueError("a geometry is either flat or left and right, not both")
        if len(self.shape) < 2 and self.right is not None:
            raise ValueError(f"a parameter of shape {self.shape} has no columns: give it a left or a flat factor")
        sizes = {"left": self.rows, "right": self.columns, "flat": self.rows * self.columns}
        for side, size in sizes.items():
            factor = getattr(self, side)
            if factor is not None and factor.size != size:
                raise ValueError(f"shape {self.shape} needs a {side} factor of size {size}, not {factor.size}")

    @property
    def rows(self) -> int:
        """The rows of the matrix view."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """The columns of the matrix view."""
        return math.prod(self.shape[1:])

    @property
    def is_identity(self) -> bool:
        """Whether it has no factor at all: isotropic noise."""
        return self.left is None and self.right is None and self.flat is None

    @property
    def smallest(self) -> float:
        """The smallest singular value of A."""
        return math.prod((f.smallest for f in (self.left, self.right, self.flat) if f is not None), start=1.0)

    @property
    def largest(self) -> float:
        """The largest singular value of A."""
        return math.prod((f.largest for f in (self.left, self.right, self.flat) if f is not None), start=1.0)

    def whiten(self, g: Tensor) -> Tensor:
        """Returns A^-1 g (g itself where A is the identity)."""
        return self._apply(g, inverse=True)

    def colour(self, z: Tensor) -> Tensor:
        """Returns A z (z itself where A is the identity)."""
        return self._apply(z, inverse=False)

    def colour_(self, z: Tensor) -> None:
        """Replaces a contiguous z by A z, in place."""
        if self.is_identity:
            return
        if self.flat is not None:
            self.flat.colour_(z.view(-1))
        elif len(self.shape) == 1 and self.left is not None:
            self.left.colour_(z)
        else:
            matrix = z.view(self.rows, self.columns)
            if self.left is not None:
                self.left.colour_(matrix, axis=-2)
            if self.right is not None:
                self.right.colour_(matrix)

    def square_norm(self, g: Tensor) -> Tensor:
        """Returns ||A^-1 g||^2 for each index of the batch axes, at least in float32."""
        matrix = self._matrix(g)
        if self.flat is not None:
            return self.flat.square_norm(matrix.flatten(-2))
        if self.right is None:
            return (self.left or Scalar(self.rows)).square_norm(matrix, axis=-2).sum(-1)
        if self.left is None:
            return self.right.square_norm(matrix).sum(-1)
        return self.right.square_norm(self.left.whiten(matrix, axis=-2)).sum(-1)

    def scaled(self, c: float) -> Geometry:
        """Returns the geometry of c A, for c > 0."""
        if c == 1.0:
            return self
        if self.flat is not None:
            return replace(self, flat=self.flat.scaled(c))
        if self.left is None and self.right is not None:
            return replace(self, right=self.right.scaled(c))
        return replace(self, left=(self.left or Scalar(self.rows)).scaled(c))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Geometry:
        """Returns the geometry on another device or in another precision."""
        left, right, flat = (f and f.to(device, dtype) for f in (self.left, self.right, self.flat))
        return Geometry(self.shape, left, right, flat)

    def state(self) -> dict[str, Any]:
        """Returns what `from_state` needs; loadable by `torch.load(weights_only=True)`."""
        factors = {"left": self.left, "right": self.right, "flat": self.flat}
        return {"shape": list(self.shape), **{side: f and f.state() for side, f in factors.items()}}

    @staticmethod
    def from_state(state: dict[str, Any]) -> Geometry:
        """Makes the geometry whose `state` this is, bit for bit."""
        left, right, flat = (state[side] and factor_from_state(state[side]) for side in ("left", "right", "flat"))
        return Geometry(tuple(state["shape"]), left, right, flat)

    def _matrix(self, x: Tensor) -> Tensor:
        batch = x.dim() - len(self.shape)
        if batch < 0 or tuple(x.shape[batch:]) != self.shape:
            raise ValueError(f"a geometry of shape {self.shape} cannot act on a tensor of shape {tuple(x.shape)}")
        return x.reshape(*x.shape[:batch], self.rows, self.columns)

    def _apply(self, x: Tensor, inverse: bool) -> Tensor:
        matrix = self._matrix(x)
        if self.flat is not None:
            return self.flat.act(matrix.flatten(-2), -1, inverse).reshape(x.shape)
        if self.left is not None and len(self.shape) == 1:  # a bias: no matrix to keep, and cheaper so
            return self.left.act(x, -1, inverse)
        if self.left is not None:
            matrix = self.left.act(matrix, -2, inverse)
        if self.right is not None:
            matrix = self.right.act(matrix, -1, inverse)
        return x if self.is_identity else matrix.reshape(x.shape)


def colour_all_(geometry: Mapping[str, Geometry], noise: Mapping[str, Tensor]) -> None:
    """Replaces each z by A z, in place, by name."""
    for name, shape in geometry.items():
        shape.colour_(noise[name])


def identity(shape: tuple[int, ...]) -> Geometry:
    """Returns the geometry of isotropic noise, A = I, for a parameter of this shape."""
    return Geometry(shape)


class Digests:
    """What tells geometries from others: hashes of all that they are made of, or on a GPU of its marks.

    What comes from a GPU is under way from the start, so that nobody has to wait who asks later.
    """

    def __init__(self, geometries: Sequence[Geometry]) -> None:
        self._parts = [list(_parts(geometry)) for geometry in geometries]
        # By what they are: a weight and its bias share a factor, of which one mark is made.
        held = {id(each): each for parts in self._parts for _, each in parts if isinstance(each, Tensor)}
        self._tensors = [*held]
        self._marks = Fetched([mark(each.detach()) for each in held.values()])

    def found(self) -> list[bytes]:
        """Returns the hash of each geometry."""
        arrived = dict(zip(self._tensors, self._marks.arrived(), strict=True))
        found = []
        for each in self._parts:
            code = hashlib.blake2b(digest_size=16)
            for name, held in each:
                code.update(name.encode())
                if isinstance(held, Tensor):
                    code.update(f"{held.dtype} {tuple(held.shape)} ".encode())
                    code.update(arrived[id(held)].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
                else:
                    code.update(f"{held!r} ".encode())
            found.append(code.digest())
        return found


def _parts(geometry: Geometry) -> Iterator[tuple[str, Any]]:
    for name, value in geometry.state().items():
        for part, held in value.items() if isinstance(value, dict) else [(name, value)]:
            yield f"{name} {part} ", held


def factor_from_state(state: dict[str, Any]) -> Factor:
    """Makes a factor from what its `state` returned."""
    kinds: dict[str, type[Factor]] = {c.__name__: c for c in (Scalar, Diagonal, Dense, LowRank, Singular)}
    if state.get("kind") not in kinds:
        raise ValueError(f"unknown kind of factor {state.get('kind')!r}: expected one of {', '.join(kinds)}")
    if "defect" in state:  # a claim about the basis: here it is measured
        raise ValueError("the state of a factor has no 'defect': take what `state` returned, as it is")
    return kinds[state["kind"]](**{name: value for name, value in state.items() if name != "kind"})
