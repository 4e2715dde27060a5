"""Recorded passes in the methods that train with the privacy engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from dphero.methods import Task, make
from tests.methods.digits_task import make_task, network, start, weights

METHODS = ["dp-sgd", "dp-hero", "dp-hero-published", "gdp", "adaclip", "geoclip", "quantile-clip"]


def on_gpu(**settings: Any) -> Task:
    task = make_task(model=network(), **{"noise_multiplier": 1e-6, **settings})
    train = TensorDataset(*(tensor.cuda() for tensor in task.train.tensors))
    return Task(task.recipe, train, task.model.cuda(), task.module.cuda(), task.images.cuda(), task.classes)


def test_nothing_is_recorded_on_a_cpu_and_to_ask_for_it_is_an_error() -> None:
    with pytest.raises(ValueError, match="cuda_graphs=True needs a model on a CUDA device"):
        start("dp-hero", epsilon=3.0, cuda_graphs=True)


def test_unasked_the_engine_decides() -> None:
    task = make_task()
    assert task.cuda_graphs == "auto"
    for asked in (True, False):
        recipe = task.recipe.with_(cuda_graphs=asked)
        assert Task(recipe, task.train, task.model, task.module, task.images, 10).cuda_graphs is asked


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_recorded_training_is_training(method: str) -> None:
    found = []
    for asked in (True, False):
        trainer = make(method).start(on_gpu(cuda_graphs=asked))
        for _ in range(8):
            trainer.advance()
        found.append(weights(trainer))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
