"""Whether a fixed transform treats every example by itself: tried before private examples go through it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dphero.hooks.snapshot import ModelSnapshot
from dphero.numerics.compare import largest_gap

_KEPT = 2  # rows that are looked at
_SLACK = 1e-5
"""Relative difference that rounding may make between runs of one shape, and"""
_SLACK_BETWEEN_SIZES = 1e-2
"""between runs of different shapes, on a GPU in its shorter formats."""


@torch.no_grad()
def require_rowwise(transform: nn.Module, rows: Tensor, name: str) -> None:
    """Refuse a transform that mixes examples, or that keeps something of them.

    The price of a training covers what is released of rows that belong to one example each. A row that carries others
    too, and a running mean that is published with the model, it does not cover. So some rows (as many as will go
    through the transform at a time) do so together, each among copies of itself, and by themselves: each must come out
    the same, up to rounding. Parameters, buffers and random generators are left as they were.

    Raises:
        ValueError: If a row's output depends on the rows beside it, or parameters or buffers are written.
    """
    blank = rows.new_zeros(rows.shape[1:])
    batch = torch.cat([rows, torch.stack([blank, blank + 1]).to(rows.dtype)])  # never all alike
    snapshot = ModelSnapshot(transform)

    def outputs(inputs: Tensor) -> Tensor:
        with snapshot.restored_afterwards() as changes:
            found = transform(inputs)
        _require_unwritten(changes.state, name)
        if not isinstance(found, Tensor) or found.shape[:1] != inputs.shape[:1]:
            raise ValueError(f"{name} must return one row per example; for {len(inputs)} inputs it did not")
        return found.double()

    places, together = _different(batch), outputs(batch)
    for place in places:
        alone = outputs(batch[[place] * len(batch)])
        _require_same(together[place], alone[place], _SLACK, _size(together[place]), name)
    few = outputs(batch[places])
    _require_same(together[places], few, _SLACK_BETWEEN_SIZES, _size(together), name)


def _different(rows: Tensor) -> list[int]:
    """Return the places of the first finite rows that differ from one another."""
    flat, found = rows.flatten(1), list[int]()
    left = flat.isfinite().all(1)
    while left.any() and len(found) < _KEPT:
        found.append(int(left.nonzero()[0]))
        left = left & (flat != flat[found[-1]]).any(1)
    return found


def _size(values: Tensor) -> float:
    """The largest finite value, without its sign."""
    return float(values.nan_to_num(0.0, 0.0, 0.0).abs().max()) if values.numel() else 0.0


def _require_unwritten(written: dict[str, Tensor], name: str) -> None:
    if written:
        raise ValueError(
            f"{name} must be fixed, and computing it writes into {', '.join(sorted(written))}: something of the "
            "private examples would be published with the model. Switch such statistics off, or use public ones in "
            "evaluation mode."
        )


def _require_same(first: Tensor, second: Tensor, slack: float, size: float, name: str) -> None:
    gap, _ = largest_gap(first, second)
    if gap > slack * size:
        raise ValueError(
            f"{name} mixes examples: what it gives for one depends on the others beside it, and changes by "
            f"{gap / max(size, 1e-30):.2g} of its size, so nothing that is made of it can be private. Use statistics "
            "of each example (GroupNorm, LayerNorm), or fixed public ones."
        )
