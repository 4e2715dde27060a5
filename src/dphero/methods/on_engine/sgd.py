"""Ordinary training without privacy: the ceiling that private methods are measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from dphero.accounting import NoNoise
from dphero.methods.card import Card
from dphero.methods.method import Method, register
from dphero.methods.task import Task
from dphero.methods.trainer import Step, Trainer, gradients_of
from dphero.methods.trainers.base_trainer import OwnTrainer, key_of
from dphero.sampling import ShuffleSampler


class SGDTrainer(OwnTrainer):
    """Takes steps along exact gradients."""

    def __init__(self, card: Card, task: Task) -> None:
        super().__init__(card, task)
        self.sampler = ShuffleSampler(
            len(task.train), min(task.recipe.lot, len(task.train)), key_of(task.recipe.seed, "lots")
        )
        self.steps = max(1, round(task.recipe.epochs * self.sampler.lots_per_epoch))

    def take(self) -> Step:
        """Take a step along the exact gradient of a shuffled batch."""
        lot = torch.from_numpy(self.sampler.draw(self.step)).to(self.task.device)
        inputs, labels = (tensor[lot] for tensor in self.task.train.tensors)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.module(inputs), labels)
        loss.backward()
        self.optimizer.step()
        self._ledger.record(NoNoise())
        return Step(loss=loss.detach())

    def released_gradient(self) -> dict[str, torch.Tensor]:
        """Return the exact gradient: it is released as it is, and protects nobody."""
        return gradients_of(self.model, self.module)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "sampler": self.sampler.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.sampler.load_state_dict(state["sampler"])


@register
@dataclass(frozen=True)
class SGD(Method):
    """Shuffled batches, exact gradients; ε = ∞."""

    card: ClassVar[Card] = Card(
        name="sgd",
        title="SGD without privacy",
        protects="nothing",
        relation="none",
        sampling="shuffled epochs",
        paper="Robbins and Monro 1951",
        priced="ε = ∞",
        flaws=("not private: the ceiling for the others",),
    )
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "*": {"lot": 128, "lr": 0.05, "momentum": 0.9, "epochs": 10},
        "digits": {"lot": 64, "epochs": 20},
        "cifar10": {"lr": 0.02, "epochs": 20},
    }

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        if task.recipe.epsilon is not None:
            raise ValueError(
                f"method 'sgd' protects nothing and cannot keep epsilon {task.recipe.epsilon:g}: leave --epsilon out, "
                "or take a private --method such as dp-sgd"
            )
        return SGDTrainer(self.card, task)
