"""A task: the private examples, the network and the settings that a method is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero.methods.recipe import Recipe


@dataclass(frozen=True)
class Task:
    """What a method is given.

    Attributes:
        recipe: The settings.
        train: The private examples, one row each, on the device: what ``module`` takes, and labels.
        model: The complete network with public initial weights, on the device; it takes images.
        module: The part of it that is trained. Where the model begins with a fixed public transform, the rows of
            ``train`` have gone through that already, and ``module`` is what follows.
        images: The private images as they came (the same as ``train``'s where nothing was transformed).
        classes: Number of classes.
    """

    recipe: Recipe
    train: TensorDataset
    model: nn.Module
    module: nn.Module
    images: Tensor
    classes: int

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.train.tensors[0].device

    @property
    def cuda_graphs(self) -> bool | Literal["auto"]:
        """Whether to record the network's passes and replay them; unasked, where it pays."""
        wanted = self.recipe.cuda_graphs
        return "auto" if wanted is None else wanted

    @property
    def augmentation(self) -> str:
        """How views of an image differ: it may be mirrored unless it has one channel, as images of writing have."""
        return self.recipe.augment or ("crop" if self.images.shape[1] == 1 else "crop-flip")

    def require_last_weights_of_one_view(self, method: str) -> None:
        """Refuse what a method has no place for, instead of leaving it out in silence.

        Raises:
            ValueError: If the recipe asks for several views of an image, or for a mean of the weights.
        """
        for name in ("views", "averaging"):
            if (value := getattr(self.recipe, name)) is not None:
                raise ValueError(
                    f"method {method!r} knows nothing of {name} {value!r}: leave it out, or take a method on the "
                    "engine, such as dp-sgd, dp-hero or feature-dp"
                )

    @property
    def records(self) -> int:
        """The public number of records.

        Raises:
            ValueError: If no number of records was declared public.
        """
        size = self.recipe.dataset_size
        if size is None:
            raise ValueError(
                "the number of records is private unless you say otherwise: give --dataset-size N, a public figure, or "
                "--dataset-size public, if the number of records in the data is no secret"
            )
        return len(self.train) if size == "public" else size

    @property
    def sample_rate(self) -> float:
        """The probability q = B / N with which an example enters a lot."""
        rate = self.recipe.lot / self.records
        if rate > 1:
            raise ValueError(f"lot {self.recipe.lot} is larger than the data: there are {self.records} records")
        return rate

    @property
    def steps(self) -> int:
        """How many lots the training takes."""
        return max(1, round(self.recipe.epochs * max(1, round(1 / self.sample_rate))))

    def optimizer(self, module: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the recipe's optimizer over the parameters that are trained."""
        recipe, parameters = self.recipe, (self.module if module is None else module).parameters()
        if recipe.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=recipe.lr)
        return torch.optim.SGD(parameters, lr=recipe.lr, momentum=recipe.momentum)
