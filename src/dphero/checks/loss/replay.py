"""Compute a loss again with other examples in place of some: the gradients of the rest must not change.

What is computed from several examples and enters a loss as a constant (class weights counted in the batch, a median of
detached losses, a divisor) leaves no trace in the graph. So the calls that were written down between the loader and
``backward()`` (:mod:`dphero.checks.loss.recorder`) are made again, with copies of one example in place of half of them:
in the tensors of the batch and in the model's outputs alike. For the examples that stay,

* what the model is called with may not change (else they are mixed before the model), and
* the gradient of the loss at the model's outputs may not change.

First everything is repeated with nothing replaced: if that does not give the loss that the user has, nothing can be
said, and the statement says so. Values that leave torch (``item()``, ``if loss > 1``) cannot be followed. Most of them
are only shown to somebody; they matter if numbers that enter the loss from outside change from batch to batch too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dphero.checks.loss.calls import Call
from dphero.checks.loss.coupling import halves
from dphero.checks.loss.recorder import Recorder
from dphero.checks.loss.repetition import SLACK, RepeatedPass, Repetition, set_aside
from dphero.checks.loss.unseen import STEERED, Constants, ancestors, constants_of, limits_of, not_repeated
from dphero.numerics.compare import axis_of_rows, by_row, is_short, marks, same_marks

_REPLACEMENTS = 6
"""How often a loss is computed again."""
_SLACK_OF_HALVES = 1e-2
"""Relative change of a row that rounding may bring about in float16 and bfloat16."""
_SOME = 1 << 22
"""So many numbers are compared at a time: copies of all of a language model's logits would take memory."""
_UNEVEN = {"_standard_gamma", "poisson", "binomial", "_sample_dirichlet", "geometric_", "_sample_poisson"}
"""Random functions that draw more or fewer numbers by the values of their arguments, so that others shift."""


@dataclass(frozen=True)
class Findings:
    """What could not be found out about a loss."""

    notes: list[str]  # sentences for the statement
    constants: Constants | None = None  # what entered from outside torch, if something of the batch had left it before


def compare_losses(
    recorder: Recorder,
    loss: Tensor,
    gradient: Tensor | None,
    actual: Callable[[], Sequence[Tensor | None]],
    number: int,
) -> Findings:
    """Compute the loss again with other examples, chosen by ``number``; return what could not be found out.

    ``actual`` computes the gradients of the loss at the model's outputs, in the order of the sources that have a place
    in the graph. None are kept: of a language model they take as much memory as its outputs.

    Raises:
        ValueError: If examples change the gradients of others.
    """
    target = recorder.number(loss)
    if target is None:
        return Findings([not_repeated("it was not computed by torch functions alone")])
    if recorder.trouble:
        return Findings([not_repeated(recorder.trouble)])
    if not all(source.holds() for source in recorder.sources):
        return Findings([not_repeated("the model was called again, or back-propagated, since it returned its outputs")])
    needed = ancestors(recorder, target)
    if recorder.earlier & needed:
        raise ValueError(
            "the loss uses values that were computed from an earlier batch (a queue of keys, a running average of "
            "losses or counts). They hold private examples, and no noise was added to them. Use only what comes from "
            "the batch in hand, from the model, or from public data."
        )
    repetition = Repetition(recorder, target, gradient)
    expected = [marks(each, recorder.rows) for each in actual()]
    plain = repetition.run(torch.arange(recorder.rows), None)
    if plain is None or not _same_loss(plain, loss, expected, actual):
        return Findings([not_repeated("computing it a second time gave something else")])
    plain.gradients.clear()
    tried, changed, uneven = 0, set(), False
    for half, row in _replacements(recorder, number):
        index = torch.arange(recorder.rows)
        index[half] = row
        other = repetition.run(index, plain)
        if other is not None:
            tried += 1
            changed |= {place for place, value in plain.python.items() if not _equal(value, other.python[place])}
            uneven |= not _compare(repetition, plain, other, index)
        del other  # before the next one is made
    places = [place for place, call in enumerate(recorder.calls) if isinstance(call, Call) and call.made & needed]
    taken = [recorder.calls[place] for place in changed if place < max(places)]
    notes = limits_of(recorder, needed)
    if not tried:
        notes.append(not_repeated("with other examples it ends in an error"))
    if uneven:
        notes.append(not_repeated("other examples draw other random numbers"))
    if any(isinstance(call, Call) and isinstance(call.value, bool) for call in taken):
        notes.append(STEERED)
    return Findings(notes, constants_of(recorder, needed) if taken or recorder.arrays else None)


