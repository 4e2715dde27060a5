"""Which precision a GPU computes products in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["products_in"]


@contextmanager
def products_in(x: Tensor, *, short: bool) -> Iterator[None]:
    """Let a GPU round the factors of matrix products to TF32 or not, whatever its user set for his own."""
    if x.device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = short
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
