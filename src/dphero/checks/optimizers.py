"""Optimizers as other libraries hand them over: wrapped, and stepped with a closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that steps, out of the wrapper that accelerate or Lightning put around it.

    A wrapper calls the optimizer inside, and need not have hooks of its own: accelerate's only looks like one.
    """
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and isinstance(
        getattr(optimizer, "optimizer", None), Optimizer
    ):
        optimizer = optimizer.optimizer
    return optimizer


def with_closure_evaluated(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Evaluate the closure among the arguments of ``step`` (the optimizer first): once, before the step.

    A closure computes the loss and calls ``backward()``. Each evaluation releases the lot, so there can be one only.
    Returned are the arguments with the closure's result in its place; ``None`` if there is no closure.

    Raises:
        ValueError: If the optimizer evaluates its closure several times in one step.
    """
    if not any(callable(value) for value in (*args, *kwargs.values())):
        return None
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS evaluates its closure many times in one step: each time would be another release of the same lot. "
            "Use an optimizer that steps once for each gradient."
        )
    replace = _evaluated(optimizer)
    return tuple(map(replace, args)), {name: replace(value) for name, value in kwargs.items()}


def _evaluated(optimizer: Optimizer) -> Callable[[Any], Any]:
    def replace(value: Any) -> Any:
        if not callable(value):
            return value
        with torch.enable_grad():
            loss = value()
        results = [loss]

        def again() -> Any:
            if not results:
                raise ValueError(
                    f"{type(optimizer).__name__} evaluates its closure several times in one step: each time would be "
                    "another release of the same lot. Use an optimizer that steps once for each gradient."
                )
            return results.pop()

        return again

    return replace
