"""What a run needs before its first step: the data on its device, the network, the task."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from dphero import data as datasets
from dphero import models
from dphero.data import Data
from dphero.experiments.runs.evaluation import CHUNK, features
from dphero.methods import Task, make
from dphero.methods.recipe import Recipe
from dphero.models import FeatureModel


def prepare(recipe: Recipe, data: Data | None = None) -> tuple[Task, Data]:
    """Load the data to the device, once, and build the model.

    A model that begins with a fixed transform has it applied to all images here: training sees the features only.

    Args:
        recipe: What to prepare.
        data: The data, if it is loaded already.

    Raises:
        ValueError: If data, model or device do not exist or do not fit together.
    """
    device = _device(recipe.device)
    data = datasets.load(recipe.data, recipe.channels) if data is None else data
    if data.public_size and recipe.dataset_size is None:
        recipe = recipe.with_(dataset_size="public")
    classes = len(data.classes)
    model = models.build(recipe.model, tuple(data.train.images.shape[1:]), classes, seed=recipe.seed or 0)
    model = make(recipe.method, recipe.options).network(model).to(device)
    images, labels = data.train.images.to(device), data.train.labels.to(device)
    module, inputs = model, images
    if isinstance(model, FeatureModel):
        models.require_rowwise(model.features, images[:CHUNK], f"what model {recipe.model!r} computes as features")
        module, inputs = model.head, features(model, images)
    task = Task(
        recipe=recipe,
        train=TensorDataset(inputs, labels),
        model=model,
        module=module,
        images=images,
        classes=classes,
    )
    if (
        recipe.dataset_size is not None and recipe.delta * task.records >= 1
    ):  # the public number: the true one is private
        raise ValueError(
            f"delta {recipe.delta:g} is not below one over the number of records: it would allow publishing "
            "somebody's record. Give a smaller --delta"
        )
    return task, data


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device
