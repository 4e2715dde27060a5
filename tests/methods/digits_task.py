"""A small real task for the tests of methods: scikit-learn's digits and a network of 750 weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero.methods import Task, Trainer, make
from dphero.methods.recipe import Recipe

TRAINING = 1400


@cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def network() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 10))
    for parameter in model.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def make_task(records: int = TRAINING, model: nn.Module | None = None, **settings: Any) -> Task:
    """A task on the first ``records`` digits; ``settings`` are the recipe's."""
    images, labels = (tensor[:records].clone() for tensor in digits())
    model = network() if model is None else model
    chosen: dict[str, Any] = {"seed": 1, "dataset_size": "public", "lot": records // 4, "clip": 0.5, "device": "cpu"}
    recipe = Recipe(data="digits", model="digits", **{**chosen, "lr": 0.5, "momentum": 0.9, "delta": 1e-4, **settings})
    return Task(recipe, TensorDataset(images, labels), model, model, images, 10)


def start(method: str, *, options: dict[str, Any] | None = None, **settings: Any) -> Trainer:
    return make(method, options).start(make_task(**settings))


def accuracy(trainer: Trainer) -> float:
    """On digits that were not trained on."""
    images, labels = (tensor[TRAINING:] for tensor in digits())
    trainer.model.eval()
    with torch.no_grad():
        return (trainer.model(images).argmax(1) == labels).float().mean().item()


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.model.parameters()])


def resumes_exactly(method: str, folder: Path, half: int = 5, **arguments: Any) -> None:
    """Train 2 × half steps; train half, save, load into a new trainer, train half: the same weights and ledger."""
    unbroken = start(method, **arguments)
    for _ in range(2 * half):
        unbroken.advance()
    broken = start(method, **arguments)
    for _ in range(half):
        broken.advance()
    broken.save(folder / "checkpoint.pt", {"seconds": 1.5})
    resumed = start(method, **arguments)
    assert resumed.load(folder / "checkpoint.pt") == {"seconds": 1.5}
    for _ in range(half):
        resumed.advance()
    assert resumed.step == unbroken.step == 2 * half
    assert torch.equal(weights(resumed), weights(unbroken))
    assert not torch.equal(weights(resumed), weights(broken))
    assert resumed.ledger == unbroken.ledger
    assert resumed.price(1e-4) == unbroken.price(1e-4)
