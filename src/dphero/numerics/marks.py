"""Marks: what tells a tensor from others, short enough to be fetched from a GPU."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dphero.numerics.precision import full_precision


def mark(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is on the CPU; else its rows along one direction, the same for all tensors."""
    if tensor.is_cpu or tensor.dim() < 2:
        return tensor
    return along_a_line(tensor)


def along_a_line(tensor: Tensor) -> Tensor:
    """Return the inner product of each row with the same direction."""
    rows = tensor.flatten(1)
    with full_precision():
        return rows @ _direction(rows.shape[1], rows.dtype, rows.device)


@lru_cache(256)
def _direction(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size), device="cpu").to(device, dtype)
