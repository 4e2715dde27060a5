"""Is the loss a mean (or a sum) over the examples? If not, one example moves the gradients of the others.

Losses are read before they are back-propagated: the first few, and a few more later on. The graph is followed from the
loss down to where the batch is summed or averaged. Above that place everything must be known to be linear: a root, a
product or a maximum of batch averages belongs to no example. At that place the reduction must be the declared one, and
the divisor must not depend on what the examples hold. Below it, up to the model's output, no statistic of the batch may
flow back to the examples; nor may examples be compared with each other in other ways, which second derivatives show
(:mod:`dphero.separable`). And the loss may train no parameter besides the model's. Other things that are not understood
are accepted: a check that cries wolf is soon switched off.

Not seen from here: examples that are mixed before the model (mixup), what is computed from several examples and enters
the loss as a constant, and what happens inside a function of the user's own.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map

from dphero.separable import company

__all__ = ["LossCheck"]

logger = logging.getLogger(__name__)

_FIRST = 4
"""Losses that are read one after the other; then the gaps double, since a loss may change.

A divisor that follows the data can agree with the number of rows by chance: not four times."""
_ROUNDING = 1e-4
"""How much of a second derivative rounding may bring about."""
_LOSS_SCALE = 256
"""From here on, a loss that is multiplied by a power of two is taken to be scaled for half precision."""

_LINEAR = {"Add", "Sub", "Rsub", "Neg", "Mul", "Div", "Clone", "ToCopy", "Alias", "View", "UnsafeView", "ReshapeAlias"}
_LINEAR |= {"Squeeze", "Unsqueeze", "Expand", "Stack", "Cat", "T", "Transpose", "Permute", "Repeat", "Flip", "Cumsum"}
_LINEAR |= {"CopyBackwards", "CopySlices", "IndexPut", "AsStrided", "Unbind", "Lerp", "Dot", "Mv"}
_PRODUCTS = {"Mul", "Div", "Dot", "Mv"}  # linear while but one of the factors has a gradient
_SELECTING = {"Index", "MaskedSelect", "Slice", "Select", "IndexSelect", "Gather", "Split", "SplitWithSizes", "Sort"}
_RANKING = {"Max", "Min", "Amax", "Amin", "Norm", "LinalgVectorNorm", "Logsumexp", "Std", "Var", "StdMean", "VarMean"}
_RANKING |= {"Prod", "Median", "Topk", "Kthvalue"}
_PAIRS = {"Mm", "Cdist", "EuclideanDist"}
_OUTPUT = "dphero.output"  # marks, in the graph, what the model returned, with its number among the node's outputs


class LossCheck:
    """Reads losses of a private model.

    The model's outputs, and what is computed from them, are then tensors of a subclass that does nothing but note
    ``backward()``.

    Args:
        module: The model.
        rows: Returns the number of rows of the batch in hand, or ``None`` while no private batch is in work.
        declared: ``"mean"`` or ``"sum"``: what the loss should be.
    """

    def __init__(self, module: nn.Module, rows: Callable[[], int | None], declared: str) -> None:
        self._module, self._rows, self._declared = module, rows, declared
        self._read = 0
        self._gap = self._left = 0  # outputs that are not watched after a loss was read; how many of them are to come
        self._unread = self._told = False  # whether an output is watched whose loss was not read; whether that was said
        self._divided_by_rows: int | None = None
        self._kind = _watched(self._check)

    def watch(self, output: Any) -> Any:
        """Return what the model returned, watched if the loss is to be read."""
        if (self._rows() or 1) < 2:  # with one row nothing can be told apart
            return output
        if self._left:
            self._left -= 1
            return output
        self._unread = True
        return tree_map(self._mark, output)

    def back_propagated(self) -> None:
        """Say, once, that a loss was back-propagated which could not be read."""
        if self._unread and not self._told:
            self._told = True
            logger.warning(
                "The loss could not be read (it was not loss.backward() that was called, or it comes from a scripted "
                "or custom function). It must be a mean over the examples, or a sum if loss_reduction says so: "
                "otherwise one example changes the gradients of the others, and the price is wrong."
            )
        self._unread = False

    def _mark(self, value: Any) -> Any:
        if type(value) is not Tensor or not value.requires_grad:
            return value
        watched = value.as_subclass(self._kind)
        node: Any = watched.grad_fn
        node.metadata[_OUTPUT] = watched.output_nr
        return watched

    def _check(self, loss: Tensor) -> None:
        self._unread = False
        rows = self._rows()
        if rows is None or rows < 2 or loss.grad_fn is None:
            return
        self._check_parameters(loss.grad_fn)
        walk = _Walk(rows, self._declared)
        walk.follow(loss.grad_fn)
        if walk.divided_by_rows:
            if self._divided_by_rows not in (None, rows):
                raise ValueError(
                    'the loss is a sum divided by the number of rows in the batch, but loss_reduction="sum" was '
                    'declared: declare loss_reduction="mean", or divide by a constant such as the expected batch size'
                )
            self._divided_by_rows = rows
        meeting = self._company(loss.as_subclass(Tensor), rows)
        if meeting > _ROUNDING:
            raise ValueError(
                "the loss compares the examples of a batch with each other (derivatives for one half of them depend on "
                f"the other half, by {meeting:.2g} of their change): it is no mean over examples, and one example "
                "changes the gradients of the others"
            )
        self._read += 1
        if self._read >= _FIRST:
            self._gap = self._left = 2 * self._gap or _FIRST

    def _company(self, loss: Tensor, rows: int) -> float:
        """Return how much examples meet in a loss, as far as that can be tried out without harm."""
        own = _nodes_below(loss.grad_fn, until=_OUTPUT)
        if any(isinstance(node, BackwardCFunction) for node in own):  # a function of the user's may work only once
            return 0.0
        outputs = [node for node in _nodes_below(loss.grad_fn) if _OUTPUT in node.metadata]
        return company(loss, [GradientEdge(node, node.metadata[_OUTPUT]) for node in outputs], rows, self._read)

    def _check_parameters(self, loss: Any) -> None:
        """Refuse a loss that trains other parameters too: nothing would be clipped, and no noise added."""
        own = {id(parameter) for parameter in self._module.parameters()}
        for node in _nodes_below(loss):
            parameter = _leaf(node)
            if isinstance(parameter, nn.Parameter) and id(parameter) not in own:
                raise ValueError(
                    f"the loss has a gradient for a parameter of shape {tuple(parameter.shape)} that is not the "
                    "private model's: whoever trains it would do so without privacy. Make it a part of the module "
                    "that is made private (the loss can be computed in its forward), freeze it, or detach() what comes "
                    "from it."
                )


def _watched(check: Callable[[Tensor], None]) -> type[Tensor]:
    """Make the class of tensors whose ``backward`` is announced to ``check``."""

    class WatchedTensor(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.backward:
                check(args[0])
            if func in (Tensor.backward, Tensor.__reduce_ex__, Tensor.__deepcopy__):
                return func(args[0].as_subclass(Tensor), *args[1:], **(kwargs or {}))
            result = super().__torch_function__(func, types, args, kwargs or {})
            plain = isinstance(result, cls) and not result.requires_grad
            return result.as_subclass(Tensor) if plain else result  # what is detached is the user's to keep

    return WatchedTensor


class _Walk:
    """One walk through the graph of a loss."""

    def __init__(self, rows: int, declared: str) -> None:
        self._rows, self._declared = rows, declared
        self._in_model = False
        self.divided_by_rows = False

    def follow(self, loss: Any) -> None:
        """Follow the nodes that no longer carry the batch, down to where it was summed or averaged.

        Args:
            loss: The last node of the graph.
        """
        todo: list[tuple[Any, tuple[float, ...], bool]] = [(loss, (), False)]
        while todo:  # with the constants that multiply a node above, and whether it is averaged above
            node, factors, averaged = todo.pop()
            kind, children = _kind(node), _children(node)
            self._in_model |= _OUTPUT in node.metadata  # a model that returns its loss
            reduction = _reduction(node) if children else None
            several = kind in _PRODUCTS and len(children) > 1
            linear = not several and (kind in _LINEAR or kind in _SELECTING)
            if children and (reduction or not linear or kind == "Sort") and not isinstance(node, BackwardCFunction):
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
                    self._check_scale(_shape(*children[0]), reduction, factors)
                    self._check_rows(*children[0], averaged)
                    self._check_company(children[0][0])
            if linear:
                factors += _factor(node, kind)
                todo += [(child, factors, averaged) for child, _ in children]

    def _is_of_the_batch(self, node: Any) -> bool:
        """Whether a node depends on more than one of the examples: a loss may be a loop over rows.

        All that has a gradient comes from the model, by its output or by another way, and so from the examples. But for
        a penalty on the weights themselves, which their guards refuse.
        """
        below = list(_nodes_below(node, until=_OUTPUT))
        if not self._in_model and any(isinstance(_leaf(each), nn.Parameter) for each in below):
            return False
        return not any(map(self._picks_one, below))

    def _is_reduced_before(self, node: Any, index: int) -> bool:
        """Whether the batch was summed or averaged further below: in ``losses.mean(0).sum()``, say."""
        return self._is_reduced_along(node) if self._carries(_shape(node, index)) else self._is_reduced(node)

    def _check_function(self, node: Any, kind: str) -> None:
        if self._reduces(node) or all(self._is_reduced(child) for child, _ in _children(node)):
            raise ValueError(
                f"the loss mixes examples: {kind} is applied to sums or means over the batch, so that one example "
                "changes the gradients of the others. Apply it to each example, then take the mean."
            )

    def _check_rows(self, node: Any, index: int, averaged: bool) -> None:
        some = any(map(self._selects, _nodes_below(node, until=_OUTPUT)))
        if averaged and some and not self._carries(_shape(node, index)):
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
        if reduction == "mean" and _kind(node).startswith("NllLoss"):
            ignored = _signed(node._saved_ignore_index)
            if node._saved_weight is not None:
                divisor = "is weighted by class and divided by the weights of all targets"
            elif bool((node._saved_target == ignored).any()):
                divisor = f"is divided by the number of targets that are not ignore_index={ignored}"
            else:
                return
            raise ValueError(
                f"the loss {divisor}: that divisor depends on the other examples. Use "
                'reduction="none", take the mean over each example\'s own targets, then over the examples; or use '
                'reduction="sum", divide by a public constant, and declare loss_reduction="sum".'
            )

    def _check_scale(self, shape: tuple[int, ...], reduction: str, factors: tuple[float, ...]) -> None:
        """Refuse a loss that a ``GradScaler`` has scaled.

        Args:
            shape: Of what is summed or averaged. A factor that divides its size turns means over an example into sums.
            reduction: ``"mean"`` or ``"sum"``.
            factors: The constants that multiply it.
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

    def _check_company(self, node: Any) -> None:
        """Refuse what lets examples meet between the model's output and the place where the batch is reduced."""
        if self._in_model:
            return
        for below in _nodes_below(node, until=_OUTPUT):
            kind, shape, children = _kind(below), _shape(below, 0), _children(below)
            meets = kind in _PAIRS and shape == (self._rows, self._rows) and len(children) > 1
            if kind in _RANKING | {"Mean", "Sum"}:
                meets = self._reduces(below)
            if kind in ("Softmax", "LogSoftmax"):
                meets = shape[:1] == (self._rows,) and _signed(below._saved_dim) in (0, -len(shape))
            if meets:
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
        reducing = _reduction(node) or _kind(node) in _RANKING
        return bool(reducing) and self._loses_batch(node)

    def _selects(self, node: Any) -> bool:
        return _kind(node) in _SELECTING and self._loses_batch(node)

    def _picks_one(self, node: Any) -> bool:
        """Whether one row is taken out of the batch: ``out[i]`` or ``out[i : i + 1]``."""
        if _kind(node) not in ("Select", "Unbind", "Slice") or _signed(node._saved_dim) != 0:
            return False
        return self._carries(_shape(*_children(node)[0])[:1]) and (_kind(node) != "Slice" or _shape(node, 0)[0] == 1)

    def _loses_batch(self, node: Any) -> bool:
        return any(self._carries(_shape(*child)) for child in _children(node)) and not self._carries(_shape(node, 0))

    def _is_reduced(self, node: Any) -> bool:
        """Whether the batch was reduced here or further below."""
        return any(map(self._reduces, _nodes_below(node, until=_OUTPUT)))

    def _is_reduced_along(self, node: Any) -> bool:
        """Whether the batch was reduced along the first axis, right below: ``losses.mean(0).sum()``."""
        while _kind(node) in _LINEAR | {"Mean", "Sum"} and _children(node):
            sizes: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", ())
            axes = getattr(node, "_saved_dim", None)
            along = isinstance(axes, tuple) and any(_signed(axis) in (0, -len(sizes)) for axis in axes)
            if _reduction(node) and along and sizes[0] % self._rows == 0:
                return True
            node = _children(node)[0][0]
        return False


def _kind(node: Any) -> str:
    """Return ``"NllLoss"`` for ``NllLossBackward0``."""
    return re.sub(r"Backward\d*$", "", node.name())


def _reduction(node: Any) -> str | None:
    kind = _kind(node)
    if kind in ("Mean", "Sum"):
        return kind.lower()
    return {1: "mean", 2: "sum"}.get(getattr(node, "_saved_reduction", 0))  # torch's numbers for them


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


def _leaf(node: Any) -> Tensor | None:
    """Return the tensor in which a gradient ends here, if it does."""
    return getattr(node, "variable", None)


def _children(node: Any) -> list[tuple[Any, int]]:
    return [(child, index) for child, index in node.next_functions if child is not None]


def _shape(node: Any, index: int) -> tuple[int, ...]:
    metadata = node._input_metadata
    return tuple(metadata[index].shape) if index < len(metadata) else ()


def _nodes_below(node: Any, until: str = "") -> Iterator[Any]:
    seen, stack = {node}, [node]
    while stack:
        node = stack.pop()
        if until and until in node.metadata:
            continue
        yield node
        fresh = [child for child, _ in _children(node) if child not in seen]
        seen.update(fresh)
        stack.extend(fresh)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value  # torch shows negative numbers without their sign
