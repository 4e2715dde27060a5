"""What a recording depends on: every change that it would not follow is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dphero.cuda_graphs.replay_guards import ReplayConditions


def model() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 2)))
    net.register_buffer("seen", torch.zeros(2))
    net.rate = 0.25
    return net


def move_weight(net: nn.Sequential) -> None:
    net[0].weight.data = net[0].weight.data.clone()


def replace_weight(net: nn.Sequential) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "a mode": lambda net: net[1].eval(),
    "an attribute": lambda net: setattr(net[1], "p", 0.6),
    "a new attribute": lambda net: setattr(net[2], "scale", 2),
    "an attribute that is gone": lambda net: delattr(net, "rate"),
    "a weight's place": move_weight,
    "a weight": replace_weight,
    "a frozen weight": lambda net: net[2][0].weight.requires_grad_(False),
    "a buffer": lambda net: setattr(net, "seen", torch.zeros(2)),
    "a layer": lambda net: net[2].__setitem__(0, nn.Linear(4, 2)),
    "one more layer": lambda net: net.append(nn.Linear(2, 2)),
    "a hook": lambda net: net[0].register_forward_hook(lambda *_: None),
    "a hook before": lambda net: net[0].register_forward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(change: str) -> None:
    net = model()
    known = ReplayConditions(net)
    assert known.still_hold()
    CHANGES[change](net)
    assert not known.still_hold()
    assert not known.still_hold()
    assert ReplayConditions(net).still_hold()


def test_a_change_of_precision_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ReplayConditions(model())
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32)
    assert not known.still_hold()


def test_what_is_set_anew_to_the_same_value_holds() -> None:
    net = model()
    known = ReplayConditions(net)
    for _ in range(3):
        net.rate = float("0.25")
        net.notes = ["anything that is not compared"]
        with torch.no_grad():
            net[0].weight.add_(1.0)
            net.seen += 1
        assert known.still_hold()
    net.rate = 0.5
    assert not known.still_hold()


def test_hooks_of_submodules_are_seen_and_those_of_the_model_are_its_callers() -> None:
    net = model()
    net.register_forward_hook(lambda *_: None)
    assert not ReplayConditions(net).has_hooks
    net[2][0].register_forward_hook(lambda *_: None)
    assert ReplayConditions(net).has_hooks
