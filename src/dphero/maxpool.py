"""Max pooling of pairs: what torch's gives, faster on a CPU.

A private model spends much of a step in what it shares with any other. torch's max pooling looks for the largest of
each window one number at a time and keeps its place in 64 bits. Where windows are 2 × 2 and do not overlap, it takes a
few comparisons of whole rows, and a byte for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["halves", "max_pool"]

_PAIRS = [(2, 2), (2, 2), (0, 0), (1, 1)]  # kernel, stride, padding, dilation


def halves(module: nn.Module) -> bool:
    """Tell whether a module takes the largest of each 2 × 2 numbers, and nothing else."""
    if type(module) is not nn.MaxPool2d or module.return_indices or module.ceil_mode:
        return False
    settings = (module.kernel_size, module.stride, module.padding, module.dilation)
    return [(each, each) if isinstance(each, int) else tuple(each) for each in settings] == _PAIRS


def max_pool(x: Any, otherwise: Callable[[Any], Tensor]) -> Tensor:
    """Return the largest of each 2 × 2 numbers of images; ``otherwise(x)`` where this way is not for them."""
    if (
        type(x) is Tensor
        and x.is_cpu
        and x.is_contiguous()
        and x.dtype in (torch.float32, torch.float64)
        and x.dim() == 4
        and x.shape[2] % 2 == 0 == x.shape[3] % 2
        and x.numel()
        and not torch._C._are_functorch_transforms_active()
    ):
        pooled: Tensor = _Halved.apply(x)
        return pooled
    return otherwise(x)


class _Halved(torch.autograd.Function):
    """The larger of two rows, then of two columns. Of equal numbers the first counts, row by row, as in torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        *outer, height, width = x.shape
        upper, lower = x.view(-1, 2, width).unbind(1)
        rows = torch.maximum(upper, lower)
        left, right = rows[:, 0::2], rows[:, 1::2]
        is_upper = upper >= lower
        earlier = is_upper[:, 0::2] >= is_upper[:, 1::2]  # of two equal numbers, the left one is the first
        ctx.shape = x.shape
        ctx.save_for_backward(is_upper, (left >= right) & (earlier | (left > right)))
        return torch.maximum(left, right).view(*outer, height // 2, width // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        is_upper, is_left = ctx.saved_tensors
        gradient = gradient.reshape(is_left.shape)
        out = gradient.new_empty(len(gradient), 2, ctx.shape[-1])
        upper, lower = out.unbind(1)
        left, right = lower[:, 0::2], lower[:, 1::2]
        torch.mul(gradient, is_left, out=left)
        torch.sub(gradient, left, out=right)
        torch.mul(lower, is_upper, out=upper)
        lower.sub_(upper)
        return out.view(ctx.shape)
