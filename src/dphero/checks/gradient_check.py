"""One tapped backward pass on a few rows, compared with ordinary autograd, before the first batch is trusted.

Whatever cannot be tapped is refused here, before training; and a layer rule whose gradients, added up over the
examples, are not those of autograd is found out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from dphero.batch_axis.plan import AxisPlan, UnknownCallError
from dphero.checks.model_runs import ModelRuns
from dphero.checks.tapped_pass import floating, objective_of, trained_by
from dphero.functional.custom import custom_code_followed
from dphero.functional.unbatched import UnbatchedTensor, plain
from dphero.gradients.batch import GradientBatch
from dphero.numerics.compare import is_short, numbers_of

_TOLERANCE = 2e-2
_SHORT_TOLERANCE = 0.2
"""In bfloat16 and float16."""
_COARSE, _COARSE_FLOOR = 1.0, 0.1
"""The same where terms cancel, and autograd's own sums are far off (biases on a CPU)."""


def compare_with_autograd(runs: ModelRuns, plan: AxisPlan, rows: Sequence[int], *, random: bool) -> None:
    """Run one backward pass through the taps on these rows, and check what it finds.

    Where the model draws random numbers, layer rules may draw others than the layers themselves: then it is compared in
    evaluation mode alone.

    Raises:
        ValueError: If output or gradients are not those of ordinary autograd.
    """
    _compare_at_length(runs, plan, rows, training=True, random=random)
    if random:
        try:
            _compare_at_length(runs, plan, rows, training=False)
        except UnknownCallError:
            return  # other calls in evaluation mode: nothing to compare with


def _compare_at_length(
    runs: ModelRuns, plan: AxisPlan, rows: Sequence[int], *, training: bool, random: bool = False
) -> None:
    """Compare; under autocast, where rounding makes a difference, coarsely, and finely without autocast."""
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    try:
        _compare(runs, plan, rows, training=training, random=random)
        return
    except ValueError:
        if not devices:
            raise
    # out of there: the error's traceback holds all that was compared, which takes memory
    _compare(runs, plan, rows, training=training, random=random, coarse=True)
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        _compare(runs, plan, rows, training=training, random=random)


def _compare(
    runs: ModelRuns,
    plan: AxisPlan,
    rows: Sequence[int],
    *,
    training: bool,
    random: bool = False,
    coarse: bool = False,
) -> None:
    taps, (args, kwargs) = runs.taps, runs.batch.take(rows)
    owners = {name: hooked.label for hooked in taps.hooked_modules for name in hooked.names.values()}
    parameters = trained_by(taps)
    found = runs.tapped(plan, rows, training=training)
    outs, sums = found.outs, _sums(found.gradients)
    del found  # and so the layers' inputs and output gradients: there is no second pass beside them
    with runs.snapshot.restored_afterwards(), taps.paused(), custom_code_followed():
        if not training:
            taps.module.eval()
        expected_out = floating(taps.root_forward(*args, **kwargs))
        pairs = list(zip(outs, expected_out, strict=True))
        objective = objective_of([y for x, y in pairs if not isinstance(x, UnbatchedTensor)])
        expected = {} if objective is None else _gradients(objective, parameters)
    tolerance = _SHORT_TOLERANCE if is_short(*parameters.values(), *expected_out) else _TOLERANCE
    for_gradients, floor = (_COARSE, _COARSE_FLOOR) if coarse else (tolerance, 1e-3)
    if any(_difference(plain(x), y) > tolerance for x, y in pairs):
        if random:
            return
        raise ValueError("the tapped model computes another output than the model itself: a registered rule is wrong")
    gaps = []
    for name, parameter in parameters.items():  # one at a time: a gradient is as large as its parameter
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        gaps.append(_sizes(sums.pop(name, zero), expected.pop(name, zero)))
    found_sizes = numbers_of(gaps)
    largest = max([size for _, size, _ in found_sizes], default=0.0)
    for name, (first, second, gap) in zip(parameters, found_sizes, strict=True):
        if _relative(first, second, gap, floor * largest) > for_gradients:
            if random and not _shows_random_numbers(runs, rows, expected_out):
                return  # the layers may have drawn other numbers, unseen; evaluation mode decides
            raise ValueError(
                f"parameter {name!r} of {owners[name]}: the taps found another gradient than autograd. Its layer rule "
                "is wrong, or the model's code reaches the parameter by another way than the attribute of its module."
            )


def _shows_random_numbers(runs: ModelRuns, rows: Sequence[int], out: list[Tensor]) -> bool:
    """Tell whether the output changes with the random numbers: not so behind dropout, if the last layer is zero."""
    args, kwargs = runs.batch.take(rows)
    with runs.snapshot.restored_afterwards(seed=1), runs.taps.paused(), custom_code_followed(), torch.no_grad():
        other = floating(runs.taps.root_forward(*args, **kwargs))
    return any(not torch.equal(x, y) for x, y in zip(out, other, strict=True))


def _sums(found: list[GradientBatch]) -> dict[str, Tensor]:
    """Return gradients added up over the examples, by parameter; what they are made from goes as they are."""
    return {
        name: total
        for batch in found
        for name, total in batch.weighted_sums(
            {name: torch.ones_like(norms) for name, norms in batch.square_norms.items()}, None, final=True
        ).items()
    }


def _gradients(objective: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    found = torch.autograd.grad(objective, list(parameters.values()), allow_unused=True)
    return {name: gradient.to_dense() for name, gradient in zip(parameters, found, strict=True) if gradient is not None}


def _difference(first: Tensor, second: Tensor) -> float:
    """Return the largest difference, relative to the largest entry; zero where numbers are not finite."""
    return _relative(*numbers_of([_sizes(first, second)])[0])


def _sizes(first: Tensor, second: Tensor) -> Tensor:
    """Return the largest entries of two tensors, and of their difference."""
    first, second = first.detach(), second.detach()
    if first.shape != second.shape:
        return torch.tensor([0.0, 0.0, math.inf], device=first.device)
    return torch.stack([_largest(first), _largest(second), _largest(first - second)])


def _relative(first: float, second: float, gap: float, floor: float = 0.0) -> float:
    """Return a difference relative to the size of the second, or the floor; zero where numbers are not finite."""
    if not (math.isfinite(first) and math.isfinite(second)):
        return 0.0
    scale = max(second, floor)
    return gap / scale if scale else gap


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value, NaN if there is one; without the memory that ``abs`` takes."""
    return torch.linalg.vector_norm(tensor, ord=math.inf) if tensor.numel() else tensor.new_zeros(())
