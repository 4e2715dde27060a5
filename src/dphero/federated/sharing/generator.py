"""A small conditional VAE, trained with the privacy engine: FedFed's q, and the generator of ``--shared generated``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero.accounting import Ledger
from dphero.data import Split
from dphero.engine import PrivacyEngine

__all__ = ["Generator", "generator_steps", "train_generator"]

_EPOCHS, _LEARNING_RATE, _CLIP = 20, 1e-2, 1.0
_KL = 1.0  # weight of the latent's divergence beside the squared error of the pixels


class Generator(nn.Module):
    """q: an image and its class in, the image that a narrow latent remembers out.

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
    def remember(self, rows: Tensor) -> Tensor:
        """Return q(x), the part of each image that the latent remembers."""
        mean, _ = self.encode(rows).chunk(2, 1)
        return self.decode(torch.cat([mean, rows[:, self.size :]], 1))

    @torch.no_grad()
    def draw(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Return new images of given classes."""
        latent = torch.randn(len(labels), self.latent, generator=generator)
        return self.decode(torch.cat([latent, F.one_hot(labels, self.classes).float()], 1))


def rows_of(data: Split, classes: int) -> Tensor:
    """Return images as rows of pixels and one-hot class."""
    return torch.cat([data.images.flatten(1), F.one_hot(data.labels, classes).float()], 1)


def generator_steps(records: int, lot: int) -> int:
    """Return how many releases the training makes."""
    return _EPOCHS * max(1, round(records / lot))


def train_generator(
    data: Split, classes: int, *, records: int, lot: int, noise_multiplier: float | None, seed: int | None
) -> tuple[Generator, Ledger]:
    """Train a generator on a client's data; return it, and what its training released.

    Args:
        data: The private examples.
        classes: Number of classes.
        records: Their public number.
        lot: Expected examples in a step.
        noise_multiplier: σ; ``None`` trains without privacy, and then the ledger is not the caller's price.
        seed: Makes it repeatable.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # public initial weights
        model = Generator(data.images[0].numel(), classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    rows, steps = rows_of(data, classes), generator_steps(records, lot)
    if noise_multiplier is None:
        for _ in range(steps):
            optimizer.zero_grad()
            model.loss(rows[torch.randint(len(rows), (lot,))]).backward()
            optimizer.step()
        return model, Ledger()
    engine = PrivacyEngine()
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=TensorDataset(rows),
        noise_multiplier=noise_multiplier,
        max_grad_norm=_CLIP,
        sample_rate=lot / records,
        expected_batch_size=lot,
        guidance="isotropic",
        seed=seed,
    )
    while engine.steps < steps:
        for (batch,) in loader:
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()
            if engine.steps >= steps:
                break
    ledger = engine.ledger
    engine.detach()
    return model, ledger
