"""What torch itself has: its transformers, recurrent networks and checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.libraries.verdict import ROWS, Model, mean

CASES: dict[str, Callable[[], Model]] = {}


def torch_nn(make: Callable[[], Model]) -> Callable[[], Model]:
    CASES[f"torch/{make.__doc__}"] = make
    return make


def sequences() -> Tensor:
    return torch.randn(ROWS, 6, 8)


@torch_nn
def transformer() -> Model:
    """Transformer"""
    module = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    return Model(module, {"src": sequences(), "tgt": torch.randn(ROWS, 4, 8)})


@torch_nn
def encoder() -> Model:
    """TransformerEncoder"""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return Model(nn.TransformerEncoder(layer, 2), {"src": sequences()})


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.embedding, self.core = nn.Embedding(20, 8), kind(8, 8, batch_first=True, **options)
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.core(self.embedding(words))[0])


def words() -> Tensor:
    return torch.randint(0, 20, (ROWS, 6))


for kind in (nn.LSTM, nn.GRU, nn.RNN):
    CASES[f"torch/{kind.__name__}"] = lambda kind=kind: Model(Tagger(kind), {"words": words()})
CASES["torch/LSTM, two layers, dropout, both ways"] = lambda: Model(
    Tagger(nn.LSTM, num_layers=2, dropout=0.2, bidirectional=True), {"words": words()}
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@torch_nn
def attention() -> Model:
    """MultiheadAttention with dropout"""
    return Model(Attention(), {"x": sequences()})


@torch_nn
def convolutions() -> Model:
    """Convolutions in one, two and three dimensions"""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Conv1d(2, 3, 3), nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 2, 2)
            self.deep = nn.Conv3d(2, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x).unflatten(2, (8, 8))
            x = self.three(self.two(x).tanh())
            return self.deep(torch.stack([x, x.sin()], 2))

    return Model(Network(), {"x": torch.randn(ROWS, 2, 66)})


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, self.first(x), use_reentrant=self.use_reentrant)
        return self.last(x)


@torch_nn
def checkpointed() -> Model:
    """Gradient checkpointing"""
    return Model(Checkpointed(False), {"x": sequences()})


@torch_nn
def checkpointed_again() -> Model:
    """Gradient checkpointing, reentrant"""
    return Model(Checkpointed(True), {"x": sequences()})


@dataclass
class Answer:
    """What a model may return, and take."""

    logits: Tensor
    hidden: Tensor


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Answer:
        hidden = self.first(x.hidden if isinstance(x, Answer) else x).tanh()
        return Answer(self.last(hidden), hidden)


@torch_nn
def dataclass_out() -> Model:
    """A dataclass as output"""
    return Model(Plain(), {"x": sequences()})


@torch_nn
def dataclass_in() -> Model:
    """A dataclass as input"""
    return Model(Plain(), {"x": sequences()}, lambda module, batch: mean(module(Answer(batch["x"], batch["x"]))))


@torch_nn
def zero_head() -> Model:
    """Dropout before a head that starts at zero"""
    head = nn.Linear(8, 3)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), head)
    return Model(module, {"input": torch.randn(ROWS, 8)})


@torch_nn
def batch_norm() -> Model:
    """BatchNorm"""
    return Model(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), {"input": torch.randn(ROWS, 8)})
