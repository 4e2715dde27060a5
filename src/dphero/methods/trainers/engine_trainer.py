"""The trainer of all methods that train with the privacy engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dphero.accounting import Ledger, Price, Statement, calibrate_noise_multiplier
from dphero.engine import PrivacyEngine
from dphero.guidance import Prior
from dphero.guidance.prior.processes import PROCESSES
from dphero.methods.card import Card
from dphero.methods.task import Task
from dphero.methods.trainer import Step, Trainer, gradients_of
from dphero.methods.trainers.augmentation import OnViews, random_views
from dphero.methods.trainers.averaging import WeightAverage
from dphero.models import FeatureModel

_FEATURES_OF = 2048
"""Synthetic images whose features stand for those of private ones, where guidance wants that."""


class PrivateTrainer(Trainer):
    """Trains a module with a :class:`~dphero.PrivacyEngine`.

    The recipe gives ε or σ, lot, clip norm, length and seed; the method gives the rest.

    Args:
        card: The method's card.
        task: What to train on.
        module: What is trained instead of the task's module.
        train: The examples it takes, instead of the task's.
        noise_multiplier: σ, where the method calibrates it by itself; the recipe's ε, if given, is kept as a limit.
        besides: Further releases that the method will record in :attr:`ledger`; the recipe's ε has to cover them too.
        optimizer: Of the module's parameters, instead of the recipe's.
        engine: Goes on with an engine, and its ledger, that has trained another module; needs ``noise_multiplier``.
        seed: Instead of the recipe's.
        options: Arguments of ``make_private``: the method's choices. Where the recipe makes a choice too
            (guidance, mechanism, clipping), the recipe's holds.
    """

    def __init__(
        self,
        card: Card,
        task: Task,
        *,
        module: nn.Module | None = None,
        train: TensorDataset | None = None,
        noise_multiplier: float | None = None,
        besides: Ledger | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        engine: PrivacyEngine | None = None,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(card, task)
        recipe = task.recipe
        self.module = task.module if module is None else module
        self.average = None if recipe.averaging is None else WeightAverage(task.model, recipe.averaging)
        if self.average is not None:
            self.model = self.average.mean
        self.views = task.recipe.views
        if self.views is not None:
            _require_images(task)
            self.module = OnViews(self.module)
        self.train = task.train if train is None else train
        self.engine = PrivacyEngine(accountant=recipe.accountant) if engine is None else engine
        self.optimizer = task.optimizer(self.module) if optimizer is None else optimizer
        arguments = self._arguments(recipe.seed if seed is None else seed, options or {})
        sigma = recipe.noise_multiplier if noise_multiplier is None else noise_multiplier
        if sigma is None and besides is not None and recipe.epsilon is not None:
            sigma = calibrate_noise_multiplier(
                recipe.epsilon, recipe.delta, task.sample_rate, self.steps, recipe.accountant, besides=besides
            )
        if sigma is not None:
            _, _, self.loader = self.engine.make_private(noise_multiplier=sigma, **arguments)
            if recipe.epsilon is not None:
                self.engine.limit(recipe.epsilon, recipe.delta)
        elif recipe.epsilon is not None:
            _, _, self.loader = self.engine.make_private_with_epsilon(
                target_epsilon=recipe.epsilon, target_delta=recipe.delta, steps=self.steps, **arguments
            )
        else:
            raise ValueError(f"method {card.name!r} is private: give --epsilon or --noise-multiplier")
        self._attached = True
        self._adaptive_clip = arguments.get("clipping") == "adaptive"
        self._batches: Iterator[Any] | None = None
        self._parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._size = sum(parameter.numel() for parameter in self._parameters)
        self._seen = self.engine.diagnostics

    def _arguments(self, seed: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the engine's arguments: the recipe's, then the method's, then what the recipe chose by name."""
        task, recipe = self.task, self.task.recipe
        guidance = self._prior() if recipe.guidance == "prior" else recipe.guidance
        shape = {"guidance": guidance, "mechanism": recipe.mechanism, "clipping": recipe.clipping}
        return {
            "module": self.module,
            "optimizer": self.optimizer,
            "data_loader": self.train,
            "max_grad_norm": recipe.clip,
            "sample_rate": task.sample_rate,
            "expected_batch_size": recipe.lot,
            "physical_batch_size": recipe.physical_batch,
            "seed": seed,
            "secure": recipe.secure,
            "cuda_graphs": task.cuda_graphs,
            **options,
            **{name: value for name, value in shape.items() if value is not None},
        }

    def _prior(self) -> Prior:
        """Return the guidance that looks at synthetic images, as the trained part of the network sees them."""
        task, shape = self.task, tuple(self.task.images.shape[1:])
        if self.views is not None:
            raise ValueError("guidance 'prior' knows nothing of several views of an image: leave out one of the two")
        if self.module is not task.module or self.train is not task.train:
            raise ValueError(
                f"guidance 'prior' shapes the noise of the recipe's own network, and method {self.card.name!r} trains "
                "another one: leave --guidance out"
            )
        if len(shape) != 3:
            raise ValueError(
                f"guidance 'prior' draws synthetic images, and the inputs have shape {shape}: leave --guidance out, or "
                "in Python give Prior public inputs of your own"
            )
        if not isinstance(task.model, FeatureModel):
            return Prior(self.module, shape)
        random = torch.Generator(task.device).manual_seed(0)
        with torch.no_grad():
            return Prior(self.module, task.model.features(PROCESSES["spectrum"](_FEATURES_OF, shape, random)))

    @property
    def step(self) -> int:
        """How many lots were released."""
        return self.engine.steps

    @property
    def ledger(self) -> Ledger:
        """The engine's ledger."""
        return self.engine.ledger

    def advance(self) -> Step:
        """Draw a lot, release its gradient, and let the optimizer use it."""
        self.module.train()
        before, loss, rows = self.engine.steps, torch.zeros((), device=self.task.device), 0
        self.optimizer.zero_grad()
        while self.engine.steps == before:  # a lot may come in several physical batches
            inputs, labels = self._next()
            if self.views is not None:
                inputs = random_views(inputs, self.views, self.task.augmentation)
            batch_loss = self.loss(inputs, labels)
            batch_loss.backward()
            loss, rows = loss + batch_loss.detach() * len(labels), rows + len(labels)
        self.treat()
        self.optimizer.step()
        if self.average is not None:
            self.average.take()
        now, was = self.engine.diagnostics, self._seen
        self._seen = now
        examples = now.examples - was.examples
        return Step(
            loss=loss / max(rows, 1),
            clipped=(now.clipped - was.clipped) / examples if examples else None,
            signal_to_noise=self._signal_to_noise() if self.step % 10 == 1 else None,
        )

    def treat(self) -> None:
        """Change the private gradient, in place, before the optimizer uses it: post-processing, free of charge."""

    def released_gradient(self) -> dict[str, torch.Tensor]:
        """Return the private gradient that the engine handed to the optimizer."""
        return gradients_of(self.task.model, self.module) if self.step else {}

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        outputs = self.module(inputs)
        if self.views is not None:
            outputs, labels = outputs.flatten(0, 1), labels.repeat_interleave(self.views)
        return F.cross_entropy(outputs, labels)

    def _next(self) -> Any:
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self.loader)
            batch = next(self._batches, None)
            if batch is not None:
                return batch
            self._batches = None
        raise AssertionError("an epoch has at least one lot")

    def _signal_to_noise(self) -> float | None:
        """√(‖g̃‖² / E‖noise‖² − 1), where the noise's energy is that of its normalised geometry, d σ² C² / B²."""
        if self._adaptive_clip:  # C has moved since
            return None
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        energy = torch.stack(torch._foreach_norm(gradients)).square().sum().item()
        scale = self.engine.noise_multiplier * self.task.recipe.clip / self.task.recipe.lot
        return math.sqrt(max(energy / (self._size * scale**2) - 1, 0.0))

    def price(self, delta: float, *, coarse: bool = False) -> Price:
        """Return what the engine's releases cost."""
        return self.engine.price(delta, coarse=coarse)

    def statement(self, delta: float) -> Statement:
        """Return the engine's statement."""
        return self.engine.statement(delta, unit=self.card.protects)

    def save(self, path: str | PathLike[str], extra: Mapping[str, Any]) -> None:
        """Write the engine's checkpoint."""
        own = {} if self.average is None else {"average": self.average.state()}
        self.engine.save(path, extra={**extra, **own})

    def load(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Load the engine's checkpoint."""
        extra = self.engine.load(path)
        if self.average is not None:
            self.average.restore(extra.pop("average"))
        self._batches, self._seen = None, self.engine.diagnostics
        return extra

    def close(self) -> None:
        """Detach the engine, unless that was done."""
        if self._attached:
            self.engine.detach()
        self._attached = False


def _require_images(task: Task) -> None:
    """Refuse several views of what is no image, or of features that were computed before."""
    if isinstance(task.model, FeatureModel):
        raise ValueError(
            f"views are made anew at every step, and model {task.recipe.model!r} has features that are computed once: "
            "leave --views out"
        )
    if task.images.dim() != 4:
        raise ValueError("views are moved and mirrored images, and this data is none: leave --views out")
