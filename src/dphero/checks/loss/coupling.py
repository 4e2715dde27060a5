"""Does a term of the loss depend on more than one example? Its derivatives tell.

A loss is a sum (or mean) over terms: the entries of the last tensors of which it is a linear function. It is a sum over
examples if each of these terms depends on one example alone. So the model's outputs are moved for one half of the
examples, then for the other half, and each term may change with one of the two only (:func:`coupling`). That needs no
second derivatives, which hinges, distances and ranks do not have; and no knowledge of where the terms carry the
examples. Second derivatives see what is not made of such terms, as a cumulative sum (:func:`coupling_strength`).

Not seen: what enters a loss as a constant (:mod:`dphero.checks.loss.replay` does).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dphero.checks.loss.graph import OUTPUT, children_of, kind_of, output_edges, shape_of, signed, terms
from dphero.numerics.compare import distinct_numbers

_BY_ROW = ("NllLoss", "MultiMargin", "MultilabelMargin")
"""Fused losses that take all columns of a row together; the others take one entry with its target."""
_SOME = 1 << 22
"""Terms that are compared at once."""


def halves(rows: int, number: int) -> list[Tensor]:
    """Return two ways to part the rows in halves, as masks.

    Of numbers 0, 1, .. up to log2 of the rows, the first way parts any two rows at one of them. The second is random,
    so that of many pairs, however they are arranged, about half are parted.
    """
    bits = (torch.arange(rows) >> number % max(1, math.ceil(math.log2(rows)))) % 2 == 0
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(number))
    return [bits, order < rows // 2]


def coupling(loss: Any, rows: int, number: int) -> float:
    """Return by how much a term of the loss depends on two examples: 0 where not at all, at most 1.

    ``loss`` is the last node of its graph, which can still be back-propagated afterwards; ``number`` says which halves
    of the examples are told apart.
    """
    placed = [(edge, axes) for edge in output_edges(loss) if (axes := _axes(_edge_shape(edge), rows))]
    nodes = terms(loss)
    ends = [_edges(node, index) for node, index in nodes]
    if not placed or not any(ends):
        return 0.0
    found, ways = [], halves(rows, number)
    for way in sorted({0, *(len(axes) - 1 for _, axes in placed)}):
        outputs = [(edge, axes[min(way, len(axes) - 1)]) for edge, axes in placed]
        try:
            found.append(_coupled(ends, nodes, outputs, ways))
        except (RuntimeError, NotImplementedError):  # some functions can be differentiated but once
            found.append(max(_coupled_backwards(ends, outputs, half) for half in ways))
    return min(found)  # where there are as many examples as columns, only what is coupled either way counts


def coupling_strength(loss: Tensor, outputs: Sequence[GradientEdge], rows: int, number: int) -> float:
    """Return how strongly second derivatives couple the examples: 0 if not at all or if there are none, at most 1.

    A loss L(z_1, .. z_n) of what the model returned for each example is a sum over examples if and only if no
    derivative with respect to z_i depends on z_j. So the derivatives for one half of the examples are combined to a
    number, with weights that tell them apart, and that number is differentiated with respect to the other half: nothing
    may come out. The loss can still be back-propagated afterwards.
    """
    placed = [(edge, axes[0]) for edge in outputs if len(axes := _axes(_edge_shape(edge), rows)) == 1]
    if not placed:
        return 0.0
    edges, axes = [edge for edge, _ in placed], [axis for _, axis in placed]
    half, _ = halves(rows, number)
    try:
        first = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
        combined = [part for part in _parts(first, axes, half) if part.requires_grad]
        if not combined:
            return 0.0
        number_of_half = torch.stack([(part.float() * distinct_numbers(part)).sum() for part in combined]).sum()
        second = torch.autograd.grad(number_of_half, edges, retain_graph=True, allow_unused=True)
    except (RuntimeError, NotImplementedError):  # some functions have no second derivative
        return 0.0
    others, own = ([_largest(part) for part in _parts(second, axes, which)] for which in (~half, half))
    found, scale = max(others, default=0.0), max([*others, *own], default=0.0)
    return found / scale if found > 0.0 and math.isfinite(scale) else 0.0


def _coupled(
    ends: list[list[GradientEdge]],
    nodes: list[tuple[Any, int]],
    outputs: list[tuple[GradientEdge, int]],
    ways: list[Tensor],
) -> float:
    """Move the outputs of one half, then of the other, and see which terms answer.

    The change of the terms, J w, is the derivative of wᵀ(Jᵀ v) with respect to v: two passes of ordinary autograd.
    """
    flat = [edge for edges in ends for edge in edges]
    probes = [_zeros(edge).detach().requires_grad_() for edge in flat]
    edges, axes = [edge for edge, _ in outputs], [axis for _, axis in outputs]
    back = torch.autograd.grad(flat, edges, probes, create_graph=True, allow_unused=True)
    weighted = [
        None if each is None or not each.requires_grad else each * distinct_numbers(each).to(each.dtype)
        for each in back
    ]
    del back
    if all(each is None for each in weighted):
        return 0.0
    kinds = [kind_of(node) if index < 0 else "" for node, index in nodes]
    return max(_strongest_pair(weighted, axes, half, probes, ends, kinds) for half in ways)


def _strongest_pair(
    weighted: Sequence[Tensor | None],
    axes: Sequence[int],
    half: Tensor,
    probes: Sequence[Tensor],
    ends: list[list[GradientEdge]],
    kinds: Sequence[str],
) -> float:
    """Return the largest share that the weaker of two halves of the outputs has in a term."""
    answers = []
    for which in (half, ~half):
        total = torch.stack([part.sum().double() for part in _parts(weighted, axes, which)]).sum()
        answers.append(list(torch.autograd.grad(total, probes, retain_graph=True, allow_unused=True)))
    largest, position = 0.0, 0
    for kind, own in zip(kinds, ends, strict=True):
        parts = [[each for each in answer[position : position + len(own)] if each is not None] for answer in answers]
        position += len(own)
        if all(parts) and len({each.shape for part in parts for each in part}) == 1:
            first, second = (_terms(part, kind) for part in parts)
            shares = (_weaker_share(_sizes(one), _sizes(two)) for one, two in zip(first, second, strict=True))
            largest = max(largest, *shares, 0.0)
    return largest


def _weaker_share(first: Tensor, second: Tensor) -> float:
    """Return the largest share that the weaker of two influences has in an entry."""
    small, large = torch.minimum(first, second), torch.maximum(first, second)
    share = torch.where((small > 0) & large.isfinite(), small / large, 0)
    return float(share.max()) if share.numel() else 0.0


def _terms(answers: Sequence[Tensor], fused: str) -> Iterator[list[Tensor]]:
    """Yield what makes up the answers of some terms: a language model has as many as logits.

    What goes into a fused loss together is one term.
    """
    if fused.startswith(_BY_ROW) and answers[0].dim() == 2:
        yield [torch.linalg.vector_norm(each.detach(), 1, dim=1, dtype=torch.double) for each in answers]
        return
    whole = [each.detach() if each.dim() else each.detach().view(1) for each in answers]
    count = max(1, _SOME // max(1, whole[0][:1].numel()))
    yield from map(list, zip(*(each.split(count) for each in whole), strict=True))


def _sizes(answers: Sequence[Tensor]) -> Tensor:
    """Return how strongly each term answers."""
    return torch.stack([each.abs().double() for each in answers]).sum(0)


def _coupled_backwards(ends: list[list[GradientEdge]], outputs: list[tuple[GradientEdge, int]], half: Tensor) -> float:
    """Go the other way: what flows back from one half of the rows may not reach the outputs that the rest reaches."""
    largest = 0.0
    for edge in [edge for edges in ends for edge in edges]:
        size = _edge_shape(edge)
        if not size or size[0] != len(half):
            continue
        reached = []
        for which in (half, ~half):
            cotangent = _zeros(edge).contiguous()
            cotangent[which.to(cotangent.device)] = 1.0
            cotangent *= distinct_numbers(cotangent)
            edges = [each for each, _ in outputs]
            back = torch.autograd.grad([edge], edges, [cotangent], retain_graph=True, allow_unused=True)
            rows = [
                gradient.detach().abs().double().movedim(axis, 0).flatten(1).sum(1)
                for gradient, (_, axis) in zip(back, outputs, strict=True)
                if gradient is not None
            ]
            reached.append(torch.stack(rows).sum(0) if rows else torch.zeros(len(half)))
        largest = max(largest, _weaker_share(*reached))
    return largest


def _edges(node: Any, index: int) -> list[GradientEdge]:
    pairs = children_of(node) if index < 0 else [(node, index)]
    return [GradientEdge(each, number) for each, number in pairs if _is_floating(each, number)]


def _is_floating(node: Any, index: int) -> bool:
    metadata = node._input_metadata
    return index < len(metadata) and metadata[index].dtype.is_floating_point


def _edge_shape(edge: GradientEdge) -> tuple[int, ...]:
    return shape_of(edge.node, edge.output_nr)


def _axes(sizes: Sequence[int], rows: int) -> list[int]:
    """Return where the examples can be."""
    return [axis for axis, size in enumerate(sizes[:2]) if size == rows]


def _zeros(edge: GradientEdge) -> Tensor:
    node: Any = edge.node
    metadata = node._input_metadata[edge.output_nr]
    return torch.zeros((), dtype=metadata.dtype, device=metadata.device).expand(tuple(metadata.shape))  # no memory


def _parts(tensors: Sequence[Tensor | None], axes: Sequence[int], which: Tensor) -> Iterator[Tensor]:
    for tensor, axis in zip(tensors, axes, strict=True):
        if tensor is not None:
            yield tensor.index_select(axis, which.nonzero()[:, 0].to(tensor.device))


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


# -- losses that are read off the graph --------------------------------------------------------------------------------
# That of a language model has as many terms as logits, and second derivatives take some six times the memory of these.

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
    if kind_of(node) == "ToCopy" and OUTPUT not in node.metadata:  # on a GPU, autocast sums up in float32
        node, index = children_of(node)[0]
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
