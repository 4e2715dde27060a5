"""Two views of one synthetic image: what pre-training learns to tell apart from those of others."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


def view(images: Tensor, random: Generator) -> Tensor:
    """Return each image as it might be seen another time, at half its size: a part of it, mirrored, in other light.

    Colours change so much that nothing can be known by them: what is learned otherwise is little more than colour.
    """
    count, channels, height, width = images.shape

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=random, device=random.device)

    def spread(limit: float) -> Tensor:
        return limit * (2 * uniform(count, 1, 1, 1) - 1)

    area, slim = 0.2 + 0.8 * uniform(count), (4 / 3) ** (2 * uniform(count) - 1)
    high, wide = (area / slim).sqrt().clamp(max=1), (area * slim).sqrt().clamp(max=1)
    mirrored = torch.where(uniform(count) < 0.5, -1.0, 1.0)
    right, down = (1 - wide) * (2 * uniform(count) - 1), (1 - high) * (2 * uniform(count) - 1)
    zero = torch.zeros_like(wide)
    part = torch.stack([wide * mirrored, zero, right, zero, high, down], 1).view(count, 2, 3)
    grid = F.affine_grid(part, [count, channels, height // 2, width // 2], align_corners=False)
    seen = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    changed = (uniform(count, 1, 1, 1) < 0.8).float()
    grey = seen.mean(1, keepdim=True)
    vivid = torch.where(uniform(count, 1, 1, 1) < 0.2, 0.0, 1 + changed * spread(0.6))
    seen = grey + vivid * (seen - grey)
    mean = seen.mean((1, 2, 3), keepdim=True)
    seen = mean + (1 + changed * spread(0.5)) * (seen - mean) + changed * spread(0.4)
    return _turned(seen, changed * spread(0.2 * math.pi)) if channels == 3 else seen


def _turned(images: Tensor, angle: Tensor) -> Tensor:
    """Return images whose colours are turned about the grey axis (Rodrigues)."""
    cross = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]], device=images.device) / math.sqrt(3)
    angle = angle.view(-1, 1, 1)
    turn = torch.eye(3, device=images.device) + angle.sin() * cross + (1 - angle.cos()) * (cross @ cross)
    return (turn @ images.flatten(2)).view(images.shape)
