"""Which precision products are computed in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_AS_EVER = nullcontext()


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Return a floating-point type itself, or float32 for shorter ones."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def widened(value: T) -> T:
    """Return a tensor of a shorter floating-point type in float32; anything else as it is."""
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()  # type: ignore[return-value]
    return value


def as_multiplied(x: Tensor) -> Tensor:
    """Return a tensor in the format in which autocast has it multiplied: who keeps that keeps no second copy."""
    kind = x.device.type
    if type(x) is Tensor and x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def matmul_tf32(x: Tensor, *, allow: bool) -> AbstractContextManager[None]:
    """Force TF32 matrix products on or off on a GPU, overriding the user's setting."""
    return _tf32(torch.backends.cuda.matmul, allow) if x.is_cuda else _AS_EVER


def conv_tf32(x: Tensor, *, allow: bool) -> AbstractContextManager[None]:
    """Force TF32 convolutions on or off on a GPU, overriding the user's setting."""
    return _tf32(torch.backends.cudnn, allow) if x.is_cuda else _AS_EVER


@contextmanager
def _tf32(where: Any, allow: bool) -> Iterator[None]:
    before = where.allow_tf32
    where.allow_tf32 = allow
    try:
        yield
    finally:
        where.allow_tf32 = before


def full_precision() -> AbstractContextManager[Any]:
    """Compute without a graph, and in full precision even inside the user's autocast: norm and noise must agree."""
    shorter = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not shorter:
        return torch.no_grad()
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    for device in shorter:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
