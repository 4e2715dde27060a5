"""Features that know of synthetic images: mirrored, whitened, joined; the same whenever they are made."""

import torch
from torch import nn

from dphero.models import build
from dphero.models.synthetic import Joined, Mirrored, Whitened, synthetic_images


class Correlated(nn.Module):
    """Numbers of very different size that depend on one another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return torch.cat([flat[:, :5] * 10 + flat[:, 5:6], flat[:, 6:9]], 1)


def test_mirror_images_look_the_same() -> None:
    transform, images = Mirrored(nn.Flatten()), torch.rand(4, 3, 8, 8)
    assert torch.equal(transform(images), transform(images.flip(3)))
    assert not torch.equal(nn.Flatten()(images), nn.Flatten()(images.flip(3)))
    network = build("scatter-mirrored", (3, 8, 8), 10)
    assert torch.allclose(network(images), network(images.flip(3)), atol=1e-5)


def test_whitening_goes_half_of_the_way() -> None:
    """Against the definition: (D + floor)^-1/4 V^T of what is scaled, from a decomposition of the covariance."""
    whitened, images = Whitened(Correlated(), (1, 4, 4)), synthetic_images((1, 4, 4))
    seen = Correlated()(images).double()
    scale = seen.std(0)
    scale = scale + 0.05 * scale.mean()
    rows = (seen - seen.mean(0)) / scale
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    expected = rows @ vectors * (values + 0.03 * values.mean()) ** -0.25 @ vectors.T
    assert torch.allclose(whitened(images).double(), expected, atol=1e-3)


def test_whitening_is_the_same_whenever_it_is_made() -> None:
    first, second = (build("scatter-whitened", (1, 8, 8), 10, seed=seed).features.state_dict() for seed in (1, 2))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_joined_parts_have_one_size() -> None:
    joined = Joined([nn.Flatten(), Correlated()])
    out = joined(torch.rand(6, 1, 4, 4))
    for part in (out[:, :16], out[:, 16:]):
        assert torch.allclose(part.norm(dim=1), torch.ones(6))
