"""The demonstration: handwritten digits, learned with differential privacy within seconds.

Data, network and settings of ``dphero demo``, as a function that any loop or notebook can call. Needs
scikit-learn, which carries the 1,797 images of 8×8 pixels (extra ``demo``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero.accounting import Statement
from dphero.data import load
from dphero.engine import PrivacyEngine
from dphero.experiments.threads import threads_by_size
from dphero.models import build

EPSILON, DELTA, EPOCHS = 3.0, 1e-4, 40
"""What the settings below were chosen for."""
LOT, LEARNING_RATE, MOMENTUM, CLIP_NORM = 512, 1.0, 0.9, 0.2

_PRICINGS = 20  # ε is computed this often in a run: each time costs as much as several steps


@dataclass(frozen=True)
class Progress:
    """Where training stands after a step.

    Attributes:
        step: Steps taken.
        steps: Steps in all.
        loss: Mean loss of the lot: computed from private data without noise, for its owner's eyes only.
        epsilon: A bound on ε after one of the latest steps.
    """

    step: int
    steps: int
    loss: float
    epsilon: float


@dataclass(frozen=True)
class Result:
    """A trained model and what it cost.

    Attributes:
        model: The trained network.
        accuracy: Share of the held-out images that it classifies rightly.
        test_images: How many those are.
        train_images: How many images it was trained on.
        steps: Noisy releases.
        noise_multiplier: σ.
        statement: The privacy statement; its ``price`` holds ε and δ.
    """

    model: nn.Module
    accuracy: float
    test_images: int
    train_images: int
    steps: int
    noise_multiplier: float
    statement: Statement


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the digits in scikit-learn as training and test data: images in [-1, 1], and labels.

    Raises:
        ImportError: If scikit-learn is missing.
    """
    data = load("digits")
    train, test = (TensorDataset(split.images, split.labels) for split in (data.train, data.test))
    return train, test


def network() -> nn.Module:
    """Return the network, 5,674 parameters, always with the same random weights: they are public."""
    return build("digits", (1, 8, 8), 10)


def train(
    *,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    epochs: int = EPOCHS,
    seed: int | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Result:
    """Train on the digits with the ellipsoid mechanism, guided by the principal components of the weights.

    Formal guarantee: adding or removing one training image, the weights after every step are
    (ε, δ)-differentially private. The loss and the accuracy are not.

    Args:
        epsilon: ε to stay within.
        delta: δ, below one over the number of training images.
        epochs: How long to train; the noise is chosen so that this length fits into (ε, δ).
        seed: Makes lots and noise repeatable; to be kept secret then.
        report: Called after every step.

    Raises:
        ImportError: If scikit-learn is missing.
        ValueError: If ``delta`` is too large, or no noise meets the target.
    """
    data, held_out = digits()
    if not 0 < delta < 1 / len(data):
        raise ValueError(
            f"delta must be above 0 and below 1 / {len(data)} (one over the number of training images), got {delta:g}: "
            "a larger one would allow publishing somebody's image"
        )
    with threads_by_size(model := network(), data.tensors[0][:1], LOT):
        return _train(model, data, held_out, epsilon, delta, epochs, seed, report)


def _train(
    model: nn.Module,
    data: TensorDataset,
    held_out: TensorDataset,
    epsilon: float,
    delta: float,
    epochs: int,
    seed: int | None,
    report: Callable[[Progress], None],
) -> Result:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    engine = PrivacyEngine()
    _, _, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=data,
        target_epsilon=epsilon,
        target_delta=delta,
        epochs=epochs,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=LOT,
        dataset_size="public",  # anyone can look it up
        seed=seed,
    )
    steps, spent = epochs * len(loader), 0.0
    every = max(1, steps // _PRICINGS)
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            if engine.steps == 1 or engine.steps % every == 0:
                spent = engine.get_epsilon(delta, coarse=True)
            report(Progress(engine.steps, steps, loss.item(), spent))
    statement = engine.statement(delta, unit="one training image")
    result = Result(
        model=model,
        accuracy=_accuracy(model, *held_out.tensors),
        test_images=len(held_out),
        train_images=len(data),
        steps=engine.steps,
        noise_multiplier=engine.noise_multiplier,
        statement=statement,
    )
    engine.detach()
    return result


@torch.no_grad()
def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return int((model(images).argmax(1) == labels).sum()) / len(labels)
