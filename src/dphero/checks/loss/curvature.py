"""Is a loss a sum of terms that belong to one example each? Its second derivatives tell.

A loss L(z_1, .. z_n) of what the model returned for each example is such a sum if and only if no derivative with
respect to z_i depends on z_j. So the derivatives for one half of the examples are combined to a number, at random as it
were, and that number is differentiated with respect to the other half: nothing may come out.

Not seen: what enters a loss as a constant (``detach()``, ``item()``), and what has no second derivative there
(distances of L1, ranks).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

__all__ = ["coupling_strength"]


def coupling_strength(loss: Tensor, outputs: Sequence[GradientEdge], rows: int, number: int) -> float:
    """Return how much examples meet in a loss: 0 where not at all, or where it cannot be said; at most 1.

    Args:
        loss: A number that can be back-propagated; it still can afterwards.
        outputs: What the model returned.
        rows: The number of examples.
        number: Which halves are taken: of numbers 0, 1, .. up to log2 of the rows, one tells any two examples apart.
    """
    placed = [(edge, axis) for edge in outputs if (axis := _axis(_shape(edge), rows)) is not None]
    if not placed:
        return 0.0
    edges, axes = [edge for edge, _ in placed], [axis for _, axis in placed]
    half = (torch.arange(rows) >> number % max(1, math.ceil(math.log2(rows)))) % 2 == 0
    try:
        first = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
        combined = [part for part in _parts(first, axes, half) if part.requires_grad]
        if not combined:
            return 0.0
        number_of_half = torch.stack([(part.float() * _weights(part)).sum() for part in combined]).sum()
        second = torch.autograd.grad(number_of_half, edges, retain_graph=True, allow_unused=True)
    except (RuntimeError, NotImplementedError):  # some functions have no second derivative
        return 0.0
    others, own = ([_largest(part) for part in _parts(second, axes, which)] for which in (~half, half))
    found, scale = max(others, default=0.0), max([*others, *own], default=0.0)
    return found / scale if found > 0.0 and math.isfinite(scale) else 0.0


def _parts(tensors: Sequence[Tensor | None], axes: Sequence[int], which: Tensor) -> Iterator[Tensor]:
    for tensor, axis in zip(tensors, axes, strict=True):
        if tensor is not None:
            yield tensor.index_select(axis, which.nonzero()[:, 0].to(tensor.device))


def _axis(shape: Sequence[int], rows: int) -> int | None:
    """Return where the examples are, if there can be no doubt."""
    places = [axis for axis, size in enumerate(shape[:2]) if size == rows]
    return places[0] if len(places) == 1 else None


def _shape(edge: GradientEdge) -> Sequence[int]:
    node: Any = edge.node
    return tuple(node._input_metadata[edge.output_nr].shape)


def _weights(part: Tensor) -> Tensor:
    return torch.arange(1.0, part.numel() + 1, device=part.device).cos().reshape(part.shape)


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
