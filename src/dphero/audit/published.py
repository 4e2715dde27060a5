"""The published recipe on trial: LeNet, one step, the canary where the noise is weakest.

The recipe clips gradients to a ball and shapes the noise by the weights' eigenvalues, at the total variance of
isotropic noise. Its paper prices it as if the noise were isotropic. Along the smallest eigenvector of the 84 × 120
layer the noise is some forty times weaker than that, and an attacker who looks there sees every canary. The ellipsoid
has noise of the very same shape, and clips by it: nothing is seen beyond its price.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from dphero.accounting.numerics.curves import gaussian_epsilon
from dphero.audit.bounds.two_sample import Audit
from dphero.audit.engine_release import EngineRelease
from dphero.audit.mechanism import after, audit_engine
from dphero.audit.settings import Settings
from dphero.audit.threads import one_thread
from dphero.guidance import PCA
from dphero.mechanism.modes import Mode

NOISE_MULTIPLIER = 2.0
"""σ for which the paper's formula claims ε = 2.52 at δ = 1e-5."""

_NAMES: tuple[tuple[Mode, str], ...] = (("published", "published recipe"), ("ellipsoid", "ellipsoid"))


def lenet(seed: int = 0) -> nn.Sequential:
    """Return LeNet-5 for images of 28 × 28, with PyTorch's default initial weights: 61,706 parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
        )  # fmt: skip


@one_thread()
def audit_published(
    *,
    noise_multiplier: float = NOISE_MULTIPLIER,
    releases: int = 1000,
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> list[Audit]:
    """Audit one unsampled step of the recipe as published, and of the ellipsoid with the same noise shape and σ.

    Args:
        noise_multiplier: The nominal σ of both.
        releases: How many with, and how many without, the canary, for each.
        delta: δ.
        confidence: Of each audit.
        seed: Makes it repeatable.
        report: Called with the number of releases done, now and then.

    Returns:
        The audit of the published recipe, whose claim is the paper's and whose true ε is that of its weakest
        direction, and the audit of the ellipsoid, whose claim is its ledger's and true.
    """
    found = []
    for number, (mode, name) in enumerate(_NAMES):
        settings = Settings(mode, PCA(exponent=1.0, floor=0.0, refresh_every=10**9), noise_multiplier=noise_multiplier)
        made = audit_engine(
            EngineRelease(settings, lenet(), seed=seed + 1000 * number),
            name=name,
            releases=releases,
            delta=delta,
            confidence=confidence,
            seed=seed,
            report=after(2 * releases * number, report),
        )
        if mode == "ellipsoid":
            made = replace(made, true_epsilon=gaussian_epsilon(1 / noise_multiplier, delta))
        found.append(made)
    return found
