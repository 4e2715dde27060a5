"""Cross entropies that are read off the graph: their terms cannot depend on two examples, so no derivative has to tell.

That of a language model has as many terms as it has logits, and second derivatives take some six times their memory.
"""

from __future__ import annotations

from typing import Any

from dphero.checks.loss.graph import OUTPUT, children_of, kind_of, shape_of, signed, terms

_KEEPING = {"ToCopy", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "Slice", "Squeeze", "Unsqueeze"}
"""Operations that leave a vector along the last axis as it is where the length of that axis stays: row by row."""


def is_of_vectors(loss: Any, rows: int) -> bool:
    """Tell whether a loss (its last node) is surely linear in cross entropies of single vectors of the model's outputs.

    Each vector lies along the last axis of an output, and that is not the one that carries the examples.
    """
    found = terms(loss)
    return bool(found) and all(_is_cross_entropy(node, rows) for node, _ in found)


def _is_cross_entropy(node: Any, rows: int) -> bool:
    if kind_of(node) != "NllLoss" or OUTPUT in node.metadata or len(children_of(node)) != 1:
        return False
    node, index = children_of(node)[0]
    shape = shape_of(node, index)
    if kind_of(node) != "LogSoftmax" or OUTPUT in node.metadata or len(shape) != 2:
        return False
    if signed(node._saved_dim) not in (-1, 1) or len(children_of(node)) != 1:
        return False
    node, index = children_of(node)[0]
    while OUTPUT not in node.metadata:
        if kind_of(node) not in _KEEPING or len(children_of(node)) != 1 or shape_of(node, index)[-1:] != shape[1:]:
            return False
        node, index = children_of(node)[0]
    outermost = shape_of(node, index)
    return outermost[-1:] == shape[1:] and (len(outermost) > 2 or (len(outermost) == 2 and outermost[1] != rows))
