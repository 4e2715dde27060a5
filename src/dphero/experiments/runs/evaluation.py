"""Test accuracy: how many images a model gets right, and the fixed features that some models begin with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dphero.data import Split
from dphero.models import FeatureModel

CHUNK = 500
"""Images that pass through a model at a time: on a CPU more would leave its cache."""


class Evaluation:
    """Test images on the device, and how many of them a model gets right."""

    def __init__(self, test: Split, device: torch.device) -> None:
        self.images, self.labels = test.images.to(device), test.labels.to(device)
        self._features: tuple[nn.Module, Tensor] | None = None

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Return the share of images that are classified rightly; fixed features are computed once."""
        was_training = model.training
        model.eval()
        head, inputs = model, self.images
        if isinstance(model, FeatureModel):
            if self._features is None or self._features[0] is not model.features:
                self._features = (model.features, features(model, self.images))
            head, inputs = model.head, self._features[1]
        found = torch.cat([head(part).argmax(1) for part in inputs.split(CHUNK)])
        model.train(was_training)
        return (found == self.labels).float().mean().item()


@torch.no_grad()
def features(model: FeatureModel, images: Tensor) -> Tensor:
    """Return the fixed features of images, computed in parts that fit in memory."""
    first = model.features(images[:CHUNK])
    found = first.new_empty(len(images), *first.shape[1:])  # written in place: twice the features may not fit in memory
    found[:CHUNK] = first
    for start in range(CHUNK, len(images), CHUNK):
        found[start : start + CHUNK] = model.features(images[start : start + CHUNK])
    return found
