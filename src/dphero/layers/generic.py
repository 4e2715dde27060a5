"""The rule for any module: recompute it example by example under ``vmap``, for its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from dphero.functional.context import OpaqueCall
from dphero.operation import take_apart
from dphero.pieces import Explicit, Piece

__all__ = ["example_gradients", "vmapped"]


def example_gradients(
    function: Callable[..., Tensor], wanted: dict[str, Tensor], gradients: Tensor, inputs: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the per-example gradients of ``function(wanted, *inputs)`` with respect to ``wanted``.

    Args:
        function: Takes the inputs of a batch of one example.
        wanted: What to differentiate with respect to.
        gradients: The output's gradients, examples in front: for each, that of a batch of this example alone.
        inputs: The inputs, likewise.

    Raises:
        RuntimeError: If the function draws random numbers, or does what ``vmap`` cannot do.
    """

    def one(gradient: Tensor, *inputs: Tensor) -> dict[str, Tensor]:
        pull = vjp(lambda values: function(values, *inputs), wanted)[1]
        return pull(gradient)[0]

    with torch.enable_grad():
        found = vmap(one, randomness="error")(gradients, *inputs)
    return {name: gradient.detach() for name, gradient in found.items()}


def vmapped(call: OpaqueCall, *args: Any, **kwargs: Any) -> Any:
    """Tap the output of a module whose code cannot be followed.

    Exact for any module that returns one tensor and uses no random numbers. It costs a second forward pass
    of the module, and its per-example gradients in memory.
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
                found = example_gradients(one, wanted, gradients, tensors)
        except RuntimeError as error:
            raise RuntimeError(
                f"{call.label} has no layer rule, and computing it example by example failed: {error}. Move random "
                "numbers (dropout) out of the module that owns the parameters, or register a rule for it with "
                "@dphero.register."
            ) from error
        return {name: Explicit(gradient) for name, gradient in found.items()}

    return call.tap(compute, make, *tensors, split=True)
