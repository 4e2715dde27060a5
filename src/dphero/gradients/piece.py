"""Per-example gradients that are never formed unless forming them is cheaper.

A *piece* is what one call of one layer adds to the gradient of one parameter, for each of the n
examples of a physical batch. It answers two questions:

* ``square_norms(geometry)``: ‖A⁻¹ g_i‖² for every example i;
* ``weighted_sum(weights)``: Σ_i weights_i · g_i.

Both are exact. Most layers give an *outer* piece, g_i = Σ_t l_it r_itᵀ over positions t, whose norm has a
closed form for one position, and for several is the cheaper of the Gram trick
Σ_{t,s} ⟨l_t, l_s⟩⟨r_t, r_s⟩ and the explicit gradient (which is then kept for the sum).

Whitening touches the norms alone: the clipped sum is coloured right after it would be whitened, so
A Σ f_i A⁻¹ g_i = Σ f_i g_i needs no geometry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Geometry
from dphero.numerics.precision import matmul_tf32, widened


class Piece(ABC):
    """What one call adds to the per-example gradients of one parameter."""

    shape: torch.Size
    """Shape of the parameter."""
    rounding: float = 0.0
    """By how much a weight may be rounded up in the sum, relatively: clipping leaves room for that."""

    @abstractmethod
    def instantiate(self) -> Tensor:
        """Return the per-example gradients, of shape ``(n, *shape)``."""

    @abstractmethod
    def square_norms(self, geometry: Geometry) -> Tensor:
        """Return ‖A⁻¹ g_i‖² for each example, of shape ``(n,)``."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i weights_i g_i, of the parameter's shape."""

    @abstractmethod
    def take(self, keep: Tensor | slice) -> Piece:
        """Return the piece of the examples that ``keep`` (a boolean mask, or a slice) names."""

    def some_at_a_time(self, n: int, count: int) -> Iterator[Tensor]:
        """Yield the gradients of the first ``count`` of n examples, then those of the next: what a sum adds up."""
        for first in range(0, n, count):
            yield self.take(slice(first, first + count)).instantiate()

    def folded(self, fold: int) -> Piece:
        """Return the piece in which each run of ``fold`` rows is one example."""
        if fold == 1:
            return self
        return Explicit(self.instantiate().unflatten(0, (-1, fold)).sum(1))


class Explicit(Piece):
    """Per-example gradients that were formed: ``gradients`` has shape ``(n, *shape)``; in float32 at least."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = widened(gradients)
        self.shape = gradients.shape[1:]

    def instantiate(self) -> Tensor:
        return self.gradients

    def square_norms(self, geometry: Geometry) -> Tensor:
        return whitened_squares(self.gradients, geometry)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return weighted_rows(by_example(self.gradients), weights).reshape(self.shape)

    def take(self, keep: Tensor | slice) -> Explicit:
        return Explicit(self.gradients[keep])


def by_example(x: Tensor) -> Tensor:
    """Return one row per example, also where there is none."""
    return x.reshape(len(x), x.shape[1:].numel())


def weighted_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_i weights_i rows_i, in full precision."""
    with matmul_tf32(rows, allow=False):
        return weights.to(rows.dtype) @ rows


def join(x: Tensor, fold: int) -> Tensor:
    """Return x with the positions of each ``fold`` consecutive rows as positions of one row."""
    return x if fold == 1 else x.unflatten(0, (-1, fold)).flatten(1, 2)


def whitened(factor: Factor | None, x: Tensor) -> Tensor:
    """Return A⁻¹ x along the last axis, in float32 at least; x where there is no factor."""
    return x if factor is None else factor.whiten(widened(x))


def whitened_squares(gradients: Tensor, geometry: Geometry) -> Tensor:
    """Return ‖A⁻¹ g_i‖² of gradients that were formed."""
    gradients = gradients if geometry.is_identity else geometry.whiten(gradients)
    return torch.linalg.vector_norm(by_example(gradients), dim=1).square()
