"""The digits as images, prepared as ``dphero train`` prepares them, for the tests of methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dphero import data
from dphero.experiments.defaults import resolve
from dphero.experiments.runs.evaluation import Evaluation
from dphero.experiments.runs.preparation import prepare
from dphero.methods import Task, Trainer, make


@cache
def digits() -> data.Data:
    return data.load("digits")


def make_task(method: str, *, options: dict[str, Any] | None = None, **settings: Any) -> Task:
    recipe = resolve({"data": "digits", "method": method, "seed": 1, "options": options or {}, **settings})
    images, labels = digits().train.images.clone(), digits().train.labels.clone()
    return prepare(recipe, replace(digits(), train=data.Split(images, labels)))[0]


def start(method: str, *, options: dict[str, Any] | None = None, **settings: Any) -> Trainer:
    task = make_task(method, options=options, **settings)
    return make(method, task.recipe.options).start(task)


def take(trainer: Trainer, steps: int) -> Trainer:
    for _ in range(steps):
        trainer.advance()
    return trainer


def finish(trainer: Trainer) -> float:
    """Train to the end; return the accuracy on digits that were not trained on."""
    while not trainer.finished:
        trainer.advance()
    return Evaluation(digits().test, torch.device("cpu")).accuracy(trainer.model)


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in trainer.model.state_dict().values()])


def resumes_exactly(begin: Callable[[], Trainer], folder: Path, before: int, after: int) -> None:
    """Some steps, save, load into a new trainer, and the rest: what an unbroken run gives, bit by bit."""
    unbroken, path = take(begin(), before + after), folder / "checkpoint.pt"
    broken = take(begin(), before)
    broken.save(path, {"seconds": 1.5})
    resumed = begin()
    assert resumed.load(path) == {"seconds": 1.5}
    assert resumed.step == before and resumed.ledger == broken.ledger
    take(resumed, after)
    assert torch.equal(weights(resumed), weights(unbroken))
    assert resumed.ledger == unbroken.ledger and resumed.step == unbroken.step
