"""Small lots are computed on one thread."""

import math

import pytest
import torch
from torch import nn

from dphero import models
from dphero.experiments.threads import threads_by_size, threads_for, work


def test_the_work_of_a_lot_is_counted_in_multiply_adds():
    assert work(nn.Linear(64, 32), torch.zeros(1, 64), lot=100) == 100 * 64 * 32
    assert work(nn.Linear(64, 32), torch.zeros(1, 63), lot=100) == math.inf


@pytest.mark.parametrize(("name", "shape", "lot", "threads"), [
    ("digits", (1, 8, 8), 512, 1), ("mlp", (1, 8, 8), 256, 1), ("tanh-cnn", (1, 28, 28), 2048, 8),
])  # fmt: skip
def test_networks_by_their_size(name, shape, lot, threads):
    size = work(models.build(name, shape, 10), torch.zeros(1, *shape), lot)
    assert threads_for(size, 8) == threads


def test_the_threads_of_the_caller_come_back(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    with pytest.raises(RuntimeError), threads_by_size(nn.Linear(4, 2), torch.zeros(1, 4), lot=10):
        raise RuntimeError
    assert asked == [1, 4]
