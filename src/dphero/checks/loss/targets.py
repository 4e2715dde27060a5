"""Cross entropy that ignores some targets: its mean is over those that are left, in all examples together.

So its divisor depends on all examples, unless each of them ignores the same places. Language models do that: the last
word of a block has no next one (``labels=`` in transformers, with blocks that are full).
"""

from __future__ import annotations

from typing import Any

import torch

from dphero.checks.loss.graph import LINEAR, children_of, is_custom, kind_of, reduction_of, signed

__all__ = ["ignores_targets", "require_same_targets"]

_MOST_NODES = 64
"""How far to look for the cross entropy, from the loss down; it is near."""


def ignores_targets(node: Any) -> bool:
    """Tell whether a node is a cross entropy that leaves out some targets."""
    return kind_of(node).startswith("NllLoss") and bool((node._saved_target == signed(node._saved_ignore_index)).any())


def require_same_targets(loss: Any, rows: int) -> None:
    """Refuse a mean over targets of which examples ignore different ones.

    Args:
        loss: The last node of the graph.
        rows: The number of examples.

    Raises:
        ValueError: If the divisor depends on what the examples hold.
    """
    todo, seen = [loss], 0
    while todo and seen < _MOST_NODES:
        node, seen = todo.pop(), seen + 1
        if kind_of(node).startswith("NllLoss") and reduction_of(node) == "mean":
            _require_same(node, rows)
        elif kind_of(node) in LINEAR or is_custom(node):
            todo += [child for child, _ in children_of(node)]


def _require_same(node: Any, rows: int) -> None:
    ignored = signed(node._saved_ignore_index)
    left_out = node._saved_target == ignored
    if left_out.numel() % rows == 0:
        by_example = left_out.reshape(rows, -1)
        if torch.equal(by_example, by_example[:1].expand_as(by_example)):
            return
    raise ValueError(
        f"the loss is divided by the number of targets that are not ignore_index={ignored}, and examples ignore "
        "different ones: that divisor depends on the other examples. Train on blocks that are all full; or use "
        'reduction="none", take the mean over each example\'s own targets, then over the examples; or use '
        'reduction="sum", divide by a public constant, and declare loss_reduction="sum".'
    )
