"""The many-run audit: small trainings of any method, with one canary image and without it.

The canary is an image far outside the others, with a label that the initial model finds least likely: its gradient is
as large as clipping lets it be, and nobody else's points its way. An attacker looks at the released model alone: how
far the canary's label stands above the class that the initial model preferred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dphero.audit.bounds.claims import Claim
from dphero.audit.bounds.two_sample import Audit, audit
from dphero.audit.threads import one_thread
from dphero.audit.trainings.training import Absent, MethodTraining, Train, absence
from dphero.methods import METHODS
from dphero.methods.recipe import Recipe
from dphero.models import build

RECORDS, STEPS = 32, 2
_SHAPE, _CLASSES = (1, 8, 8), 10
_FIRST_SEED = 1 << 41  # far from those of other engines in an audit, which must not have their noise
_BRIGHT = 50.0  # the canary's norm over that of an ordinary image


@dataclass(eq=False)
class TrainingRelease:
    """A whole training as one release; see :class:`dphero.audit.Release`.

    Args:
        train: The training.
        images: Ordinary examples.
        labels: Their labels.
        canary: The canary's image.
        classes: Its label, and the class that it is compared with.
        absent: What stands for the canary where it is "out"; the other ``label`` is the second class.
    """

    train: Train
    images: Tensor
    labels: Tensor
    canary: Tensor
    classes: tuple[int, int]
    absent: Absent = "nothing"
    _claims: list[Callable[[float], Claim]] = field(default_factory=list, init=False)

    def __call__(self, canary_in: bool, seed: int, /) -> float:
        """Train once; return what the canary's label gained."""
        images, labels = self.images, self.labels
        if canary_in or self.absent != "nothing":
            label = self.classes[1] if not canary_in and self.absent == "label" else self.classes[0]
            image = torch.zeros_like(self.canary) if not canary_in and self.absent == "blank" else self.canary
            images, labels = torch.cat([images, image]), torch.cat([labels, torch.tensor([label]).to(labels)])
        trained = self.train(images, labels, seed)
        self._claims[:] = [trained.claim]
        return self._margin(trained.model)

    def claim(self, delta: float) -> Claim:
        """Return what the latest training claims."""
        if not self._claims:
            raise RuntimeError("nothing was trained yet: there is nothing to claim")
        return self._claims[0](delta)

    @torch.no_grad()
    def _margin(self, model: nn.Module) -> float:
        outputs = model(self.canary)[0].double()
        return float(outputs[self.classes[0]] - outputs[self.classes[1]])


@one_thread()
def audit_method(
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    noise_multiplier: float = 1.0,
    epsilon: float = 1.0,
    releases: int = 200,
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> Audit:
    """Audit a method of the comparison by many trainings of a linear model: two steps, everybody in every lot.

    Args:
        name: The method.
        options: Its options.
        noise_multiplier: σ, or
        epsilon: ε, for methods that are not given their noise.
        releases: How many trainings with, and how many without, the canary.
        delta: δ.
        confidence: Of the audit.
        seed: Makes it repeatable.
        report: Called with the number of trainings done, now and then.

    Raises:
        ValueError: If there is no such method, or it cannot be trained so.
    """
    if name not in METHODS:
        raise ValueError(f"method {name!r} is unknown; there are {', '.join(sorted(METHODS))}")
    absent = absence(name)
    settings = _settings(name, options, delta, "public" if absent == "blank" else RECORDS)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(RECORDS, *_SHAPE, generator=generator)
    labels = torch.randint(_CLASSES, (RECORDS,), generator=generator)
    canary = _BRIGHT * torch.randn(1, *_SHAPE, generator=generator)
    train = _train(settings, noise_multiplier, epsilon, images, labels)
    if absent == "blank":  # the canary is one of the records
        images, labels = images[:-1], labels[:-1]
    with torch.no_grad():
        first = train.model(canary)[0]
    classes = (int(first.argmin()), int(first.argmax()))
    release = TrainingRelease(train, images, labels, canary, classes, absent)
    found = audit(
        release, lambda: release.claim(delta), name=name, releases=releases, confidence=confidence,
        seed=_FIRST_SEED + seed * 1_000_003, report=report,
    )  # fmt: skip
    return replace(found, noise_multiplier=train.recipe.noise_multiplier)


def _settings(
    name: str, options: Mapping[str, Any] | None, delta: float, dataset_size: int | Literal["public"]
) -> dict[str, Any]:
    """Return the recipe of a small training, but for its noise."""
    return {
        "data": "digits",
        "model": "mlp",
        "method": name,
        "lot": RECORDS,
        "epochs": float(STEPS),
        "lr": 0.05,
        "clip": 0.5,
        "delta": delta,
        "dataset_size": dataset_size,
        "device": "cpu",
        "options": dict(options or {}),
    }


def _train(
    settings: dict[str, Any], noise_multiplier: float, epsilon: float, images: Tensor, labels: Tensor
) -> MethodTraining:
    """Return a training that the method accepts: given its noise or ε, of a linear model or on fixed features."""
    problems = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        networks = [nn.Sequential(nn.Flatten(), nn.Linear(64, _CLASSES)), build("scatter-linear", _SHAPE, _CLASSES)]
    for model in networks:
        for given in ({"noise_multiplier": noise_multiplier}, {"epsilon": epsilon}):
            train = MethodTraining(Recipe(**{**settings, **given}), model, _CLASSES)
            try:
                train(images, labels, _FIRST_SEED - 1)
            except ValueError as error:
                problems.append(str(error))
            else:
                return train
    raise ValueError(f"method {settings['method']!r} cannot be audited by small trainings: {problems[0]}")
