"""The rule for any module: recompute it example by example, for its own parameters.

All examples at once under ``vmap``, or one after the other where a module does what depends on their values (a mixture
of experts sends each token to other parameters).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from dphero.functional.context import OpaqueCall
from dphero.functional.operation import take_apart
from dphero.gradients.piece import Explicit, Piece
from dphero.numerics.generators import RandomState


def example_gradients(
    function: Callable[..., Tensor], wanted: dict[str, Tensor], gradients: Tensor, inputs: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the per-example gradients of ``function(wanted, *inputs)`` with respect to ``wanted``.

    The function takes the inputs of a batch of one example. Inputs and ``gradients`` of the output have the examples in
    front: for each, that of a batch of this example alone.

    Raises:
        RuntimeError: If the function draws random numbers, or does what ``vmap`` cannot do.
    """

    def one(gradient: Tensor, *inputs: Tensor) -> dict[str, Tensor]:
        pull = vjp(lambda values: function(values, *inputs), wanted)[1]
        return pull(gradient)[0]

    with torch.enable_grad():
        found = vmap(one, randomness="error")(gradients, *inputs)
    return {name: gradient.detach() for name, gradient in found.items()}


def gradients_one_by_one(
    function: Callable[..., Tensor], wanted: dict[str, Tensor], gradients: Tensor, inputs: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return what :func:`example_gradients` returns, from one backward pass for each example.

    Raises:
        RuntimeError: If the function draws random numbers.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in wanted}
    before = RandomState()
    for gradient, *values in zip(gradients, *inputs, strict=True):
        leaves = {name: value.detach().requires_grad_() for name, value in wanted.items()}
        with torch.enable_grad():
            out = function(leaves, *values)
        parts = torch.autograd.grad(out, list(leaves.values()), gradient.to(out.dtype), allow_unused=True)
        for (name, value), part in zip(wanted.items(), parts, strict=True):
            found[name].append(torch.zeros_like(value) if part is None else part)
    if not before.is_current:
        raise RuntimeError("it draws random numbers, which would be others than those of the forward pass")
    return {name: torch.stack(parts) for name, parts in found.items()}


def vmapped(call: OpaqueCall, *args: Any, **kwargs: Any) -> Any:
    """Tap the output of a module whose code cannot be followed.

    Exact for any module that returns one tensor and uses no random numbers. It costs a second forward pass
    of the module (one for each example, where ``vmap`` does not know its operations), and its per-example
    gradients in memory.
    """
    wanted = {local: parameter.detach() for local, parameter in call.parameters.items()}
    operation, tensors = take_apart(call.original, args, kwargs)

    def compute() -> Tensor:
        with call.holding(wanted):
            out = call.original(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise ValueError(
                f"{call.label} has no layer rule, its code cannot be followed, and it returns {type(out).__name__}; "
                "register a rule for it with @dphero.register, or have it return one tensor"
            )
        return out

    def one(values: dict[str, Tensor], *tensors: Tensor) -> Tensor:
        with call.holding(values):
            return operation.run(tensors)

    def make(gradients: Tensor, *tensors: Tensor) -> dict[str, Piece]:
        try:
            with call.paused():
                try:
                    found = example_gradients(one, wanted, gradients, tensors)
                except RuntimeError:
                    found = gradients_one_by_one(one, wanted, gradients, tensors)
        except RuntimeError as error:
            raise RuntimeError(
                f"{call.label} has no layer rule, and computing it example by example failed: {error}. Move random "
                "numbers (dropout) out of the module that owns the parameters, or register a rule for it with "
                "@dphero.register."
            ) from error
        return {name: Explicit(gradient) for name, gradient in found.items()}

    return call.tap(compute, make, *tensors, split=True)
