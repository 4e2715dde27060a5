"""One tapped forward and backward pass on a few rows, for a check: nothing of it is released, or left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dphero.batch_axis.plan import AxisPlan
from dphero.functional.unbatched import UnbatchedTensor
from dphero.geometry.geometry import identity
from dphero.gradients.batch import GradientBatch
from dphero.hooks.snapshot import ModelSnapshot
from dphero.hooks.tape import Tape
from dphero.numerics.compare import distinct_numbers
from dphero.numerics.trees import tree_flatten

if TYPE_CHECKING:
    from dphero.hooks.taps import Taps

ModelArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with."""
Objective = Callable[[list[Tensor]], Sequence[Tensor]]
"""Returns, from the outputs of a model, the tensors that make up the number to be back-propagated."""


@dataclass
class TappedPass:
    """What a pass found."""

    gradients: list[GradientBatch]  # those that the taps found: none, or one batch of them
    outs: list[Tensor]  # the floating-point tensors that the model returned

    @property
    def norms(self) -> dict[str, Tensor]:
        """The norm of each example's gradient, by parameter."""
        return {name: norms.sqrt() for batch in self.gradients for name, norms in batch.square_norms.items()}


def tapped_pass(
    taps: Taps,
    plan: AxisPlan,
    snapshot: ModelSnapshot,
    call: ModelArguments,
    rows: int,
    objective: Objective = lambda outs: outs,
    *,
    training: bool = True,
) -> TappedPass:
    """Run a model on ``rows`` examples with its layers tapped, and back-propagate a number that outputs make up."""
    found: list[GradientBatch] = []
    with snapshot.restored_afterwards():
        if not training:
            taps.module.eval()
        tape = Tape(rows, {name: identity(tuple(p.shape)) for name, p in trained_by(taps).items()}, found.append)
        outs = floating(taps.run(plan, tape, *call))
        number = objective_of([part for part in objective(outs) if not isinstance(part, UnbatchedTensor)])
        before, taps.tape = taps.tape, tape
        try:
            if number is not None:
                number.backward()
        finally:
            taps.tape = before
    return TappedPass(found, outs)


def trained_by(taps: Taps) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients are wanted, by name."""
    return {name: hooked.parameters[local] for hooked in taps.hooked_modules for local, name in hooked.names.items()}


def floating(out: Any) -> list[Tensor]:
    """Return the floating-point tensors among what a model returned."""
    return [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def bent(out: Tensor) -> Tensor:
    """Return a function of an output that is not linear, so that what flows back depends on its values."""
    return out * (1 + out / 2)


def objective_of(outs: Sequence[Tensor]) -> Tensor | None:
    """Return a number that depends on every entry of every tensor with a gradient, on each in its own way."""
    parts = [
        ((out if out.dtype == torch.float64 else out.float()) * distinct_numbers(out)).sum()
        for out in outs
        if out.requires_grad
    ]
    return torch.stack(parts).sum() if parts else None
