"""What a recording depends on: every change that it would not follow is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dphero.cuda_graphs import replay_guards
from dphero.cuda_graphs.replay_guards import CannotRecordError, ReplayConditions


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
    net.notes = ["anything", {"in": (1, 2)}]
    known = ReplayConditions(net)
    for _ in range(3):
        net.rate = float("0.25")
        net.notes = ["anything", {"in": (1, 2)}]
        with torch.no_grad():
            net[0].weight.add_(1.0)
            net.seen += 1
        assert known.still_hold()
    net.rate = 0.5
    assert not known.still_hold()


def test_a_number_set_anew_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    known = ReplayConditions(net)
    monkeypatch.setattr(replay_guards, "_sources", None)  # to look everywhere again would take it
    net.rate = float("0.25")
    assert known.still_hold() and known.still_hold()


def test_hooks_of_submodules_are_seen_and_those_of_the_model_are_its_callers() -> None:
    net = model()
    net.register_forward_hook(lambda *_: None)
    ReplayConditions(net).require_no_hooks()
    net[2][0].register_forward_hook(lambda *_: None)
    with pytest.raises(CannotRecordError, match="hooks"):
        ReplayConditions(net).require_no_hooks()


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_the_backward_pass_are_seen_too(register: str) -> None:
    net = model()
    getattr(net[0], register)(lambda *_: None)
    with pytest.raises(CannotRecordError, match="hooks"):
        ReplayConditions(net).require_no_hooks()


RATE = 1.0
SCHEDULE = [1.0, 2.0]
UNREAD = 1


def rate() -> float:
    return RATE


class Settings:
    def __init__(self) -> None:
        self.rate, self.steps = 1.0, {"now": 0}


class Reads(nn.Module):
    """Its forward depends on what is not an attribute of a plain type."""

    counter = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.settings, self.schedule, self.factor = nn.Linear(3, 3), Settings(), [[0.5], 1], {"a": 1.0}
        self.elsewhere = self.of_a_closure()

    def of_a_closure(self) -> Callable[[], int]:
        inside = 0

        def count() -> int:
            nonlocal inside
            inside += 1
            return inside

        return count

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * SCHEDULE[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.layer(x)) * rate()


def set_global(name: str, value: float) -> Callable[[Reads], object]:
    return lambda net: globals().__setitem__(name, value)


NOTICED: dict[str, Callable[[Reads], object]] = {
    "a list": lambda net: net.schedule.append(1),
    "a list in a list": lambda net: net.schedule[0].__setitem__(0, 0.6),
    "a table": lambda net: net.factor.update(a=2.0),
    "an object": lambda net: setattr(net.settings, "rate", 2.0),
    "a table in an object": lambda net: net.settings.steps.update(now=1),
    "a class attribute": lambda net: setattr(Reads, "counter", Reads.counter + 1),
    "a variable of an enclosing function": lambda net: net.elsewhere(),
    "a tensor that is no buffer": lambda net: setattr(net, "kept", torch.zeros(2)),
    "a global number that a function reads": set_global("RATE", 2.0),
    "a global list that a method reads": lambda net: SCHEDULE.append(3.0),
}


@pytest.mark.parametrize("change", NOTICED)
def test_what_forward_reads_elsewhere_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RATE", 1.0)
    monkeypatch.setitem(globals(), "SCHEDULE", [1.0, 2.0])
    monkeypatch.setattr(Reads, "counter", 0)
    net = Reads()
    known = ReplayConditions(net)
    net.layer(torch.zeros(1, 3))
    assert known.still_hold()
    NOTICED[change](net)
    assert not known.still_hold()


def test_what_forward_does_not_read_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ReplayConditions(Reads())
    monkeypatch.setitem(globals(), "UNREAD", 2)
    assert known.still_hold()


def test_what_other_objects_hide_is_not_noticed() -> None:
    """The limit that the guide tells of: an object that holds more than plain values is not looked into."""
    net = Reads()
    net.settings.net, net.settings.rate = net.layer, 1.0  # type: ignore[attr-defined]
    known = ReplayConditions(net)
    net.settings.rate = 2.0
    assert known.still_hold()
