"""Convolutions: patches taken some examples at a time, and memory that is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dphero.geometry.dense import Dense
from dphero.geometry.geometry import Geometry, identity
from dphero.gradients import patches as module
from dphero.gradients.convolution import Convolution
from dphero.gradients.patches import convolution_arguments
from dphero.numerics import buffers as room_module
from dphero.numerics.buffers import ReusableBuffer
from tests.trainer import training

# stride, padding, dilation, groups: with and without slabs, padded and not
WAYS: list[tuple[Any, ...]] = [
    (1, 0, 1, 1),
    (1, 2, 1, 1),
    (1, (1, 2), (2, 1), 1),
    (2, 1, 1, 1),
    (1, 1, 1, 2),
    ((2, 1), (0, 3), 1, 2),
]


def pair(way: tuple[Any, ...], n: int = 7, seed: int = 0) -> tuple[Convolution, Tensor, Any]:
    """Return a piece, its per-example gradients by autograd, and its arguments."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, 9, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 4 // way[3], 3, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    out = F.conv2d(x, weight, None, *way)
    delta = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    true = torch.stack([torch.autograd.grad((out[i] * delta[i]).sum(), weight, retain_graph=True)[0] for i in range(n)])
    return Convolution(x, delta, convolution_arguments(weight.detach(), *way)), true, (x, delta)


