"""A small private training run, for tests of the engine and its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from dphero import PrivacyEngine
from dphero.sampling import PrivateLoader

FEATURES, CLASSES = 6, 3

Loss = Callable[[Tensor, Tensor], Tensor]


def data(records: int = 60, seed: int = 0) -> TensorDataset:
    """Return records with a label that their features tell."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, FEATURES, generator=generator)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def network(seed: int = 0, *more: nn.Module) -> nn.Sequential:
    """Return a small network whose weights the seed decides; ``more`` modules come before the last layer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), *more, nn.Linear(8, CLASSES))


@dataclass
class Training:
    """What ``make_private`` returned, and what it was given."""

    engine: PrivacyEngine
    module: nn.Module
    optimizer: Optimizer
    loader: PrivateLoader
    scheduler: Any = None

    def steps(self, count: int, loss: Loss = F.cross_entropy) -> list[dict[str, Tensor]]:
        """Train for a number of lots; return the private gradient of each."""
        released: list[dict[str, Tensor]] = []
        stop = self.engine.steps + count
        while self.engine.steps < stop:
            for x, y in self.loader:
                before = self.engine.steps
                self.optimizer.zero_grad()
                loss(self.module(x), y).backward()
                self.optimizer.step()
                if self.engine.steps > before:
                    released.append(self.gradients())
                    if self.scheduler is not None:
                        self.scheduler.step()
                if self.engine.steps == stop:
                    break
        return released

    def gradients(self) -> dict[str, Tensor]:
        """Return a copy of what the parameters hold."""
        return {name: p.grad.clone() for name, p in self.module.named_parameters() if p.grad is not None}

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the model's state."""
        return {name: value.clone() for name, value in self.module.state_dict().items()}


def training(
    module: nn.Module | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    dataset: Any = None,
    scheduler: Callable[[Optimizer], Any] | None = None,
    engine: PrivacyEngine | None = None,
    **options: Any,
) -> Training:
    """Make a small model private: lots of 12 of 60 records, seeded, unless told otherwise."""
    module = network() if module is None else module
    made = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.5)))(module.parameters())
    schedule = None if scheduler is None else scheduler(made)
    defaults: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "dataset_size": "public"}
    if not options.get("secure") and "seed" not in options:
        defaults["seed"] = 7
    if "data_loader" not in options:
        defaults["data_loader"] = DataLoader(data() if dataset is None else dataset, batch_size=12)
    engine = engine or PrivacyEngine()
    module, made, loader = engine.make_private(module=module, optimizer=made, **{**defaults, **options})
    return Training(engine, module, made, loader, schedule)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two states are equal, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
