"""Attacks on what happens between a record and the model's forward pass: random numbers, collate functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from _attack import Attack, Figures
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero import PrivacyEngine
from dphero.audit.statistics import separate
from dphero.sampling.randomness import SecretGenerators

DELTA = 1e-5


def released_sum(model: nn.Module, data: Any, sigma: float, **options: Any) -> Tensor:
    """Return what one release of everybody publishes: the sum of clipped gradients (C = 1), with noise."""
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"sample_rate": 1.0, "expected_batch_size": 1, "max_grad_norm": 1.0, "guidance": "isotropic", **options}
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=data, noise_multiplier=sigma, **settings
    )
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        break
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    engine.detach()
    return found


def tell_apart(release: Callable[[bool, float], Tensor], sigma: float, pilots: int, trials: int) -> Figures:
    """Attack one release: project on how far the mean moves with the canary, and count how often that tells.

    Args:
        release: Returns a release with or without the canary, at a noise multiplier.
        sigma: The noise multiplier that is attacked.
        pilots: Releases almost without noise, from which the attacker learns the direction.
        trials: Releases on each side that he then tells apart.
    """
    means = [torch.stack([release(inside, 1e-6) for _ in range(pilots)]).mean(0) for inside in (True, False)]
    direction = means[0] - means[1]
    moved = float(direction.norm())
    sides = [
        np.array([float(release(inside, sigma) @ direction) / moved for _ in range(trials)]) for inside in (True, False)
    ]
    evidence = separate(*sides, delta=DELTA, confidence=0.95)
    fitted = float(sides[0].mean() - sides[1].mean()) / float(np.sqrt((sides[0].var() + sides[1].var()) / 2))
    return {
        "mean moves by (C)": moved,
        "claimed ε": gaussian_epsilon(1 / sigma),
        "audited ε": max(each.epsilon(DELTA) for each in evidence),
        "fitted ε": gaussian_epsilon(max(fitted, 1e-3)),
    }


def gaussian_epsilon(mu: float) -> float:
    """Return ε at δ of μ-Gaussian privacy: of one Gaussian release with μ = sensitivity over standard deviation."""
    from scipy.optimize import brentq
    from scipy.special import ndtr

    def excess(epsilon: float) -> float:
        return float(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)) - DELTA

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, 20 * mu + mu * mu))


# -- dropout under a seed that everybody knows ------------------------------------------------------------------------

DROPOUT_RECORDS, DROPOUT_SIGMA = 512, 4.0


def dropout_network() -> nn.Module:
    torch.manual_seed(0)  # as the first line of most scripts
    layers = [nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(64, 2))


def dropout_release(inside: bool, sigma: float) -> Tensor:
    records = DROPOUT_RECORDS + inside  # all alike: the order in which a lot comes is secret
    return released_sum(dropout_network(), TensorDataset(torch.ones(records, 8), torch.ones(records).long()), sigma)


@contextmanager
def known_random_numbers() -> Iterator[None]:
    """Let the forward pass draw from the user's generators."""
    with patch.object(SecretGenerators, "_swap", lambda self, source: None):
        yield


def attack_dropout() -> Figures:
    return tell_apart(dropout_release, DROPOUT_SIGMA, pilots=4, trials=100)


def attack_dropout_without_guard() -> Figures:
    with known_random_numbers():
        return attack_dropout()


ATTACKS = [
    Attack(
        "dropout under a known seed",
        "torch.manual_seed(0) at the top of a script that trains a network with dropout (512 records, one release)",
        attack_dropout_without_guard,
        attack_dropout,
    ),
]
