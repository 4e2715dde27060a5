"""The scattering transform is the one that the formulas say, and kymatio's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dphero.models import scattering
from dphero.models.scattering import MAPS, Scattering

ORDERS = torch.tensor([1] + 16 * [2] + 64 * [3])
"""Filters on the way to each map."""


def pictures(height: int, width: int, channels: int = 1) -> Tensor:
    """Random images, and real digits enlarged to size."""
    noise = torch.randn(4, channels, height, width, generator=torch.Generator().manual_seed(0))
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    real = torch.tensor(load_digits().images[:8], dtype=torch.float32).unsqueeze(1) / 8 - 1
    enlarged = torch.nn.functional.interpolate(real, (height, width), mode="bilinear")
    return torch.cat([noise, enlarged.expand(-1, channels, -1, -1)])


@pytest.mark.parametrize("size", [(28, 28), (32, 32), (8, 8), (4, 12)], ids=str)
def test_it_is_kymatios(size: tuple[int, int]) -> None:
    pytest.importorskip("kymatio")
    frontend = pytest.importorskip("kymatio.scattering2d.frontend.torch_frontend")
    images = pictures(*size, channels=3)
    expected = frontend.ScatteringTorch2D(J=2, shape=size, L=8)(images)
    found = Scattering(*size)(images).view(expected.shape)
    scale = expected.abs().amax((0, 1, 3, 4))[:, None, None]
    assert float(((found - expected).abs() / scale).max()) < 1e-4
    theirs = (math.pi / 3.1415) ** ORDERS[:, None, None]  # each of its filters is normalised with π = 3.1415
    assert float(((found * theirs - expected).abs() / scale).max()) < 5e-6


def test_it_is_what_the_formulas_say() -> None:
    """Against filters in space, wound around the torus by hand, pixel by pixel."""
    size, angle, second = 8, 2, 5
    image = torch.randn(1, 1, size, size, generator=torch.Generator().manual_seed(0))
    index = scattering._reflected(size)
    assert index.tolist() == [4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 7, 6, 5, 4, 3]
    padded = image[0, 0][index[:, None], index].double()

    def filtered(x: Tensor, scale: int, number: int) -> Tensor:
        wavelet = torch.fft.ifft2(scattering._wavelet(16, 16, scale, number))
        return torch.stack(
            [(wavelet * x.flip(0, 1).roll((y + 1, z + 1), (0, 1))).sum() for y in range(16) for z in range(16)]
        ).view(16, 16)

    offsets = torch.arange(16.0, dtype=torch.float64)
    line = torch.exp(-torch.minimum(offsets, 16 - offsets).square() / (2 * 1.6**2)) / (math.sqrt(2 * math.pi) * 1.6)

    def low(x: Tensor) -> Tensor:
        return torch.stack(
            [
                line[(4 * i - offsets).long() % 16] @ x @ line[(4 * j - offsets).long() % 16]
                for i in (1, 2)
                for j in (1, 2)
            ]
        )

    found = Scattering(size, size)(image)[0].double()
    first = filtered(padded, 0, angle).abs()
    assert torch.allclose(found[0].flatten(), low(padded), atol=1e-5)
    assert torch.allclose(found[1 + angle].flatten(), low(first), atol=1e-5)
    coarse = filtered(first, 1, second).abs()  # kept at every second pixel there: aliasing makes a small difference
    assert torch.allclose(found[17 + 8 * angle + second].flatten(), low(coarse), atol=5e-3)


def test_wavelets_have_mean_zero_and_look_along_their_angle() -> None:
    for scale in (0, 1):
        for angle in range(8):
            spectrum = scattering._wavelet(40, 40, scale, angle)
            assert abs(float(spectrum[0, 0])) < 1e-9
            peak = torch.tensor(divmod(int(spectrum.argmax()), 40)) / 40
            peak = (peak + 0.5) % 1 - 0.5  # frequencies on both sides of zero
            assert abs(float(peak.norm()) * 2 * math.pi * 2**scale - 0.75 * math.pi) < 0.5
            turn = math.atan2(float(peak[1]), float(peak[0])) - (3 - angle) * math.pi / 8
            assert abs(math.sin(turn)) < 0.2


@pytest.mark.parametrize("pixels", [1, 1 << 10, 1 << 22])
def test_parts_change_nothing(pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    images = pictures(12, 16, channels=2)
    transform = Scattering(12, 16)
    expected = torch.cat([transform(image.unsqueeze(0)) for image in images])
    monkeypatch.setattr(scattering, "_CPU_PIXELS", pixels)
    found = transform(images)
    assert found.shape == (len(images), 2 * MAPS, 3, 4)
    assert torch.allclose(found, expected, atol=1e-5)
    assert transform(images[:0]).shape == (0, 2 * MAPS, 3, 4)


def test_channels_are_independent() -> None:
    images = pictures(8, 8, channels=3)
    whole = Scattering(8, 8)(images)
    assert torch.allclose(whole[:, MAPS : 2 * MAPS], Scattering(8, 8)(images[:, 1:2]), atol=1e-6)


def test_precision_state_and_gradient() -> None:
    transform = Scattering(8, 8)
    assert not list(transform.parameters()) and not transform.state_dict()
    images = pictures(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(transform(images), transform(images.double()))
    single = transform(images)
    assert torch.allclose(transform.double()(images).float(), single, atol=1e-5)
    small = images[:1].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: transform(x)[:, [0, 5, 12, 40]], small, atol=1e-4)


@pytest.mark.parametrize("size", [(27, 28), (28, 30), (2, 8), (0, 4)])
def test_other_sizes_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"multiples of 4, not {size[0]}x{size[1]}"):
        Scattering(*size)


def test_other_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected images of shape \(n, channels, 8, 8\), got \(2, 1, 8, 12\)"):
        Scattering(8, 8)(torch.zeros(2, 1, 8, 12))


@pytest.mark.gpu
def test_a_gpu_gives_the_same() -> None:
    images = pictures(28, 28)
    assert torch.allclose(Scattering(28, 28).cuda()(images.cuda()).cpu(), Scattering(28, 28)(images), atol=1e-5)
