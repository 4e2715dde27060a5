"""Is the batch reduced as declared, by a mean or a sum over the examples, and by nothing else?

The graph is followed from the loss down to where the batch is summed or averaged. Above that place everything must be
known to be linear: a root, a product or a maximum of batch averages belongs to no example. At that place the reduction
must be the declared one, and the divisor must not depend on what the examples hold. Below it, up to the model's output,
no statistic of the batch may flow back to the examples.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dphero.checks.loss.graph import (
    LINEAR,
    OUTPUT,
    PRODUCTS,
    SELECTING,
    children_of,
    is_custom,
    kind_of,
    leaf_of,
    nodes_below,
    reduction_of,
    shape_of,
    signed,
)

_LOSS_SCALE = 256
"""From here on, a loss that is multiplied by a power of two is taken to be scaled for half precision."""

_RANKING = {"Max", "Min", "Amax", "Amin", "Norm", "LinalgVectorNorm", "Logsumexp", "Std", "Var", "StdMean", "VarMean"}
_RANKING |= {"Prod", "Median", "Topk", "Kthvalue"}
_MOST_NODES = 64
"""How far to look for a cross entropy that ignores targets, from the loss down; it is near."""
_PAIRS = {"Mm", "Cdist", "EuclideanDist"}


class ReductionCheck:
    """One walk through the graph of a loss."""

    def __init__(self, rows: int, declared: str) -> None:
        self._rows, self._declared = rows, declared
        self._in_model = False
        self.divided_by_rows = False  # whether a sum is divided by the number of rows
        self.ignores_targets = False  # whether a cross entropy leaves out some targets, the same ones in every example

    def follow(self, loss: Any) -> None:
        """Follow the nodes that no longer carry the batch, from the last down to where it was summed or averaged."""
        todo: list[tuple[Any, tuple[float, ...], bool]] = [(loss, (), False)]
        while todo:  # with the constants that multiply a node above, and whether it is averaged above
            node, factors, averaged = todo.pop()
            kind, children = kind_of(node), children_of(node)
            self._in_model |= OUTPUT in node.metadata  # a model that returns its loss
            reduction = reduction_of(node) if children else None
            several = kind in PRODUCTS and len(children) > 1
            linear = not several and (kind in LINEAR or kind in SELECTING)
            if children and (reduction or not linear or kind == "Sort") and not is_custom(node):
                if not self._is_of_the_batch(node):
                    continue
                averaged = averaged or reduction == "mean"
                if not reduction:
                    self._check_function(node, kind)
                elif self._is_reduced_before(*children[0]):
                    if kind not in ("Mean", "Sum"):
                        self._check_function(node, kind)
                    todo.append((children[0][0], factors, averaged))
                else:
                    self._check_reduction(node, reduction, factors)
                    self._check_scale(shape_of(*children[0]), reduction, factors)
                    self._check_rows(*children[0], averaged)
                    self._check_coupling(children[0][0])
            if linear:
                factors += _factor(node, kind)
                todo += [(child, factors, averaged) for child, _ in children]

    def _is_of_the_batch(self, node: Any) -> bool:
        """Whether a node depends on more than one of the examples: a loss may be a loop over rows.

        All that has a gradient comes from the model, by its output or by another way, and so from the examples. But for
        a penalty on the weights themselves, which their guards refuse.
        """
        below = list(nodes_below(node, until=OUTPUT))
        if not self._in_model and any(isinstance(leaf_of(each), nn.Parameter) for each in below):
            return False
        return not any(map(self._picks_one, below))

    def _is_reduced_before(self, node: Any, index: int) -> bool:
        """Whether the batch was summed or averaged further below: in ``losses.mean(0).sum()``, say."""
        return self._is_reduced_along(node) if self._carries(shape_of(node, index)) else self._is_reduced(node)

    def _check_function(self, node: Any, kind: str) -> None:
        if self._reduces(node) or all(self._is_reduced(child) for child, _ in children_of(node)):
            raise ValueError(
                f"the loss mixes examples: {kind} is applied to sums or means over the batch, so that one example "
                "changes the gradients of the others. Apply it to each example, then take the mean."
            )

    def _check_rows(self, node: Any, index: int, averaged: bool) -> None:
        some = any(map(self._selects, nodes_below(node, until=OUTPUT)))
        if averaged and some and not self._carries(shape_of(node, index)):
            raise ValueError(
                "the loss is a mean over some of the batch's rows: its divisor depends on the other examples. "
                "Multiply by a mask and take the mean over all rows, or take the mean of each example's own values "
                "first."
            )

    def _check_reduction(self, node: Any, reduction: str, factors: tuple[float, ...]) -> None:
        by_rows = any(self._is_multiple(1 / factor) for factor in factors if factor)
        times_rows = any(self._is_multiple(factor) for factor in factors)
        if self._declared == "mean" and reduction == "sum" and not by_rows:
            divided = " and divided by something else than the number of rows" if factors else ""
            raise ValueError(
                f'the loss is a sum over the examples{divided}, but loss_reduction="mean" was declared. Take the mean '
                "over the rows, or divide by a public constant (if at all) and call make_private with "
                'loss_reduction="sum".'
            )
        if self._declared == "sum" and reduction == "mean" and not times_rows:
            raise ValueError(
                'the loss is a mean over the examples, but loss_reduction="sum" was declared. Take the sum, or call '
                'make_private with loss_reduction="mean".'
            )
        self.divided_by_rows |= self._declared == "sum" and reduction == "sum" and by_rows
        if reduction == "mean" and kind_of(node).startswith("NllLoss"):
            if node._saved_weight is not None:
                raise ValueError(
                    "the loss is weighted by class and divided by the weights of all targets: that divisor depends on "
                    'the other examples. Use reduction="none", take the mean over each example\'s own targets, then '
                    'over the examples; or use reduction="sum", divide by a public constant, and declare '
                    'loss_reduction="sum".'
                )
            if _ignores_targets(node):
                require_same_targets(node, self._rows)
                self.ignores_targets = True

    def _check_scale(self, shape: tuple[int, ...], reduction: str, factors: tuple[float, ...]) -> None:
        """Refuse a loss that a ``GradScaler`` has scaled.

        ``shape`` is that of what is summed or averaged: a factor that divides its size turns means over an example into
        sums.
        """
        scales = [math.prod(factors), *factors]
        if reduction != self._declared:  # one of the factors is the number of rows, or its inverse
            scales = [scales[0] * self._rows if reduction == "sum" else scales[0] / self._rows]
        for scale in filter(_is_loss_scale, scales):
            if math.prod(shape) // self._rows % round(scale):
                raise ValueError(
                    f"the loss is multiplied by {scale:g}, as by loss scaling (GradScaler). Private gradients are "
                    "clipped, so that the scale is lost, and unscaling makes each update that much smaller. Train "
                    "without a scaler, with bfloat16 if need be."
                )

    def _check_coupling(self, node: Any) -> None:
        """Refuse what couples examples between the model's output and the place where the batch is reduced."""
        if self._in_model:
            return
        for below in nodes_below(node, until=OUTPUT):
            kind, shape, children = kind_of(below), shape_of(below, 0), children_of(below)
            couples = kind in _PAIRS and shape == (self._rows, self._rows) and len(children) > 1
            if kind in _RANKING | {"Mean", "Sum"}:
                couples = self._reduces(below)
            if kind in ("Softmax", "LogSoftmax"):
                couples = shape[:1] == (self._rows,) and signed(below._saved_dim) in (0, -len(shape))
            if couples:
                raise ValueError(
                    f"the loss compares the examples of a batch with each other ({kind} over all of them): it is no "
                    "mean over examples, and one example changes the gradients of the others"
                )

    def _is_multiple(self, number: float) -> bool:
        """Whether a number is the number of rows, or a multiple of it (rows times tokens, say)."""
        times = number / self._rows
        return times > 0.5 and math.isclose(times, round(times), rel_tol=1e-5)

    def _carries(self, shape: tuple[int, ...]) -> bool:
        return any(size % self._rows == 0 for size in shape)

    def _reduces(self, node: Any) -> bool:
        """Whether the batch goes in and does not come out: it was summed, averaged or ranked."""
        reducing = reduction_of(node) or kind_of(node) in _RANKING
        return bool(reducing) and self._loses_batch(node)

    def _selects(self, node: Any) -> bool:
        return kind_of(node) in SELECTING and self._loses_batch(node)

    def _picks_one(self, node: Any) -> bool:
        """Whether one row is taken out of the batch: ``out[i]`` or ``out[i : i + 1]``."""
        if kind_of(node) not in ("Select", "Unbind", "Slice") or signed(node._saved_dim) != 0:
            return False
        return self._carries(shape_of(*children_of(node)[0])[:1]) and (
            kind_of(node) != "Slice" or shape_of(node, 0)[0] == 1
        )

    def _loses_batch(self, node: Any) -> bool:
        return any(self._carries(shape_of(*child)) for child in children_of(node)) and not self._carries(
            shape_of(node, 0)
        )

    def _is_reduced(self, node: Any) -> bool:
        """Whether the batch was reduced here or further below."""
        return any(map(self._reduces, nodes_below(node, until=OUTPUT)))

    def _is_reduced_along(self, node: Any) -> bool:
        """Whether the batch was reduced along the first axis, right below: ``losses.mean(0).sum()``."""
        while kind_of(node) in LINEAR | {"Mean", "Sum"} and children_of(node):
            sizes: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", ())
            axes = getattr(node, "_saved_dim", None)
            along = isinstance(axes, tuple) and any(signed(axis) in (0, -len(sizes)) for axis in axes)
            if reduction_of(node) and along and sizes[0] % self._rows == 0:
                return True
            node = children_of(node)[0][0]
        return False


