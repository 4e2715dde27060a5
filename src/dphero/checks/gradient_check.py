"""A dress rehearsal: one tapped backward pass on a few rows, compared with ordinary autograd.

Whatever cannot be tapped is refused here, before training; and a layer rule whose gradients, added up over
the examples, are not those of autograd is found out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dphero.batch_axis.plan import AxisPlan, UnknownCallError
from dphero.functional.custom import custom_code_followed
from dphero.functional.unbatched import UnbatchedTensor, plain
from dphero.geometry.geometry import identity
from dphero.gradients.batch import GradientBatch
from dphero.hooks.snapshot import ModelSnapshot
from dphero.hooks.tape import Tape
from dphero.numerics.trees import tree_flatten

if TYPE_CHECKING:
    from dphero.hooks.taps import Taps

__all__ = ["compare_with_autograd", "gradient_norms"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_TOLERANCE = 2e-2
_SHORT_TOLERANCE = 0.2
"""In bfloat16 and float16."""


def compare_with_autograd(
    taps: Taps, plan: AxisPlan, snapshot: ModelSnapshot, call: Arguments, rows: int, *, random: bool
) -> None:
    """Run one backward pass through the taps, and check what it finds.

    Args:
        taps: The taps of the model.
        plan: Where its calls carry the examples.
        snapshot: Puts the model back as it was.
        call: Arguments of the model.
        rows: The number of examples in them.
        random: Whether the model draws random numbers. Layer rules may draw others than the layers themselves: then it
            is compared in evaluation mode alone.

    Raises:
        ValueError: If output or gradients are not those of ordinary autograd.
    """
    _compare(taps, plan, snapshot, call, rows, training=True, random=random)
    if random:
        try:
            _compare(taps, plan, snapshot, call, rows, training=False)
        except UnknownCallError:
            return  # other calls in evaluation mode: nothing to compare with


def gradient_norms(
    taps: Taps,
    plan: AxisPlan,
    snapshot: ModelSnapshot,
    call: Arguments,
    rows: int,
    batched: Sequence[bool],
    only: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """Return the norm of each example's gradient, by parameter, of a number that outputs make up.

    It is no linear function of outputs that carry the examples (``batched``), so that what flows back differs from
    example to example. Of others it is: a mean over the examples may be among them.

    Args:
        taps: The taps of the model.
        plan: Where its calls carry the examples.
        snapshot: Puts the model back as it was.
        call: Arguments of the model.
        rows: The number of examples in them.
        batched: Which of the floating-point outputs carry the examples.
        only: The numbers of the outputs that make up the number; left out, all.
    """
    with snapshot.restored_afterwards():
        found, _ = _tapped(taps, plan, call, rows, _parameters(taps), batched, only)
    return {name: norms.sqrt() for batch in found for name, norms in batch.square_norms.items()}


def _compare(
    taps: Taps,
    plan: AxisPlan,
    snapshot: ModelSnapshot,
    call: Arguments,
    rows: int,
    *,
    training: bool,
    random: bool = False,
) -> None:
    owners = {name: hooked.label for hooked in taps.hooked_modules for name in hooked.names.values()}
    parameters = _parameters(taps)
    with snapshot.restored_afterwards():
        if not training:
            taps.module.eval()
        found, out = _tapped(taps, plan, call, rows, parameters)
    with snapshot.restored_afterwards(), taps.paused(), custom_code_followed():
        if not training:
            taps.module.eval()
        expected_out = _floats(taps.root_forward(*call[0], **call[1]))
        objective = _objective(
            [y for x, y in zip(out, expected_out, strict=True) if not isinstance(x, UnbatchedTensor)]
        )
        expected = {} if objective is None else _gradients(objective, parameters)
    short = any(value.dtype in (torch.float16, torch.bfloat16) for value in (*parameters.values(), *expected_out))
    tolerance = _SHORT_TOLERANCE if short else _TOLERANCE
    if any(_difference(plain(x), y) > tolerance for x, y in zip(out, expected_out, strict=True)):
        if random:
            return
        raise ValueError("the tapped model computes another output than the model itself: a registered rule is wrong")
    largest = max(map(_largest, expected.values()), default=0.0)
    for name, parameter in parameters.items():  # one at a time: a gradient is as large as its parameter
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        pair = (_sum(found, name, zero), expected.pop(name, zero))
        if _difference(*pair, floor=1e-3 * largest) > tolerance:
            if random and not _shows_random_numbers(taps, snapshot, call, expected_out):
                return  # the layers may have drawn other numbers, unseen; evaluation mode decides
            raise ValueError(
                f"parameter {name!r} of {owners[name]}: the taps found another gradient than autograd. Its layer rule "
                "is wrong, or the model's code reaches the parameter by another way than the attribute of its module."
            )


def _shows_random_numbers(taps: Taps, snapshot: ModelSnapshot, call: Arguments, out: list[Tensor]) -> bool:
    """Tell whether the output changes with the random numbers: not so behind dropout, if the last layer is zero."""
    with snapshot.restored_afterwards(seed=1), taps.paused(), custom_code_followed(), torch.no_grad():
        other = _floats(taps.root_forward(*call[0], **call[1]))
    return any(not torch.equal(x, y) for x, y in zip(out, other, strict=True))


def _parameters(taps: Taps) -> dict[str, nn.Parameter]:
    return {name: hooked.parameters[local] for hooked in taps.hooked_modules for local, name in hooked.names.items()}


def _tapped(
    taps: Taps,
    plan: AxisPlan,
    call: Arguments,
    rows: int,
    parameters: Mapping[str, nn.Parameter],
    curved: Sequence[bool] = (),
    only: Sequence[int] | None = None,
) -> tuple[list[GradientBatch], list[Tensor]]:
    """Return the gradients that the taps find (none, or one batch of them), and the outputs."""
    found: list[GradientBatch] = []
    tape = Tape(rows, {name: identity(tuple(p.shape)) for name, p in parameters.items()}, found.append)
    out = _floats(taps.run(plan, tape, *call))
    bends = [*curved, *[False] * (len(out) - len(curved))]
    bent = [each * (1 + each / 2) if bend else each for each, bend in zip(out, bends, strict=True)]
    chosen = bent if only is None else [bent[number] for number in only if number < len(bent)]
    objective = _objective([value for value in chosen if not isinstance(value, UnbatchedTensor)])
    before, taps.tape = taps.tape, tape
    try:
        if objective is not None:
            objective.backward()
    finally:
        taps.tape = before
    return found, out


def _sum(found: list[GradientBatch], name: str, default: Tensor) -> Tensor:
    """Return the gradient of a parameter added up over the examples, and let go of what it was made from."""
    for batch in found:
        if name in batch.pieces:
            return batch.pieces.pop(name).weighted_sum(torch.ones_like(batch.square_norms[name]))
    return default


def _gradients(objective: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    found = torch.autograd.grad(objective, list(parameters.values()), allow_unused=True)
    return {name: gradient.to_dense() for name, gradient in zip(parameters, found, strict=True) if gradient is not None}


def _floats(out: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _objective(outs: list[Tensor]) -> Tensor | None:
    """Return a number that depends on every entry of every output, on each in its own way."""
    parts = [
        (out if out.dtype == torch.float64 else out.float())
        * torch.arange(1.0, out.numel() + 1, device=out.device).cos().reshape(out.shape)
        for out in outs
        if out.requires_grad
    ]
    return torch.stack([part.sum() for part in parts]).sum() if parts else None


def _difference(first: Tensor, second: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference, relative to the largest entry; zero where numbers are not finite."""
    if first.shape != second.shape:
        return float("inf")
    size = _largest(second)
    if not (math.isfinite(_largest(first)) and math.isfinite(size)):
        return 0.0
    scale, gap = max(size, floor), _largest(first.detach() - second.detach())
    return gap / scale if scale else gap


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value, NaN if there is one; without the memory that ``abs`` takes."""
    return float(torch.linalg.vector_norm(tensor.detach(), ord=math.inf)) if tensor.numel() else 0.0
