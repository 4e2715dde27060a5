"""Read the graph that autograd has built from a loss down to what the model returned.

A node of that graph is one operation; its children are the operations whose results it took. Nodes of the model's own
outputs are marked (:data:`OUTPUT`), so that a walk knows where the user's loss ends and the model begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

OUTPUT = "dphero.output"
"""Marks, in the graph, what the model returned, with its number among the node's outputs."""

LINEAR = {"Add", "Sub", "Rsub", "Neg", "Mul", "Div", "Clone", "ToCopy", "Alias", "View", "UnsafeView", "ReshapeAlias"}
LINEAR |= {"Squeeze", "Unsqueeze", "Expand", "Stack", "Cat", "T", "Transpose", "Permute", "Repeat", "Flip", "Cumsum"}
LINEAR |= {"CopyBackwards", "CopySlices", "IndexPut", "AsStrided", "Unbind", "Lerp", "Dot", "Mv", "ModelOutput"}
PRODUCTS = {"Mul", "Div", "Dot", "Mv"}  # linear while but one of the factors has a gradient
SELECTING = {"Index", "MaskedSelect", "Slice", "Select", "IndexSelect", "Gather", "Split", "SplitWithSizes", "Sort"}
_ADDING = {"Mean", "Sum", "Nansum", "IndexAdd", "ScatterAdd", "Roll", "Trace", "Diagonal", "ToDense"}
_MATRIX_PRODUCTS = {"Mm", "Bmm", "Addmm", "Addmv", "Baddbmm", "Ger", "UnsafeIndex"}
_OPTIONS = ("_saved_reduction", "_saved_dim", "_saved_ignore_index")


class ModelOutput(torch.autograd.Function):
    """Returns a tensor as it is, with a node of its own; unlike a view, whose node operations in place go round."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """Return the value."""
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient."""
        return gradient


def kind_of(node: Any) -> str:
    """Return ``"NllLoss"`` for ``NllLossBackward0``, ``"CopySlices"`` for ``torch::autograd::CopySlices``."""
    return _short(node.name())


@cache
def _short(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name.rpartition("::")[2])


def children_of(node: Any) -> list[tuple[Any, int]]:
    """Return the nodes whose results a node took, each with the number of the result."""
    return [(child, index) for child, index in node.next_functions if child is not None]


def shape_of(node: Any, index: int) -> tuple[int, ...]:
    """Return the shape of one of a node's results."""
    metadata = node._input_metadata
    return tuple(metadata[index].shape) if index < len(metadata) else ()


def leaf_of(node: Any) -> Tensor | None:
    """Return the tensor in which a gradient ends here, if it does."""
    return getattr(node, "variable", None)


def reduction_of(node: Any) -> str | None:
    """Return ``"mean"`` or ``"sum"`` for a node that takes one, by itself or as the end of a fused loss."""
    name = kind_of(node)
    if name in ("Mean", "Sum"):
        return name.lower()
    return {1: "mean", 2: "sum"}.get(getattr(node, "_saved_reduction", 0))  # torch's numbers for them


def signed(value: int) -> int:
    """Return a number that torch shows without its sign."""
    return value - (1 << 64) if value >= 1 << 63 else value


def nodes_below(node: Any, until: str = "") -> Iterator[Any]:
    """Go through a node and all below it, down to those that are marked."""
    seen, stack = {node}, [node]
    while stack:
        node = stack.pop()
        if until and until in node.metadata:
            continue
        yield node
        fresh = [child for child, _ in children_of(node) if child not in seen]
        seen.update(fresh)
        stack.extend(fresh)


def is_custom(node: Any) -> bool:
    """Whether a node is an ``autograd.Function`` of the user's own: some can be differentiated only once."""
    return isinstance(node, BackwardCFunction)


def is_own(node: Any) -> bool:
    """Whether a custom node is one of dphero's, from inside the model."""
    module = getattr(getattr(node, "_forward_cls", None), "__module__", "")
    return str(module).startswith("dphero.")


def output_edges(loss: Any) -> list[GradientEdge]:
    """Return what the model returned, as far as a loss depends on it."""
    return [GradientEdge(node, node.metadata[OUTPUT]) for node in nodes_below(loss) if OUTPUT in node.metadata]


def is_linear(node: Any) -> bool:
    """Whether a node's results are a linear function of what has a gradient."""
    name, below = kind_of(node), children_of(node)
    if name in PRODUCTS | _MATRIX_PRODUCTS:
        return len(below) == 1
    return name in LINEAR | SELECTING | _ADDING and name != "Sort"


def terms(loss: Any) -> list[tuple[Any, int]]:
    """Return the results, as (node, number), of which a loss is a linear function, and which are no such functions.

    A loss that is fused with its mean or sum is a function of what went into it: that is returned in its place, with
    the number -1.
    """
    found: dict[tuple[Any, int], None] = {}
    seen, stack = set(), [(loss, 0)]
    while stack:
        node, index = stack.pop()
        if (node, index) in seen:
            continue
        seen.add((node, index))
        fused = kind_of(node) not in ("Mean", "Sum") and reduction_of(node) is not None
        if OUTPUT not in node.metadata and children_of(node) and fused:
            found[node, -1] = None
        elif OUTPUT not in node.metadata and children_of(node) and is_linear(node):
            stack += children_of(node)
        elif leaf_of(node) is None:
            found[node, index] = None
    return list(found)


def fingerprint(loss: Any) -> int:
    """Return a number that stays the same while the loss consists of the same operations.

    It is a hash of the pairs of operations of which one takes the result of the other: a loop over the rows of a batch
    has the same ones whatever the number of rows.
    """
    pairs = set()
    seen: set[Any] = {loss}
    stack: list[tuple[Any, Any]] = [(loss, _describe(loss))]
    while stack:
        node, name = stack.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            marked = OUTPUT in child.metadata
            described = OUTPUT if marked else _describe(child)
            pairs.add((name, described))
            if child not in seen and not marked:
                seen.add(child)
                stack.append((child, described))
    return hash(frozenset(pairs))


def _describe(node: Any) -> tuple[Any, ...]:
    return (node.name(), *[getattr(node, name) for name in _options(cast(Any, type(node)))])


@cache
def _options(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in _OPTIONS if hasattr(kind, name))
