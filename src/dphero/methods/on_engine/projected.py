"""Projected DP-SGD: the noisy gradient, projected on the span of public gradients (Zhou, Wu and Banerjee 2021)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from dphero._checks import whole
from dphero.guidance.prior.processes import PROCESSES
from dphero.methods.card import Card
from dphero.methods.method import Method, register
from dphero.methods.task import Task
from dphero.methods.trainer import Step, Trainer
from dphero.methods.trainers.engine_trainer import PrivateTrainer
from dphero.models import FeatureModel

_CHUNK = 16


def leading_directions(gradients: Tensor, count: int) -> Tensor:
    """Return the leading eigenvectors of (1/m) Σ g gᵀ as orthonormal rows, at most ``count`` of them.

    Args:
        gradients: m×d, one row for each public example.
        count: How many.
    """
    wide = gradients.double()  # so that the rows come out orthonormal although they are sums of many
    # m×m, since m is far smaller than d; on the CPU, whose solver does not fail where m exceeds the rank
    values, vectors = torch.linalg.eigh((wide @ wide.mT).cpu())
    values, vectors = values.flip(0)[:count].to(wide), vectors.flip(1)[:, :count].to(wide)
    solid = values > values[0].clamp(min=1e-30) * 1e-10
    return ((vectors[:, solid] / values[solid].sqrt()).mT @ wide).to(gradients.dtype)


def _same_place(first: str, second: str) -> bool:
    """Whether two names of data stand for one, or for one file or folder by different ways."""
    paths = [Path(os.path.expanduser(name)) for name in (first, second)]
    return first == second or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))


class _ProjectedTrainer(PrivateTrainer):
    def __init__(self, card: Card, task: Task, method: Projected) -> None:
        task.require_last_weights_of_one_view(card.name)
        super().__init__(card, task, options={"guidance": "isotropic"})
        self.method = method
        self.inputs, self.labels = method.public_examples(task)
        self.found_at = -1
        self.directions: Tensor | None = None
        self._weights_then: dict[str, Tensor] = {}

    def advance(self) -> Step:
        """Find directions if it is time, before anything is spent; then draw a lot and release its gradient."""
        if self.directions is None or self.step - self.found_at >= self.method.refresh_every:
            weights = {name: value.detach().clone() for name, value in self.module.named_parameters()}
            self._find(self.step, weights)
        return super().advance()

    def treat(self) -> None:
        """Replace the private gradient by its projection: g̃ ← V Vᵀ g̃. Post-processing."""
        assert self.directions is not None
        parts = [parameter.grad for parameter in self._parameters]
        flat = torch.cat([part.flatten() for part in parts if part is not None])
        projected = self.directions.mT @ (self.directions @ flat)
        for part, values in zip(parts, projected.split([p.numel() for p in self._parameters]), strict=True):
            assert part is not None
            part.copy_(values.view_as(part))

    def _find(self, step: int, weights: dict[str, Tensor]) -> None:
        """Find the leading directions of the public gradients at some weights, without dropout."""
        names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

        def loss(trained: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.module, {**weights, **trained}, (x[None],)), y[None])

        self.module.eval()
        with self.engine.paused():
            each = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=_CHUNK)
            found = each({name: weights[name] for name in names}, self.inputs, self.labels)
        self.module.train()
        gradients = torch.cat([found[name].flatten(1) for name in names], 1)
        self.directions = leading_directions(gradients, self.method.directions)
        self.found_at, self._weights_then = step, weights

    def save(self, path: str | PathLike[str], extra: Mapping[str, Any]) -> None:
        """Write the engine's checkpoint, and from which weights the directions were found."""
        own = {"found_at": self.found_at, "weights": self._weights_then, "extra": dict(extra)}
        super().save(path, {"projected": own})

    def load(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Load the engine's checkpoint, and find the directions again."""
        own = super().load(path)["projected"]
        if own["found_at"] >= 0:
            weights = {name: value.to(self.task.device) for name, value in own["weights"].items()}
            self._find(own["found_at"], weights)
        return dict(own["extra"])


@register
@dataclass(frozen=True)
class Projected(Method):
    """DP-SGD whose noisy gradient is projected on the leading directions of public examples' gradients.

    Noise outside these directions, most of it, is thrown away, and so is the signal there: public gradients have
    to span what private ones need. The paper takes public examples from the private data's own distribution. Where
    there are none, synthetic images with labels drawn at random serve here.

    Attributes:
        public: ``leaves`` or ``spectrum`` for synthetic images with random labels, or a data set that is public (see
            ``dphero data list``), whose images are scaled to the size of the private ones.
        examples: How many public examples; 100 in the paper.
        directions: Dimensions of the subspace.
        refresh_every: Steps between two looks at the public gradients.
    """

    card: ClassVar[Card] = Card(
        name="projected",
        title="Projected DP-SGD: noise only along directions of public gradients",
        protects="one training example",
        relation="add or remove",
        sampling="Poisson",
        paper="Zhou, Wu and Banerjee 2021 (arXiv 2007.03813), Bypassing the Ambient Dimension: Private SGD with "
        "Gradient Subspace Identification",
        priced="PLD of the Poisson-sampled Gaussian (the projection is post-processing)",
        flaws=("needs public examples that resemble the private ones: not comparable with training from scratch",),
        extra_data="public or synthetic images (option public)",
    )

    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "mnist": {"options": {"public": "digits", "examples": 1000, "directions": 500, "refresh_every": 20}},
    }

    public: str = "leaves"
    examples: int = 200
    directions: int = 100
    refresh_every: int = 10

    def __post_init__(self) -> None:
        for name in ("examples", "directions", "refresh_every"):
            whole(name, getattr(self, name))
        if self.directions > self.examples:
            raise ValueError(
                f"{self.examples} public examples span at most that many directions, not {self.directions}"
            )

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        return _ProjectedTrainer(self.card, task, self)

    @torch.no_grad()
    def public_examples(self, task: Task) -> tuple[Tensor, Tensor]:
        """Return what the module takes of public examples, and their labels; nothing here depends on private data.

        Raises:
            ValueError: If the public data is the private data, or does not fit it.
        """
        if _same_place(self.public, task.recipe.data):
            raise ValueError(f"public={self.public!r} is the private data itself: it is not public here")
        random = torch.Generator().manual_seed(0)
        shape = tuple(task.images.shape[1:])
        if self.public in PROCESSES:
            if len(shape) != 3:
                raise ValueError("synthetic public examples are images, and this data has no pixels: give public=DATA")
            images = PROCESSES[self.public](self.examples, (shape[0], shape[1], shape[2]), random)
            labels = torch.randint(task.classes, (self.examples,), generator=random)
        else:
            images, labels = self._chosen(shape, task.classes, random)
        images, labels = images.to(task.device), labels.to(task.device)
        return (task.model.features(images) if isinstance(task.model, FeatureModel) else images), labels

    def _chosen(self, shape: tuple[int, ...], classes: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        from dphero import data

        found = data.load(self.public)
        images, labels = found.train.images, found.train.labels
        if images.dim() != len(shape) + 1 or images.shape[1] != shape[0] or len(found.classes) > classes:
            raise ValueError(
                f"public={self.public!r} has images of shape {tuple(images.shape[1:])} and {len(found.classes)} "
                f"classes, the private data {shape} and {classes}: channels must agree, and classes not be more"
            )
        chosen = torch.randperm(len(images), generator=random)[: self.examples]
        images, labels = images[chosen], labels[chosen]
        if images.dim() == 4 and images.shape[1:] != shape:
            images = F.interpolate(images, size=shape[1:], mode="bilinear", antialias=True)
        return images, labels
