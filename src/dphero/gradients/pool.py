"""Small per-example gradients, handled together: on them, the number of operations costs more than the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from dphero.geometry.geometry import Geometry
from dphero.gradients.piece import Explicit, Piece, by_example


class _Pooled(Piece):
    """A slice of many small explicit gradients that are handled as one."""

    def __init__(self, pool: _Pool, columns: slice, shape: torch.Size) -> None:
        self._pool, self._columns, self.shape = pool, columns, shape

    def instantiate(self) -> Tensor:
        return self._pool.gradients[:, self._columns].reshape(len(self._pool.gradients), *self.shape)

    def square_norms(self, geometry: Geometry) -> Tensor:
        return Explicit(self.instantiate()).square_norms(geometry)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._pool.weighted_sum(weights)[self._columns].reshape(self.shape)

    def take(self, keep: Tensor | slice) -> Piece:
        return Explicit(self.instantiate()[keep])


class _Pool:
    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients
        self._sum: tuple[Tensor, Tensor] | None = None

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._sum is None or self._sum[0] is not weights:
            self._sum = (weights, weights.to(self.gradients.dtype) @ self.gradients)
        return self._sum[1]


def pool(gradients: Mapping[str, Tensor], geometry: Mapping[str, Geometry]) -> dict[str, tuple[Piece, Tensor]]:
    """Handle many small per-example gradients together: a few operations instead of a few for each.

    Args:
        gradients: Name to per-example gradients of shape ``(n, *shape)``.
        geometry: Name to the geometry in which norms are taken.

    Returns:
        Name to (piece, ‖A⁻¹ g_i‖²).
    """
    flat = [by_example(value) for value in gradients.values()]
    joined = torch.cat(flat, 1)
    whitened = joined
    if not all(geometry[name].is_identity for name in gradients):
        whitened = torch.cat([by_example(geometry[name].whiten(value)) for name, value in gradients.items()], 1)
    widths = [part.shape[1] for part in flat]
    squares = joined.new_zeros(len(widths), len(joined))
    squares.index_add_(0, _owners(tuple(widths), joined.device), whitened.square().T)
    shared, start = _Pool(joined), 0
    found: dict[str, tuple[Piece, Tensor]] = {}
    for (name, value), width, norms in zip(gradients.items(), widths, squares.unbind(0), strict=True):
        found[name] = (_Pooled(shared, slice(start, start + width), value.shape[1:]), norms)
        start += width
    return found


@cache
def _owners(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return which of several parts, side by side, each column belongs to."""
    return torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths)).to(device)