def _factor(node: Any, kind: str) -> tuple[float, ...]:
    """Return the constant by which a node multiplies, if it does."""
    if kind not in ("Mul", "Div"):
        return ()
    constants = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
    values = [float(c) for c in constants if c is not None and (not isinstance(c, Tensor) or c.numel() == 1)]
    return tuple(1 / value if kind == "Div" and value else value for value in values[:1])


def _is_loss_scale(number: float) -> bool:
    """Whether a number is a large power of two, up to rounding."""
    fraction, _ = math.frexp(number)
    return number > 0.9 * _LOSS_SCALE and any(math.isclose(fraction, power, rel_tol=1e-5) for power in (0.5, 1.0))


# -- cross entropy that ignores some targets -----------------------------------------------------------------------
# Its mean is over those that are left, in all examples together, so its divisor depends on all examples, unless each of
# them ignores the same places. Language models do that: the last word of a block has no next one (``labels=`` in
# transformers, with blocks that are full).


def _ignores_targets(node: Any) -> bool:
    """Tell whether a node is a cross entropy that leaves out some targets."""
    return kind_of(node).startswith("NllLoss") and bool((node._saved_target == signed(node._saved_ignore_index)).any())


def require_same_targets(loss: Any, rows: int) -> None:
    """Refuse a mean over targets of which examples ignore different ones: its divisor depends on what they hold."""
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
