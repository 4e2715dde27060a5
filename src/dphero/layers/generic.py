"""The rule for any module: recompute it example by example under ``vmap``, for its own parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap

from dphero.pieces import Explicit, Piece

if TYPE_CHECKING:
    from dphero.taps import Call

__all__ = ["vmapped"]


def vmapped(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Tap the output of a module whose code has no rule.

    Exact for any module whose inputs and single output carry the examples in axis 0 and that uses no
    random numbers. It costs a second forward pass of the module and its per-example gradients in memory.
    """
    site, taps = call.site, call.taps
    module, parameters = site.module, site.module._parameters
    frozen = {name: value.detach() for name, value in parameters.items() if value is not None}

    def own(values: dict[str, Tensor], *inputs: Any, **options: Any) -> Any:
        before = dict(parameters)
        parameters.update(values)  # type: ignore[arg-type]
        try:
            return site.original(*inputs, **options)
        finally:
            parameters.update(before)

    def compute() -> Tensor:
        out = own(frozen, *args, **kwargs)
        if not isinstance(out, Tensor):
            raise ValueError(
                f"{site.label} has no layer rule and returns {type(out).__name__}; register a rule for it with "
                "@dphero.register, or have it return one tensor"
            )
        return out

    def make(delta: Tensor, *saved: Any) -> dict[str, Piece]:
        wanted = {name: frozen[name] for name in site.names}
        fixed = {name: value for name, value in frozen.items() if name not in wanted}
        axes = tuple(
            0 if isinstance(value, Tensor) and value.dim() and len(value) == len(delta) else None for value in saved
        )

        def one(gradient: Tensor, *inputs: Any) -> dict[str, Tensor]:
            inputs = tuple(value.unsqueeze(0) if axis == 0 else value for value, axis in zip(inputs, axes, strict=True))
            positional, named = inputs[: len(args)], dict(zip(kwargs, inputs[len(args) :], strict=True))
            _, pull = vjp(lambda values: functional_call(module, {**values, **fixed}, positional, named), wanted)
            return pull(gradient.unsqueeze(0))[0]

        try:
            with taps.paused(), torch.enable_grad():
                gradients = vmap(one, in_dims=(0, *axes), randomness="error")(delta, *saved)
        except RuntimeError as error:
            raise RuntimeError(
                f"{site.label} has no layer rule, and computing it example by example failed: {error}. Register a "
                "rule for it with @dphero.register, or split the part that owns the parameters into a module of its own."
            ) from error
        return {name: Explicit(gradient.detach()) for name, gradient in gradients.items()}

    return call.tap(compute, make, *args, *kwargs.values())
