"""What is audited: an engine's settings, and engines made with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset

from dphero.engine import PrivacyEngine
from dphero.guidance import Guidance
from dphero.mechanism.clipping import Clipping
from dphero.mechanism.modes import Mode
from dphero.noise import NoiseSource
from dphero.sampling import PrivateLoader


@dataclass(frozen=True)
class Settings:
    """The arguments of ``make_private`` that are audited.

    Attributes:
        mechanism: ``ellipsoid``, ``ball`` or ``published``.
        guidance: What shapes the noise.
        clipping: The clip rule, by its name or a rule of your own.
        noise_multiplier: σ.
        max_grad_norm: C.
        sampling: ``poisson`` or ``shuffle``.
        secure: Whether the noise is cryptographic.
        noise: Makes a noise source of your own, a new one for each engine.
        device: Where the engine runs.
        autocast: Whether passes run in bf16 autocast.
    """

    mechanism: Mode = "ellipsoid"
    guidance: str | Guidance = "pca"
    clipping: Literal["flat", "per_layer", "automatic", "adaptive"] | Clipping = "flat"
    noise_multiplier: float = 1.0
    max_grad_norm: float = 1.0
    sampling: Literal["poisson", "shuffle"] = "poisson"
    secure: bool = False
    noise: Callable[[], NoiseSource] | None = None
    device: str = "cpu"
    autocast: bool = False

    def placed(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model on the device."""
        return copy.deepcopy(model).to(self.device)

    def precision(self) -> torch.autocast:
        """Return the context in which passes run."""
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.autocast)

    def attach(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, data: Dataset[Any], *, seed: int, **others: Any
    ) -> tuple[PrivacyEngine, PrivateLoader]:
        """Return an engine with these settings on a module, and its loader.

        Args:
            module: What is trained.
            optimizer: Its optimizer.
            data: The records.
            seed: Decides noise and lots, unless they are cryptographic.
            others: Further arguments of ``make_private``; they come before the settings.
        """
        engine = PrivacyEngine()
        arguments: dict[str, Any] = {
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "mechanism": self.mechanism,
            "guidance": copy.deepcopy(self.guidance),
            "clipping": self.clipping,
            "sampling": self.sampling,
            "secure": self.secure,
            "seed": None if self.secure or self.noise else seed,
            "noise": self.noise() if self.noise else None,
            "unsound": self.mechanism == "published",
            "loss_reduction": "sum",
            **others,
        }
        _, _, loader = engine.make_private(module=module, optimizer=optimizer, data_loader=data, **arguments)
        return engine, loader


def small_model() -> nn.Sequential:
    """Return the network that is audited unless another is given; its weights are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))
