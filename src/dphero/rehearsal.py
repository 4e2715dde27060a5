"""A dress rehearsal: one tapped backward pass on a few rows, compared with ordinary autograd.

Whatever cannot be tapped is refused here, before training; and a layer rule whose gradients, added up over
the examples, are not those of autograd is found out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dphero.geometry import identity
from dphero.plan import Plan, Unforeseen
from dphero.shared import Shared, plain
from dphero.tape import GradientBatch, Tape
from dphero.untouched import Untouched

if TYPE_CHECKING:
    from dphero.taps import Taps

__all__ = ["rehearse"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_TOLERANCE = 2e-2
_SHORT_TOLERANCE = 0.2
"""In bfloat16 and float16."""


def rehearse(taps: Taps, plan: Plan, untouched: Untouched, call: Arguments, rows: int, *, random: bool) -> None:
    """Run one backward pass through the taps, and check what it finds.

    Args:
        taps: The taps of the model.
        plan: Where its calls carry the examples.
        untouched: Puts the model back as it was.
        call: Arguments of the model.
        rows: The number of examples in them.
        random: Whether the model draws random numbers; it is then compared in evaluation mode.

    Raises:
        ValueError: If output or gradients are not those of ordinary autograd.
    """
    owners = {name: (site.label, site.parameters[local]) for site in taps.sites for local, name in site.names.items()}
    parameters = {name: parameter for name, (_, parameter) in owners.items()}
    with untouched.run():
        found, out = _tapped(taps, plan, call, rows, parameters)
    if random:
        try:
            with untouched.run():
                taps.module.eval()
                found, out = _tapped(taps, plan, call, rows, parameters)
        except Unforeseen:
            return  # other calls in evaluation mode: nothing to compare with
    with untouched.run(), taps.paused():
        if random:
            taps.module.eval()
        expected_out = _floats(taps.root_forward(*call[0], **call[1]))
        objective = _objective([y for x, y in zip(out, expected_out, strict=True) if not isinstance(x, Shared)])
        expected = {} if objective is None else _gradients(objective, parameters)
    short = any(value.dtype in (torch.float16, torch.bfloat16) for value in (*parameters.values(), *expected_out))
    tolerance = _SHORT_TOLERANCE if short else _TOLERANCE
    if any(_difference(plain(x), y) > tolerance for x, y in zip(out, expected_out, strict=True)):
        raise ValueError("the tapped model computes another output than the model itself: a registered rule is wrong")
    largest = max((float(gradient.abs().max()) for gradient in expected.values() if gradient.numel()), default=0.0)
    for name, (label, parameter) in owners.items():
        pair = (found.get(name, torch.zeros_like(parameter)), expected.get(name, torch.zeros_like(parameter)))
        if _difference(*pair, floor=1e-3 * largest) > tolerance:
            raise ValueError(
                f"parameter {name!r} of {label}: the taps found another gradient than autograd. Its layer rule is "
                "wrong, or the model's code reaches the parameter by another way than the attribute of its module."
            )


def _tapped(
    taps: Taps, plan: Plan, call: Arguments, rows: int, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the gradients that the taps find, added up over the examples, and the outputs."""
    found: list[GradientBatch] = []
    tape = Tape(rows, {name: identity(tuple(p.shape)) for name, p in parameters.items()}, found.append)
    out = _floats(taps.run(plan, tape, *call))
    objective = _objective([value for value in out if not isinstance(value, Shared)])
    before, taps.tape = taps.tape, tape
    try:
        if objective is not None:
            objective.backward()
    finally:
        taps.tape = before
    sums = {
        name: piece.weighted_sum(torch.ones_like(batch.square_norms[name]))
        for batch in found
        for name, piece in batch.pieces.items()
    }
    return sums, out


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
    if not first.numel() or not (first.isfinite().all() and second.isfinite().all()):
        return 0.0
    scale = max(float(second.detach().abs().max()), floor)
    gap = float((first.detach() - second.detach()).abs().max())
    return gap / scale if scale else gap
