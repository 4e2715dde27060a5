"""The paper's convergence figures, and how large each is here."""

from __future__ import annotations

from dphero.experiments.reproduction.figures.curves import Curves, Shape
from dphero.experiments.reproduction.settings import CIFAR, LOTS, MNIST, QUICK_SEEDS, RATES, SEEDS

_TINY = Shape(MNIST["tiny"], 4, 2, sigmas=(3.0,))

ITERATIONS = Curves(
    "iterations",
    "The first iterations on MNIST, by σ (the paper's Figure 1)",
    {
        "tiny": _TINY,
        "quick": Shape(MNIST["quick"], 100, 10, seeds=QUICK_SEEDS),
        "full": Shape(MNIST["full"], 200, 2, seeds=SEEDS),
    },
    mark=30,
)
EPOCHS = Curves(
    "epochs",
    "Training on MNIST in epochs, by σ (the paper's Figure 2)",
    {
        "tiny": _TINY,
        "quick": Shape(MNIST["quick"], 300, 30, seeds=QUICK_SEEDS),
        "full": Shape(MNIST["full"], 6_000, 150, seeds=SEEDS),
    },
    axis="epoch",
)
CIFAR_EPOCHS = Curves(
    "cifar",
    "Training on CIFAR-10 from scratch, by σ (the paper's Figure 3)",
    {
        "tiny": _TINY,
        "quick": Shape(CIFAR["quick"], 60, 10, sigmas=(1.0, 5.0, 10.0), lots=(50,), seeds=QUICK_SEEDS),
        "full": Shape(CIFAR["full"], 5_000, 125, seeds=SEEDS),
    },
    axis="epoch",
)
LOT_SIZES = Curves(
    "lots",
    "The first iterations on MNIST, by lot size L and σ (the paper's Figure 5)",
    {
        "tiny": Shape(MNIST["tiny"], 4, 2, sigmas=(3.0,), lots=(10, 50)),
        "quick": Shape(MNIST["quick"], 120, 20, sigmas=(1.0, 3.0, 5.0), lots=LOTS, seeds=QUICK_SEEDS),
        "full": Shape(MNIST["full"], 300, 10, sigmas=(1.0, 3.0, 5.0), lots=LOTS, seeds=SEEDS),
    },
    by="lot",
)
LEARNING_RATES = Curves(
    "learning-rates",
    "The first iterations on MNIST at two learning rates (the paper's Figure 6, η = 0.2)",
    {
        "tiny": Shape(MNIST["tiny"], 4, 2, sigmas=(3.0,), rates=RATES),
        "quick": Shape(MNIST["quick"], 100, 10, sigmas=(1.0, 5.0, 10.0), rates=RATES, seeds=QUICK_SEEDS),
        "full": Shape(MNIST["full"], 300, 10, rates=RATES, seeds=SEEDS),
    },
    by="lr",
)
