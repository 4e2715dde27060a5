"""A step whose loss is checked takes little more memory than a plain one, however large the model's outputs are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero import PrivacyEngine
from dphero.checks.loss import replay
from dphero.checks.loss.repetition import set_aside
from dphero.numerics import compare, products
from tests.live_bytes import LiveBytes

ROWS, LENGTH, WORDS, WIDTH, DEPTH = 8, 32, 2048, 64, 8


class LanguageModel(nn.Module):
    """As in GPT-2, activations take some six times the memory of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    logits = model(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    del logits
    loss.backward()
    optimizer.step()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> tuple[float, list[float]]:
    """The peak of a plain step, and of the first six private ones, in copies of the logits."""
    monkeypatch.setattr(replay, "_SOME", 1 << 14)  # small beside the logits, as it is beside those of a real model
    monkeypatch.setattr(compare, "_SOME", 1 << 12)
    monkeypatch.setattr(products, "_SOME", 1 << 14)
    torch.manual_seed(0)
    ids, copy = torch.randint(WORDS, (6 * ROWS, LENGTH)), 4 * ROWS * LENGTH * WORDS
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LiveBytes() as live:
        step(model, optimizer, ids[:ROWS])
    plain = live.peak / copy
    optimizer.zero_grad()
    _, _, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=TensorDataset(ids), noise_multiplier=1.0, max_grad_norm=1.0,
        expected_batch_size=ROWS, dataset_size="public", sampling="shuffle",
    )  # fmt: skip
    private = []
    for (batch,) in loader:
        with LiveBytes() as live:
            step(model, optimizer, batch)
        private.append(live.peak / copy)
    return plain, private


def test_checks_take_little_memory_beside_logits(steps: tuple[float, list[float]]) -> None:
    plain, private = steps
    assert len(private) == 6
    first, *checked, usual, _ = private  # four losses are computed again; before the first, the model is examined
    assert first < plain + 3.5
    assert max(checked) < plain + 2.5  # outputs, their gradients or a graph, and what rounding leaves
    assert usual < plain + 0.5


@pytest.mark.parametrize(("free", "stays"), [(1 << 30, True), (1 << 28, False)])
def test_large_gradients_wait_on_a_gpu_where_there_is_room(
    free: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient: Any = SimpleNamespace(is_cuda=True, nbytes=1 << 27, device="cuda", cpu=lambda: "on the host")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 40))
    assert set_aside(gradient) is gradient if stays else set_aside(gradient) == "on the host"
    assert set_aside(None) is None
