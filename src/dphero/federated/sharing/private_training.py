"""Training of the small networks that make shared data: with the privacy engine, or, for study, without privacy."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from dphero.accounting import Ledger
from dphero.data import Split
from dphero.engine import PrivacyEngine

_EPOCHS, _LEARNING_RATE, _CLIP = 20, 1e-2, 1.0


class Trainable(Protocol):
    """A network that knows its own loss; a ``torch.nn.Module``."""

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean of a loss over examples."""


def rows_of(data: Split, classes: int) -> Tensor:
    """Return images as rows of pixels and one-hot class."""
    return torch.cat([data.images.flatten(1), F.one_hot(data.labels, classes).float()], 1)


def releases(records: int, lot: int) -> int:
    """Return how many releases a training makes."""
    return _EPOCHS * max(1, round(records / lot))


def train(
    model: Trainable, rows: Tensor, *, records: int, lot: int, noise_multiplier: float | None, seed: int | None
) -> Ledger:
    """Train a network on a client's data; return what that released.

    Args:
        model: The network, with public initial weights.
        rows: The private examples.
        records: Their public number.
        lot: Expected examples in a step.
        noise_multiplier: σ; ``None`` trains without privacy, and then the ledger is not the caller's price.
        seed: Makes it repeatable.
    """
    assert isinstance(model, torch.nn.Module)
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    steps = releases(records, lot)
    if noise_multiplier is None:
        for _ in range(steps):
            optimizer.zero_grad()
            model.loss(rows[torch.randint(len(rows), (lot,))]).backward()
            optimizer.step()
        return Ledger()
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
    return ledger
