"""Code that torch keeps from us: custom autograd functions, and gradient checkpointing.

``Function.apply`` does not tell the tensors among its arguments that it takes them. While a model is tapped, it does:
where a value without a batch axis goes in, it is followed as through any other operation.

Gradient checkpointing frees activations and runs layers again in the backward pass. Private training keeps each layer's
input for its per-example gradient, so nothing would be freed: the layers run once, and their activations are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function
from torch.utils import checkpoint

from dphero.functional.operation import take_apart
from dphero.functional.unbatched import UnbatchedTensor

logger = logging.getLogger(__name__)

_GENERATOR = "_checkpoint_without_reentrant_generator"
_apply: Any = Function.__dict__["apply"].__func__
_said: list[bool] = []


@contextmanager
def custom_code_followed() -> Iterator[None]:
    """Follow custom autograd functions, and run what is checkpointed without that, for a while."""
    apply, generator = Function.__dict__["apply"], getattr(checkpoint, _GENERATOR, None)
    Function.apply = classmethod(_follow)  # type: ignore[assignment, method-assign]
    if generator is not None:
        setattr(checkpoint, _GENERATOR, _nothing)
    try:
        yield
    finally:
        Function.apply = apply  # type: ignore[method-assign]
        if generator is not None:
            setattr(checkpoint, _GENERATOR, generator)


def _follow(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``Function.apply``."""
    if function is checkpoint.CheckpointFunction:
        _say_once()
        run, _, *inputs = args
        return run(*inputs)
    unbatched = next((each for each in args if isinstance(each, UnbatchedTensor)), None)
    if unbatched is None or not unbatched.taps.following or not torch.is_grad_enabled():
        return _apply(function, *args, **kwargs)

    def apply(*args: Any, **kwargs: Any) -> Any:
        return _apply(function, *args, **kwargs)

    apply.__name__ = function.__name__
    operation, tensors = take_apart(apply, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return unbatched.taps.follow(operation, tensors, args, kwargs)


def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Stand in for what checkpointing does before and after a function runs."""
    _say_once()
    yield


def _say_once() -> None:
    if not _said:
        _said.append(True)
        logger.warning(
            "Gradient checkpointing saves no memory in private training, which keeps the input of every layer: it is "
            "left out. Lower physical_batch_size to save memory."
        )
