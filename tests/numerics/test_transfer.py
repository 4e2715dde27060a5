"""Tensors on their way: whole pieces, and what comes out of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dphero.numerics import transfer
from dphero.numerics.transfer import Fetched, along_a_line, mark, marks, sent
from tests.guidance.far import DEVICE, Far, Orders

CPU = torch.device("cpu")


def several() -> list[Tensor]:
    torch.manual_seed(0)
    square = torch.randn(5, 7)
    return [
        square,
        torch.randn(3, dtype=torch.float64),
        square.mT,
        torch.randn(()),
        torch.randn(2, 0),
        torch.randn(9)[::2],
    ]


@pytest.mark.parametrize("count", [1, 6])
def test_what_is_sent_arrives_in_one_piece_of_each_type(count: int) -> None:
    tensors = several()[:count]
    with Orders() as orders:
        there = sent(tensors, [DEVICE] * count)
    for before, after in zip(tensors, there, strict=True):
        assert isinstance(after, Far) and torch.equal(after.near, before)
        assert after.is_contiguous() and after.storage_offset() * after.itemsize % 256 == 0
    assert orders.given == {"aten._to_copy": min(count, 2)}
    assert all(a is b for a, b in zip(tensors, sent(tensors, [CPU] * count), strict=True))


def test_nothing_but_zeros_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a factor is made of gets into checkpoints, with all of its piece."""
    pieces: list[Tensor] = []
    monkeypatch.setattr(transfer, "to_device", lambda piece, device: pieces.append(piece) or piece)
    sent([torch.ones(3), torch.ones(5)], [DEVICE] * 2)
    (piece,) = pieces
    assert piece.numel() == 128 and float(piece.sum()) == 8.0


def test_bytes_are_those_of_what_arrived() -> None:
    tensors = several()
    with Orders():
        far = Fetched([Far(each) for each in tensors])
        read = far.read()
    for before, here, there in zip(tensors, Fetched(tensors).read(), read, strict=True):
        assert bytes(here) == bytes(there) == before.contiguous().numpy().tobytes()


def test_a_mark_is_the_same_in_company() -> None:
    tensors = [each for each in several() if each.dim() < 2 or each.numel()]
    with Orders():
        company = marks([Far(each) for each in tensors])
        for tensor, found in zip(tensors, company, strict=True):
            alone = mark(Far(tensor))
            assert isinstance(found, Far) and isinstance(alone, Far) and torch.equal(found.near, alone.near)
            expected = along_a_line(tensor) if tensor.dim() > 1 else tensor
            torch.testing.assert_close(found.near, expected)
    assert all(a is b for a, b in zip(tensors, marks(tensors), strict=True))
