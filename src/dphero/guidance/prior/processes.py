"""Images that nobody took: random processes. No real image is involved, so nobody's privacy is."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

_LEAVES = 24
_CHANNELS, _KERNEL = 24, 5
"""Of the random networks."""
_DOUBLINGS = 4


def _leaves(count: int, shape: tuple[int, int, int], random: Generator) -> Tensor:
    """Dead leaves: shapes of one colour each (diamonds, ellipses, boxes), of many sizes, fallen on one another."""
    channels, height, width = shape

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=random, device=random.device)

    y = torch.linspace(-1, 1, height, device=random.device).view(1, -1, 1)
    x = torch.linspace(-1, 1, width, device=random.device).view(1, 1, -1)
    images = (2 * uniform(count, channels, 1, 1) - 1).expand(count, *shape)
    for _ in range(_LEAVES):
        angle = math.pi * uniform(count, 1, 1)
        down, right = y - 2.4 * (uniform(count, 1, 1) - 0.5), x - 2.4 * (uniform(count, 1, 1) - 0.5)
        radius = 0.08 * uniform(count, 1, 1).clamp(min=0.006).rsqrt()  # many small ones, few large ones
        slim = radius * (0.15 + 0.85 * uniform(count, 1, 1))
        kind = (3 * uniform(count, 1, 1)).long()
        along = (down * angle.cos() + right * angle.sin()).abs() / radius
        across = (right * angle.cos() - down * angle.sin()).abs() / slim
        round_or_box = torch.where(kind == 1, along.square() + across.square(), torch.maximum(along, across))
        inside = (torch.where(kind == 0, along + across, round_or_box) < 1).unsqueeze(1)
        images = torch.where(inside, 2 * uniform(count, channels, 1, 1) - 1, images)
    return images


def _spectrum(count: int, shape: tuple[int, int, int], random: Generator) -> Tensor:
    """Noise whose power falls with frequency, by an exponent of each image's own; natural images have such spectra."""
    channels, height, width = shape
    white = torch.fft.rfft2(torch.randn((count, channels, height, width), generator=random, device=random.device))
    down = torch.fft.fftfreq(height, device=random.device).view(-1, 1)
    right = torch.fft.rfftfreq(width, device=random.device)
    frequency = (down.square() + right.square()).sqrt().clamp(min=1 / max(height, width))
    exponent = 0.5 + 1.5 * torch.rand((count, 1, 1, 1), generator=random, device=random.device)
    images = torch.fft.irfft2(white * frequency**-exponent, s=(height, width))
    spread, mean = torch.std_mean(images, dim=(1, 2, 3), keepdim=True)
    return torch.tanh((images - mean) / spread)


def _network(count: int, shape: tuple[int, int, int], random: Generator) -> Tensor:
    """What a random network paints: a new one at each call, with styles and grain of each image's own.

    Like a StyleGAN before training: from noise of few pixels it doubles the size again and again, each time with two
    convolutions by oriented kernels (blobs, edges, bars), and every size adds to the picture.
    """
    channels, height, width = shape

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, device=random.device)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=random, device=random.device)

    side = max(2, math.ceil(max(height, width) / 2**_DOUBLINGS))
    x = normal(count, _CHANNELS, side, side)
    picture = x.new_zeros(count, channels, side, side)
    levelled = 0.5 + 0.5 * uniform(count, 1, 1, 1)
    for doubling in range(_DOUBLINGS + 1):
        if doubling:
            side *= 2
            x, picture = (F.interpolate(each, size=(side, side), mode="bilinear") for each in (x, picture))
        for _ in range(2):
            styled = F.pad(x * (0.5 + normal(count, _CHANNELS, 1, 1)), [_KERNEL // 2] * 4, mode="replicate")
            x = F.conv2d(styled, _kernels(random))
            x = x - levelled * x.mean((2, 3), keepdim=True)
            x = x / (x.square().mean((1, 2, 3), keepdim=True).sqrt() + 1e-3)
            grain = 0.3 * uniform(1, _CHANNELS, 1, 1) * uniform(count, 1, 1, 1).square()
            x = F.leaky_relu(x + grain * normal(count, 1, side, side) + 0.3 * normal(1, _CHANNELS, 1, 1), 0.1)
        colours = normal(channels, _CHANNELS, 1, 1) / math.sqrt(_CHANNELS)
        picture = picture + (0.3 + uniform(count, 1, 1, 1)) * F.conv2d(x * normal(count, _CHANNELS, 1, 1), colours)
    picture = picture[:, :, :height, :width]
    spread, mean = torch.std_mean(picture, dim=(2, 3), keepdim=True)
    picture = (picture - mean) / (spread.mean(1, keepdim=True) + 1e-3)
    grey = 0.2 + 0.6 * uniform(count, 1, 1, 1)
    picture = 1.5 * grey * picture.mean(1, keepdim=True) + (1 - grey) * picture
    contrast = 0.4 + 1.6 * uniform(count, 1, 1, 1).square()
    brightness = 0.7 * (2 * uniform(count, 1, 1, 1) - 1) + 0.3 * (2 * uniform(count, channels, 1, 1) - 1)
    return torch.tanh(contrast * picture + brightness)


def _kernels(random: Generator) -> Tensor:
    """Random weights of a convolution: blobs, edges and bars, derivatives 0 to 2 of Gaussians along some angle."""

    def uniform() -> Tensor:
        return torch.rand((_CHANNELS, _CHANNELS, 1, 1), generator=random, device=random.device)

    axis = torch.arange(_KERNEL, device=random.device, dtype=torch.float32) - _KERNEL // 2
    angle, length, breadth = math.pi * uniform(), 0.6 + 0.9 * uniform(), 0.6 + 0.9 * uniform()
    y, x = axis.view(-1, 1), axis.view(1, -1)
    along, across = (x * angle.cos() + y * angle.sin()) / length, (y * angle.cos() - x * angle.sin()) / breadth
    blob = torch.exp(-(along.square() + across.square()) / 2)
    kind = (3 * uniform()).long()
    kernels = torch.where(kind == 0, blob, torch.where(kind == 1, -along * blob, (along.square() - 1) * blob))
    kernels = kernels / kernels.square().sum((2, 3), keepdim=True).sqrt()
    weights = torch.randn((_CHANNELS, _CHANNELS, 1, 1), generator=random, device=random.device)
    return weights / math.sqrt(_CHANNELS) * kernels


PROCESSES: dict[str, Callable[[int, tuple[int, int, int], Generator], Tensor]] = {
    "leaves": _leaves,
    "spectrum": _spectrum,
    "network": _network,
}
"""Random processes by name: how many images, of which shape, from which generator; pixels in [-1, 1]."""
