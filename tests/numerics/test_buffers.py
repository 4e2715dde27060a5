"""Memory for gradients that is used again: never while anybody can still see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero.numerics import buffers as room_module
from dphero.numerics.buffers import RefCountedBuffer
from tests.trainer import network, training

HELD: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "a view": lambda gradient: gradient.view(-1),
    "a row": lambda gradient: gradient[0],
    "transposed": lambda gradient: gradient.T,
    "an array": lambda gradient: gradient.numpy(),
    "an array of a row": lambda gradient: gradient[0].numpy(),
    "its storage": lambda gradient: gradient.untyped_storage(),
}


@pytest.fixture(autouse=True)
def _even_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "_SOME", 0)


def test_memory_is_lent_again_once_nobody_has_it() -> None:
    room, like = RefCountedBuffer(), torch.zeros(1)
    place = room.lend(like, 5, 7).data_ptr()
    for _ in range(3):
        lent = room.lend(like, 5, 7)
        assert lent.data_ptr() == place and lent.shape == (5, 7) and lent.is_contiguous()
        del lent
    assert room.lend(like, 7, 5).data_ptr() == place
    assert room.lend(like, 5, 8).shape == (5, 8)
    assert room.lend(like.double(), 2, 3).dtype == torch.float64


@pytest.mark.parametrize("way", HELD)
def test_memory_that_somebody_has_is_left_to_him(way: str) -> None:
    room, like = RefCountedBuffer(), torch.zeros(1)
    lent = room.lend(like, 5, 7)
    place = lent.data_ptr()
    held = HELD[way](lent)
    del lent
    other = room.lend(like, 5, 7)
    assert other.data_ptr() != place
    del held
    assert room.lend(like, 5, 7).data_ptr() != other.data_ptr()  # which is still there


def test_memory_that_another_process_may_see_is_not_used_again() -> None:
    """A gradient that was sent to a process of the user's: the next sum, before its noise, would show there."""
    room, like = RefCountedBuffer(), torch.zeros(1)
    place = room.lend(like, 5, 7).share_memory_().data_ptr()
    assert room.lend(like, 5, 7).data_ptr() != place


def test_small_memory_is_left_to_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "_SOME", 1 << 20)
    room = RefCountedBuffer()
    room.lend(torch.zeros(1), 10, 10)
    assert room._memory is None


@pytest.mark.parametrize("way", HELD)
def test_gradients_that_the_user_keeps_stay_what_they_were(way: str) -> None:
    run = training(network(), seed=1)
    kept: list[tuple[Any, Any]] = []
    for x, y in (batch for _ in range(2) for batch in run.loader):
        run.optimizer.zero_grad()
        F.cross_entropy(run.module(x), y).backward()
        gradient = run.module[0].weight.grad  # type: ignore[index,union-attr]
        assert isinstance(gradient, Tensor)
        kept.append((HELD[way](gradient), torch.as_tensor(HELD["itself"](gradient)).clone()))
        run.optimizer.step()
        del gradient
    for held, value in kept:
        if way == "its storage":
            held = torch.empty(0).set_(held)
        found = torch.as_tensor(held)
        expected = {"a row": value[0], "an array of a row": value[0], "transposed": value.T}.get(way, value)
        assert torch.equal(found.reshape(-1), expected.reshape(-1))


@pytest.mark.parametrize("to_none", [True, False])
def test_training_is_bitwise_what_it_is_with_fresh_memory(to_none: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(room_module, "_SOME", least)
        torch.manual_seed(0)
        run = training(network(0, nn.Linear(8, 8), nn.Tanh()), seed=5, guidance="pca", physical_batch_size=4)
        for x, y in (batch for _ in range(3) for batch in run.loader):
            F.cross_entropy(run.module(x), y).backward()
            run.optimizer.step()
            if run.module[0].weight.grad is not None:  # type: ignore[index,union-attr]
                run.optimizer.zero_grad(set_to_none=to_none)
        weights.append(torch.cat([value.flatten() for value in run.weights().values()]))
    assert torch.equal(*weights)
