"""The scattering transform: fixed wavelet features of images, of two orders, at a quarter of the resolution.

Wavelets ψ (scales j = 0, 1; 8 angles) and a Gaussian low-pass φ of scale 2² give, for each channel x of an image,

    S₀ = φ ∗ x,    S₁ = φ ∗ |ψ_{j,θ} ∗ x|,    S₂ = φ ∗ | ψ_{1,θ'} ∗ |ψ_{0,θ} ∗ x| |

which are 1 + 16 + 64 = 81 maps, each sampled at every fourth pixel. What was filtered with ψ₁ is kept at every second
pixel. Nothing is learned and nothing is fitted to data, so the features are public, and cost no privacy.

Wavelets act in the Fourier domain, where to drop pixels is to add up the aliases of each frequency. The low-pass is
a product of two Gaussians, one along each axis, so that filtering with it and dropping pixels is a matrix product.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

ANGLES = 8
MAPS = 1 + 2 * ANGLES + ANGLES**2
"""Feature maps for each channel of the image."""

_STEP = 4
"""Pixels between two features."""
_WIDTH = 0.8
"""Standard deviation of the finest wavelet, in pixels."""
_CPU_PIXELS, _GPU_PIXELS = 1 << 16, 1 << 21
"""Padded pixels to work on at a time: on a CPU they and what is made of them stay near the cache."""


class Scattering(nn.Module):
    """Scattering of images ``(n, channels, height, width)`` to ``(n, channels * 81, height / 4, width / 4)``.

    The maps of a channel stand together, in the order of S₀, S₁ (by scale, then angle), S₂ (by first, then second
    angle). The numbers are those of kymatio's ``ScatteringTorch2D(J=2, L=8)``, up to its value of π, 3.1415.

    Args:
        height: Of the images; a multiple of 4.
        width: Likewise.
    """

    wavelets: Tensor

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        if min(height, width) < _STEP or height % _STEP or width % _STEP:
            raise ValueError(
                f"the scattering transform needs images whose height and width are multiples of {_STEP}, not "
                f"{height}x{width}: pad or crop them"
            )
        self.height, self.width = height, width
        rows, columns = height + 2 * _STEP, width + 2 * _STEP
        wavelets = [_wavelet(rows, columns, scale, angle) for scale in (0, 1) for angle in range(ANGLES)]
        constants = {
            "wavelets": torch.stack(wavelets).view(2, ANGLES, rows, columns).float(),
            "rows": _reflected(height),
            "columns": _reflected(width),
        }
        for spacing in (1, 2):
            constants[f"low_rows_{spacing}"] = _low_pass(rows, spacing).float()
            constants[f"low_columns_{spacing}"] = _low_pass(columns, spacing).float().T.contiguous()
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)  # known from the size: no part of a checkpoint

    def extra_repr(self) -> str:
        return f"{self.height}x{self.width}"

    def forward(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or images.shape[2:] != (self.height, self.width):
            raise ValueError(
                f"expected images of shape (n, channels, {self.height}, {self.width}), got {tuple(images.shape)}"
            )
        n, channels = images.shape[:2]
        low = (self.height // _STEP, self.width // _STEP)
        flat = images.reshape(n * channels, self.height, self.width)
        out = self.wavelets.new_empty(n * channels, MAPS, *low)
        pixels = _CPU_PIXELS if images.device.type == "cpu" else _GPU_PIXELS
        some = max(1, pixels // self.wavelets[0, 0].numel())
        with torch.autocast(images.device.type, enabled=False):  # half precision would show
            for first in range(0, len(flat), some):
                out[first : first + some] = self._transform(flat[first : first + some].to(out.dtype))
        return out.view(n, channels * MAPS, *low)

    def _transform(self, images: Tensor) -> Tensor:
        """Return the maps (n, 81, ...) of images (n, height, width)."""
        fine = images[:, self.get_buffer("rows")[:, None], self.get_buffer("columns")]
        spectrum = torch.fft.fft2(fine)
        first = torch.fft.ifft2(spectrum.unsqueeze(1) * self.wavelets[0]).abs()
        coarse = [self._coarse_moduli(spectrum), self._coarse_moduli(torch.fft.fft2(first)).flatten(1, 2)]
        maps = [self._low_passed(fine.unsqueeze(1), 1), self._low_passed(first, 1)]
        return torch.cat([*maps, *(self._low_passed(moduli, 2) for moduli in coarse)], 1)

    def _coarse_moduli(self, spectrum: Tensor) -> Tensor:
        """Return |ψ₁ ∗ u| for each angle at every second pixel, from the spectrum of u."""
        rows, columns = (size // 2 for size in spectrum.shape[-2:])
        aliases = spectrum.unflatten(-1, (2, columns)).unflatten(-3, (2, rows)).unsqueeze(-5)
        # a product of complex numbers is quicker than one of complex and real ones, which torch converts each time
        wavelets = (self.wavelets[1] / 4).to(spectrum.dtype).view(ANGLES, 2, rows, 2, columns)
        total: Tensor | None = None
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            alias, wavelet = aliases[..., i, :, j, :], wavelets[:, i, :, j, :]
            total = alias * wavelet if total is None else total.addcmul_(alias, wavelet)
        assert total is not None
        return torch.fft.ifft2(total).abs()

    def _low_passed(self, maps: Tensor, spacing: int) -> Tensor:
        """Return φ ∗ maps at every fourth pixel, without the margins, from maps at every ``spacing``-th pixel."""
        return self.get_buffer(f"low_rows_{spacing}") @ maps @ self.get_buffer(f"low_columns_{spacing}")


def _reflected(size: int) -> Tensor:
    """Return which pixel stands where, with a margin of 4 that mirrors the image (the edge is not repeated)."""
    there_and_back = 2 * (size - 1)
    index = torch.arange(-_STEP, size + _STEP) % there_and_back
    return torch.minimum(index, there_and_back - index)


def _wavelet(rows: int, columns: int, scale: int, angle: int) -> Tensor:
    """Return the Fourier transform (it is real) of a Morlet wavelet on a torus of this size.

    ψ(u) = g(u) (exp(i ξ·u) − β), where g is an elongated Gaussian, |ξ| = 3π/4 · 2⁻ʲ, and β makes its mean zero.
    """
    deviation, frequency, slant = _WIDTH * 2**scale, 0.75 * math.pi / 2**scale, 4 / ANGLES
    theta = (ANGLES // 2 - 1 - angle) * math.pi / ANGLES
    y, x = _unrolled(rows)[:, None], _unrolled(columns)
    along, across = y * math.cos(theta) + x * math.sin(theta), x * math.cos(theta) - y * math.sin(theta)
    gaussian = torch.exp(-(along.square() + (slant * across).square()) / (2 * deviation**2))
    gaussian *= slant / (2 * math.pi * deviation**2)
    wave = gaussian * torch.exp(1j * frequency * along)
    wave -= gaussian * (wave.sum() / gaussian.sum())
    return torch.fft.fft2(wave.view(_TURNS, rows, _TURNS, columns).sum((0, 2))).real


def _low_pass(size: int, spacing: int) -> Tensor:
    """Return the matrix that filters one axis, given at every ``spacing``-th pixel, and keeps every fourth pixel.

    A coarse axis has no frequencies beyond its band; the Gaussian's are left out there.
    """
    deviation = _WIDTH * 2
    gaussian = torch.exp(-_unrolled(size).square() / (2 * deviation**2)) / (math.sqrt(2 * math.pi) * deviation)
    spectrum = torch.fft.fft(gaussian.view(_TURNS, size).sum(0)).real
    given = size // spacing
    band = torch.cat([spectrum[: (given + 1) // 2], spectrum[-(given // 2) :]])
    kernel = torch.fft.ifft(band).real
    kept = torch.arange(1, size // _STEP - 1) * (_STEP // spacing)  # the first and the last lie in the margin
    return kernel[(kept[:, None] - torch.arange(given)) % given]


_TURNS = 5
"""How often a filter is wound around the torus: beyond, the Gaussians are nil."""


def _unrolled(size: int) -> Tensor:
    return torch.arange(-(_TURNS // 2) * size, (_TURNS // 2 + 1) * size, dtype=torch.float64)
