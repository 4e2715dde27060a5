"""A model that returns a term over the whole batch beside its outputs is refused, whatever the term's size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero.checks import independence
from tests.trainer import CLASSES, FEATURES, training


class Experts(nn.Module):
    """A mixture of experts that returns its outputs and a term which balances the experts."""

    def __init__(self, scale: float, balance: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.scale, self.balance = scale, balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.dropout(x)
        chances = self.router(x).softmax(-1)
        chosen = F.one_hot(chances.topk(2, -1).indices, 4).sum(1).float()
        weights = chances * chosen
        outs = [weights[:, number, None] * expert(x) for number, expert in enumerate(self.experts)]
        over_the_batch = (chosen.mean(0) * chances.mean(0)).sum()
        for_each = (chosen * chances).sum(1).mean()
        return self.scale * torch.stack(outs).sum(0), over_the_batch if self.balance == "batch" else for_each


def balanced(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(out[0], y) + 0.02 * out[1]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)  # experts between which the examples differ


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_balance_over_the_batch_is_refused_beside_outputs_of_any_size(scale: float, dropout: float) -> None:
    with pytest.raises(ValueError, match="depends on the other examples"):
        training(Experts(scale, "batch", dropout)).steps(1, balanced)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_balance_for_each_example_is_accepted(scale: float) -> None:
    training(Experts(scale, "example")).steps(2, balanced)  # type: ignore[arg-type]
    training(Experts(scale, "example", dropout=0.2)).steps(2, balanced)  # type: ignore[arg-type]


def test_the_value_of_a_term_tells_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(independence, "_require_same_norms", lambda together, alone: None)
    with pytest.raises(ValueError, match=r"is no mean over them either.*output_router_logits=False"):
        training(Experts(1000.0, "batch")).steps(1, balanced)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is no mean over them either"):
        training(Experts(1000.0, "batch", dropout=0.2)).steps(1, balanced)  # type: ignore[arg-type]


def test_without_a_look_at_each_output_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it once was: all outputs together, compared at a thousandth of the whole."""
    norms = independence.IndependenceCheck._norms
    together = range(9)  # of all outputs at once
    monkeypatch.setattr(independence.IndependenceCheck, "_norms", lambda *arguments: norms(*arguments[:-1], together))
    monkeypatch.setattr(independence, "_SLACK_OF_NORMS", 1e-3)
    monkeypatch.setattr(independence.IndependenceCheck, "_compare_values", lambda *_: None)
    training(Experts(1000.0, "batch")).steps(1, balanced)  # type: ignore[arg-type]
