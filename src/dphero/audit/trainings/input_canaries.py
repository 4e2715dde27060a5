"""Input canaries (black box): random images with random labels; the attacker sees the final model alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dphero.audit.trainings.one_run import Scored
from dphero.audit.trainings.training import Absent, Train, losses

_IGNORED = -100  # the label without a loss, in PyTorch's cross-entropy: the gradient of its record is zero


@dataclass(eq=False)
class InputCanaries:
    """Black box: random images with random labels among the data; the score is minus the final loss.

    Args:
        train: Any training.
        images: The data.
        labels: Their labels.
        canaries: m.
        classes: Number of classes.
        seed: Decides the canaries (not the coins).
        absent: What stands for a canary that is "out".
    """

    train: Train
    images: Tensor
    labels: Tensor
    canaries: int
    classes: int
    seed: int = 0
    absent: Absent = "nothing"

    def __call__(self, included: NDArray[np.bool_], seed: int, /) -> Scored:
        """Train once."""
        generator = torch.Generator().manual_seed(self.seed)
        images = torch.randn(self.canaries, *self.images.shape[1:], generator=generator).sign().to(self.images)
        labels = torch.randint(self.classes, (self.canaries,), generator=generator).to(self.labels)
        inside = torch.from_numpy(included).to(images.device)
        planted, classes = self._planted(images, labels, inside, generator)
        trained = self.train(torch.cat([self.images, planted]), torch.cat([self.labels, classes]), seed)
        scores = -losses(trained.model, images, labels)
        return Scored(scores.cpu().numpy(), trained.epsilon, trained.claim)

    def _planted(
        self, images: Tensor, labels: Tensor, inside: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the records that are added to the data: the canaries that are in, and what stands for the others."""
        if self.absent == "nothing":
            return images[inside], labels[inside]
        if self.absent == "blank":
            blank = (~inside).view(-1, *[1] * (images.dim() - 1))
            return images.masked_fill(blank, 0.0), labels.masked_fill(~inside, _IGNORED)
        others = labels + torch.randint(1, self.classes, labels.shape, generator=generator).to(labels)
        return images, torch.where(inside, labels, others % self.classes)