def geometries(way: tuple[Any, ...]) -> tuple[Geometry, Geometry]:
    """Return one that changes nothing, and one that mixes outputs."""
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))[0]
    shape = (6, 4 // way[3], 3, 2)
    return identity(shape), Geometry(shape, left=Dense(basis, torch.linspace(0.5, 2, 6, dtype=torch.float64)))


@pytest.mark.parametrize("buffer", [1, 900, 1 << 18], ids=["one by one", "some", "all"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients_do_not_depend_on_how_many_examples_are_worked_on_at_once(
    way: tuple[Any, ...], buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CPU_BUFFER", buffer)
    weights = torch.linspace(0, 1, 7, dtype=torch.float64)
    for geometry in geometries(way):
        piece, true, _ = pair(way)
        whitened = geometry.whiten(true).flatten(1)
        torch.testing.assert_close(piece.square_norms(geometry), whitened.square().sum(1))
        torch.testing.assert_close(piece.weighted_sum(weights), torch.einsum("i,i...->...", weights, true))
    torch.testing.assert_close(pair(way)[0].instantiate(), true)


LAID_ABOVE_ONE_ANOTHER = [*WAYS, (3, 0, 1, 1), (1, 4, 1, 1), ((4, 1), (3, 1), (2, 1), 1)]


@pytest.mark.parametrize("fold", [2, 3])
@pytest.mark.parametrize("way", LAID_ABOVE_ONE_ANOTHER, ids=str)
def test_several_images_of_one_example(way: tuple[Any, ...], fold: int) -> None:
    weights = torch.linspace(0.5, 1, 4, dtype=torch.float64)
    for geometry in geometries(way):
        piece, true, _ = pair(way, n=4 * fold)
        true = true.unflatten(0, (4, fold)).sum(1)
        found = piece.folded(fold)
        assert isinstance(found, Convolution), "no image's gradient is formed alone"
        squares = geometry.whiten(true).flatten(1).square().sum(1)
        torch.testing.assert_close(found.take(slice(1, 4)).square_norms(geometry), squares[1:])
        torch.testing.assert_close(found.weighted_sum(weights), torch.einsum("i,i...->...", weights, true))
        torch.testing.assert_close(found.square_norms(geometry), squares)
        torch.testing.assert_close(found.weighted_sum(weights), torch.einsum("i,i...->...", weights, true))


def test_images_of_one_example_need_room_between_them() -> None:
    """The test above can fail: without empty lines, patches see two images."""
    piece, true, (x, delta) = pair((1, 1, 1, 1), n=4)
    tall = Convolution(*(t.unflatten(0, (2, 2)).movedim(1, 2).flatten(2, 3) for t in (x, delta)), piece.arguments)
    found, wanted = tall.weighted_sum(torch.ones(2, dtype=torch.float64)), true.sum(0)
    assert (found - wanted).norm() > 0.01 * wanted.norm()


def test_a_room_lends_its_memory_to_one_borrower_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "_LARGE", 0)

    class Borrower:
        pass

    room, like, first, second = ReusableBuffer(), torch.zeros(1), Borrower(), Borrower()
    one = room.lend(first, like, (2, 50))
    two = room.lend(second, like, (2, 50))
    assert one.data_ptr() != two.data_ptr()  # the first still has it
    place = one.data_ptr()
    del one, first
    assert room.lend(second, like, (3, 7)).data_ptr() == place  # smaller is fine
    third = Borrower()
    assert room.lend(third, like, (3, 7)).data_ptr() != place
    del second
    assert room.lend(third, like.double(), (3, 7)).dtype == torch.float64
    room.forget()
    assert room.lend(third, like, (3, 7)).shape == (3, 7)


def test_small_memory_is_left_to_the_allocator() -> None:
    room = ReusableBuffer()
    room.lend(room, torch.zeros(1), (10, 10))
    assert room._memory is None


def test_pieces_that_live_together_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer called twice, or gradients kept beyond their piece."""
    monkeypatch.setattr(room_module, "_LARGE", 0)
    room, shape = ReusableBuffer(), identity((6, 4, 3, 2))
    made = []
    for seed in (1, 2):
        _, true, (x, delta) = pair(WAYS[1], seed=seed)
        piece = Convolution(x, delta, convolution_arguments(true[0], *WAYS[1]), room)
        piece.square_norms(shape)
        made.append((piece, true))
    ones = torch.ones(7, dtype=torch.float64)
    for piece, true in made:
        torch.testing.assert_close(piece.weighted_sum(ones), true.sum(0))
    kept = [(piece.instantiate(), true) for piece, true in made]
    made.clear()
    del piece
    _, _, (x, delta) = pair(WAYS[1], seed=3)
    Convolution(x, delta, convolution_arguments(true[0], *WAYS[1]), room).square_norms(shape)
    for gradients, true in kept:
        torch.testing.assert_close(gradients, true)


def test_a_training_uses_the_memory_again_and_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch after batch through one room gives bitwise what fresh memory gives."""
    released = []
    for large in (1 << 40, 0):
        monkeypatch.setattr(room_module, "_LARGE", large)
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, 2, 3)), torch.nn.Conv2d(1, 3, 2), torch.nn.Flatten(), torch.nn.Linear(6, 4)
        )
        run = training(net, seed=5)
        released.append([torch.cat([g.flatten() for g in step.values()]) for step in run.steps(6)])
        assert run.engine._run is not None
        rooms = [site.memory["buffer"] for site in run.engine._run.taps.hooked_modules if "buffer" in site.memory]
        assert [room._memory is not None for room in rooms] == [large == 0]
    for fresh, again in zip(*released, strict=True):
        assert torch.equal(fresh, again)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation"),
    [
        ((9,), (3,), (1,), (0,), (1,)),
        ((6, 5), (3, 2), (1, 1), (1, 0), (1, 1)),
        ((7, 6), (3, 3), (1, 1), (2, 1), (2, 1)),
        ((9, 5), (3, 3), (2, 1), (1, 1), (1, 1)),
        ((8, 8), (2, 3), (2, 2), (1, 1), (1, 1)),  # most places are left out: patches are formed
        ((4, 3, 4), (2, 2, 2), (1, 1, 1), (1, 0, 1), (1, 1, 1)),
        ((5, 5), (1, 1), (1, 1), (0, 0), (1, 1)),
    ],
)
def test_products_of_patches_come_from_products_of_positions(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CPU_BUFFER", 2000)  # a few examples at a time
    weight, x = torch.randn(5, 3, *kernel).double(), torch.randn(4, 3, *size).double()
    forward = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(size)]
    delta = torch.zeros_like(forward(x, weight, None, stride, padding, dilation))
    piece = Convolution(x, delta, convolution_arguments(weight, stride, padding, dilation, 1))
    found = torch.cat([grams for _, _, grams in piece._patches().grams()])
    # patches, one by one: what a kernel of a single 1 reads
    basis = torch.eye(weight[0].numel()).double().view(-1, 3, *kernel)
    patches = forward(x, basis, None, stride, padding, dilation).flatten(2)
    torch.testing.assert_close(found, patches.mT @ patches)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("turned", ["input", "output gradient", "both"])
def test_a_sum_without_gradients_takes_tensors_in_any_order_in_memory(way: tuple[Any, ...], turned: str) -> None:
    piece, true, (x, delta) = pair(way)
    weights = torch.linspace(0, 1, 7, dtype=torch.float64)
    if turned != "output gradient":
        x = x.to(memory_format=torch.channels_last)
    if turned != "input":
        delta = delta.to(memory_format=torch.channels_last)
    found = Convolution(x, delta, piece.arguments).weighted_sum(weights)
    torch.testing.assert_close(found, torch.einsum("i,i...->...", weights, true))