def _replacements(recorder: Recorder, number: int) -> Iterator[tuple[Tensor, int]]:
    """Yield which examples are replaced, and by which one: by those that stand out, since they move statistics most."""
    rows = recorder.rows
    standing_out: dict[int, None] = {}
    carrying = [source for source in recorder.sources if source.axis is not None and source.value.numel()]
    for source in sorted(carrying, key=lambda each: each.value.numel()):
        if not source.value.is_complex():
            columns = by_row(source.value, source.axis or 0, rows).split(max(1, _SOME // rows), 1)
            sums = torch.stack([some.double().nan_to_num().sum(1) for some in columns]).sum(0)
            standing_out |= {int(sums.argmax()): None, int(sums.argmin()): None}
    chosen = [*standing_out, *range(rows)][:_REPLACEMENTS]
    first, second = halves(rows, number)
    for position, row in enumerate(chosen):
        yield (first, second, ~first, ~second)[position % 4], row


def _compare(repetition: Repetition, plain: RepeatedPass, other: RepeatedPass, index: Tensor) -> bool:
    """Raise if what belongs to the examples that stay is not as it was; return whether that can be said."""
    recorder = repetition.recorder
    names = {call.name for call in recorder.calls if isinstance(call, Call)}
    if names & _UNEVEN:
        return False
    random = any(isinstance(call, Call) and call.random is not None for call in recorder.calls)
    orders = other.orders
    if any(bool((order < 0).any()) or not torch.equal(order, orders[0]) for order in orders):
        if random and any("sort" in name or name == "topk" for name in names):
            return False
        raise ValueError(
            "examples are mixed before they reach the model (mixup, a second call on other examples or in another "
            "order, standardising by the batch): where some are replaced, what the model is called with changes for "
            "the others. One example would change the gradients of others. Mix only what is public, and standardise by "
            "public numbers."
        )
    order = orders[0] if orders else index
    in_place = torch.equal(order, index)
    if random and not in_place:
        return False
    rows = order == torch.arange(len(order)) if in_place else torch.ones_like(order, dtype=torch.bool)
    if all(same_marks(*pair, order, rows) for pair in zip(plain.marks, other.marks, strict=True)):
        return True
    if not plain.gradients:  # made again, and kept from now on: rounding may differ for the others too
        again = repetition.run(torch.arange(recorder.rows), None)
        if again is None:
            return False
        plain.gradients = [set_aside(each) for each in again.gradients]
    for first, second in zip(plain.gradients, other.gradients, strict=True):
        if first is None and second is None:
            continue
        shape = first if first is not None else second
        assert shape is not None
        zero = torch.zeros((), dtype=shape.dtype, device=shape.device).expand(shape.shape)  # no memory
        one, two = (zero if each is None else each for each in (first, second))
        how = _change(one, two, order, rows)
        if how > 0:
            raise ValueError(
                "the loss treats an example by the others of its batch: where some examples are replaced, the "
                f"gradients of those that stay change, by {how:.2g} of their size. Something that is computed from the "
                "whole batch enters it as a constant: class weights or a divisor counted in the batch, a threshold or "
                "median, keys of other examples, the loss's own value. Use public constants instead."
            )
    return True


def _change(first: Tensor, second: Tensor, order: Tensor, which: Tensor) -> float:
    """Return by how much rows ``which`` have changed, relative to their size; 0 if that is rounding.

    ``order`` says, for each row of ``second``, which row of ``first`` it is.
    """
    rows = len(order)
    axis = axis_of_rows(first, rows)
    if first.shape != second.shape or axis is None or first.is_complex():
        return 0.0
    device, gaps, sizes, finite = second.device, [], [], []
    columns = (by_row(each, axis, rows).split(max(1, _SOME // rows), 1) for each in (first, second))
    for one, two in zip(*columns, strict=True):
        one = one[order.to(one.device)][which.to(one.device)].to(device).double()
        two = two[which.to(device)].double()
        finite.append(one.isfinite().all(1) & two.isfinite().all(1))
        gaps.append((one - two).abs().amax(1))
        sizes.append(torch.maximum(one.abs().amax(1), two.abs().amax(1)))
    if not finite or not bool((kept := torch.stack(finite).all(0)).any()):
        return 0.0
    gap, size = (torch.stack(each).amax(0)[kept] for each in (gaps, sizes))
    scale = size + 1e-9 * float(size.max())
    share = torch.where(gap > 0, gap / scale.clamp(min=torch.finfo(torch.float64).tiny), 0)
    largest = float(share.max())
    return largest if largest > (_SLACK_OF_HALVES if is_short(first) else SLACK) else 0.0


def _same_loss(
    plain: RepeatedPass,
    loss: Tensor,
    expected: list[Tensor | None],
    actual: Callable[[], Sequence[Tensor | None]],
) -> bool:
    first, second = plain.loss.double(), loss.detach().as_subclass(Tensor).double()
    if first.shape != second.shape or not torch.allclose(first, second, rtol=1e-2, atol=1e-30, equal_nan=True):
        return False
    if all(same_marks(*pair) for pair in zip(plain.marks, expected, strict=True)):
        return True
    for one, two in zip(plain.gradients, actual(), strict=True):
        if one is None or two is None:
            if one is not two and _largest(one if one is not None else two) > 0:
                return False
            continue
        size = _largest(two)
        if math.isfinite(size) and _largest_gap(one, two) > 1e-2 * size:
            return False
    return True


def _largest(tensor: Tensor | None) -> float:
    """Return the largest absolute value; without the memory that ``abs`` takes."""
    return float(torch.linalg.vector_norm(tensor, ord=math.inf)) if tensor is not None and tensor.numel() else 0.0


def _largest_gap(first: Tensor, second: Tensor) -> float:
    parts = zip(first.reshape(-1).split(_SOME), second.reshape(-1).split(_SOME), strict=True)
    return max((float((one - two.to(one.device)).abs().max()) for one, two in parts if len(one)), default=0.0)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and np.array_equal(first, second)
    try:
        return type(first) is type(second) and bool(first == second)
    except (RuntimeError, ValueError):
        return False
