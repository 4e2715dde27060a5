"""What guidance is told of each parameter: its layer, its features, whose rows it shares."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dphero.mechanism.parameters import Template, describe
from tests.oracle.micro_batches import trained
from tests.oracle.zoo import GPT, Lambda


def described(module: nn.Module) -> dict[str, Template]:
    return describe(module, trained(module))


@pytest.mark.parametrize(
    ("module", "name", "shares", "features", "plain"),
    [
        (nn.Linear(3, 4), "weight", None, "rows", False),
        (nn.Linear(3, 4), "bias", "weight", "rows", False),
        (nn.Linear(3, 1), "weight", None, "rows", True),  # one row: nothing to shape
        (nn.Conv2d(3, 4, 3), "bias", "weight", "rows", False),
        (nn.Embedding(5, 3), "weight", None, "columns", False),
        (nn.EmbeddingBag(5, 3), "weight", None, "columns", False),
        (nn.LayerNorm(4), "weight", None, "rows", True),
        (nn.LayerNorm((2, 4)), "weight", None, "rows", True),
        (nn.GroupNorm(2, 4), "bias", None, "rows", True),
        (nn.LSTM(3, 4, 2), "bias_hh_l1", "weight_hh_l1", "rows", False),
        (nn.MultiheadAttention(4, 2), "in_proj_bias", "in_proj_weight", "rows", False),
        (nn.MultiheadAttention(4, 2, kdim=3), "in_proj_bias", None, "rows", True),
        (Lambda(lambda self, x: x, scale=torch.tensor(1.0)), "scale", None, "rows", True),
        (Lambda(lambda self, x: x, token=torch.randn(1, 1, 4)), "token", None, "rows", True),
        (Lambda(lambda self, x: x, matrix=torch.randn(3, 4)), "matrix", None, "rows", False),
    ],
)
def test_descriptions(module: nn.Module, name: str, shares: str | None, features: str, plain: bool) -> None:
    template = described(module)[name]
    assert template.for_guidance == {"shares": shares, "features": features, "plain": plain}


def test_a_tied_weight_belongs_to_its_first_layer() -> None:
    templates = described(GPT())
    assert list(templates) == [name for name, _ in GPT().named_parameters()]
    assert templates["tokens.weight"].layer == "tokens" and templates["tokens.weight"].features == "columns"


def test_only_what_is_trained_is_described() -> None:
    model = nn.Linear(3, 4)
    model.weight.requires_grad_(False)
    assert described(model) == {"bias": Template(layer="", shares=None, features="rows", plain=False)}
