"""FedFed's feature distillation: a VAE q and a classifier f of what q leaves out, trained jointly.

    L = 50 mean (q(x) − x)² + 2 CE(f(r), y) + 0.4 CE(f(x), y) + 0.005 KL,     r = x_p + s z,  x_p = x − q(x)

The first term makes x_p small, the second makes it carry the label: so what is left in it is what a classifier needs.
There are two noisy copies r, of s = 0.15 and 0.25. The weights are those of FedFed (Yang et al. 2023); the networks
are smaller, and each client trains them by itself. They never leave it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

COPIES = (0.15, 0.25)
"""Standard deviations of the noise on FedFed's two copies of x_p."""
_RECONSTRUCTION, _SENSITIVE, _WHOLE, _DIVERGENCE = 50.0, 2.0, 0.4, 0.005


class Distiller(nn.Module):
    """q and f.

    Args:
        size: Number of pixels.
        classes: Number of classes.
        hidden: Width.
        latent: Numbers that an image has to pass through.
    """

    def __init__(self, size: int, classes: int, hidden: int = 128, latent: int = 16) -> None:
        super().__init__()
        self.size, self.classes, self.latent = size, classes, latent
        self.encode = nn.Sequential(nn.Linear(size, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent))
        self.decode = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, size), nn.Tanh())
        self.classify = nn.Sequential(nn.Linear(size, hidden), nn.Tanh(), nn.Linear(hidden, classes))

    def forward(self, rows: Tensor) -> Tensor:
        """Return, side by side, q(x), latent mean and log-variance, and the logits of both copies and of the image.

        Rows are pixels and one-hot classes; the classes are for the loss.
        """
        images = rows[:, : self.size]
        mean, log_variance = self.encode(images).chunk(2, 1)
        robust = self.decode(mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean))
        sensitive = images - robust
        logits = [self.classify(sensitive + scale * torch.randn_like(sensitive)) for scale in COPIES]
        return torch.cat([robust, mean, log_variance, *logits, self.classify(images)], 1)

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean of the joint loss over examples."""
        images, labels = rows[:, : self.size], rows[:, self.size :]
        sizes = [self.size, self.latent, self.latent, self.classes, self.classes, self.classes]
        robust, mean, log_variance, *logits = self(rows).split(sizes, 1)
        first, second, whole = (-(labels * each.log_softmax(1)).sum(1) for each in logits)
        error = (robust - images).square().mean(1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean(1)
        sensitive = (first + second) / 2
        return (_RECONSTRUCTION * error + _SENSITIVE * sensitive + _WHOLE * whole + _DIVERGENCE * divergence).mean()

    @torch.no_grad()
    def sensitive(self, rows: Tensor) -> Tensor:
        """Return x_p, the part of each image that the latent does not remember."""
        images = rows[:, : self.size]
        mean, _ = self.encode(images).chunk(2, 1)
        return images - self.decode(mean)
