"""Which precision products are computed in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["at_least_single", "full_precision", "matmul_tf32"]

_AS_EVER = nullcontext()


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Return a floating-point type itself, or float32 for shorter ones."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def matmul_tf32(x: Tensor, *, allow: bool) -> AbstractContextManager[None]:
    """Force TF32 matrix products on or off on a GPU, overriding the user's setting."""
    return _products_on_gpu(allow) if x.is_cuda else _AS_EVER


@contextmanager
def _products_on_gpu(allow: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


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
