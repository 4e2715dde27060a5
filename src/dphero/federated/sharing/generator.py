"""The generator of ``--shared generated``: a small VAE that draws images of a given class."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_KL = 1.0  # weight of the latent's divergence beside the squared error of the pixels


class Generator(nn.Module):
    """An image and its class in, the image that a narrow latent remembers out.

    Args:
        size: Number of pixels.
        classes: Number of classes.
        hidden: Width.
        latent: Numbers that an image has to pass through.
    """

    def __init__(self, size: int, classes: int, hidden: int = 128, latent: int = 4) -> None:
        super().__init__()
        self.size, self.classes, self.latent = size, classes, latent
        self.encode = nn.Sequential(nn.Linear(size + classes, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent))
        self.decode = nn.Sequential(nn.Linear(latent + classes, hidden), nn.Tanh(), nn.Linear(hidden, size), nn.Tanh())

    def forward(self, rows: Tensor) -> Tensor:
        """Return image, latent mean and latent log-variance, side by side; rows are pixels and one-hot classes."""
        mean, log_variance = self.encode(rows).chunk(2, 1)
        latent = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        image = self.decode(torch.cat([latent, rows[:, self.size :]], 1))
        return torch.cat([image, mean, log_variance], 1)

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean over examples of squared error and divergence."""
        image, mean, log_variance = self(rows).split([self.size, self.latent, self.latent], 1)
        error = (image - rows[:, : self.size]).square().sum(1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return (error + _KL * divergence).mean()

    @torch.no_grad()
    def draw(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Return new images of given classes."""
        latent = torch.randn(len(labels), self.latent, generator=generator)
        return self.decode(torch.cat([latent, F.one_hot(labels, self.classes).float()], 1))
