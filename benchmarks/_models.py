"""The networks that the benchmarks train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def cifar_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4096, 384),
        nn.ReLU(),
        nn.Linear(384, 384),
        nn.ReLU(),
        nn.Linear(384, 10),
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


class _WideBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(16, inner), nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.GroupNorm(16, outer), nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.shortcut = None if inner == outer else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        skip = x if self.shortcut is None else self.shortcut(h)
        h = self.conv1(h)
        return self.conv2(F.relu(self.norm2(h))) + skip


def wrn_16_4() -> nn.Module:
    widths = [16, 64, 128, 256]
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    for i, stride in enumerate((1, 2, 2)):
        layers += [_WideBlock(widths[i], widths[i + 1], stride), _WideBlock(widths[i + 1], widths[i + 1], 1)]
    layers += [nn.GroupNorm(16, 256), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(*layers)


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A 6-layer encoder over tokens, classified from its mean."""

    def __init__(self, vocabulary: int = 1000, width: int = 512, length: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, 8) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)).mean(1))


MODELS = {
    "lenet": (lenet, (1, 28, 28)),
    "cifar-cnn": (cifar_cnn, (3, 32, 32)),
    "mlp": (mlp, (1, 28, 28)),
    "wrn-16-4": (wrn_16_4, (3, 32, 32)),
    "transformer": (Transformer, (128,)),
}


def batch(shape: tuple[int, ...], rows: int, device: str) -> tuple[Tensor, Tensor]:
    """Return random inputs (tokens for one axis, images for three) and labels."""
    if len(shape) == 1:
        return torch.randint(1000, (rows, *shape), device=device), torch.randint(10, (rows,), device=device)
    return torch.randn(rows, *shape, device=device), torch.randint(10, (rows,), device=device)
