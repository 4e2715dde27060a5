"""Tensors side by side in one: only where they are all that lies there."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dphero.noise import FastNoise
from dphero.numerics.one_piece import fits, room_for, whole_of

SHAPES = [(3, 5), (7,), (), (0, 4), (64,), (2, 3, 11)]


def tensors(device: str) -> list[Tensor]:
    return [torch.zeros(shape, device=device) for shape in SHAPES]


def test_on_a_cpu_each_has_memory_of_its_own() -> None:
    room = room_for(tensors("cpu"))
    assert [each.shape for each in room] == [each.shape for each in tensors("cpu")]
    assert len({each.untyped_storage().data_ptr() for each in room if each.numel()}) == 5
    assert whole_of(room) is None


def test_elsewhere_they_lie_side_by_side() -> None:
    room = room_for(tensors("meta"))
    assert [tuple(each.shape) for each in room] == SHAPES and all(each.is_contiguous() for each in room)
    whole = whole_of([each for each in room if each.numel()])
    assert whole is not None and whole.numel() == 5 * 64 + 64
    ends = [(each.storage_offset(), each.storage_offset() + each.numel()) for each in room if each.numel()]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_each_type_has_a_piece_of_its_own_of_float32_at_least() -> None:
    kinds = [torch.float64, torch.bfloat16, torch.float64, torch.float32]
    room = room_for([torch.zeros(5, dtype=kind, device="meta") for kind in kinds])
    assert [each.dtype for each in room] == [torch.float64, torch.float32, torch.float64, torch.float32]
    assert whole_of(room) is None and whole_of(room[::2]) is not None and whole_of(room[1::2]) is not None


@pytest.mark.parametrize("some", [slice(0, 2), slice(1, 3), slice(None, None, -1)], ids=["first", "last", "turned"])
def test_a_piece_with_others_in_it_is_not_theirs(some: slice) -> None:
    room = room_for([torch.zeros(70, device="meta") for _ in range(3)])
    assert whole_of(room[some]) is None and whole_of(room) is not None


def test_other_views_are_not_taken_for_a_piece() -> None:
    whole = torch.zeros(2, 64)
    assert whole_of([whole[0], whole[1]]) is None and whole_of([torch.zeros(64)]) is None
    flat = torch.zeros(128)
    assert whole_of([flat[:64].view(8, 8).t(), flat[64:]]) is None


@pytest.mark.gpu
def test_noise_in_one_piece_is_noise_everywhere() -> None:
    room = room_for(
        [torch.zeros(500, 300, device="cuda"), torch.zeros(7, device="cuda"), torch.zeros(9, 9, device="cuda")]
    )
    for part in room:
        part.fill_(float("nan"))
    source = FastNoise(seed=3)
    source.fill({str(n): part for n, part in enumerate(room)}, 2.0, 0)
    first = torch.cat([part.flatten() for part in room]).double()
    assert first.isfinite().all() and abs(float(first.std()) / 2 - 1) < 0.01 and abs(float(first.mean())) < 0.02
    source.fill({str(n): part for n, part in enumerate(room)}, 2.0, 1)
    second = torch.cat([part.flatten() for part in room]).double()
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.01
    assert len(first.unique()) > 0.99 * len(first)


def test_room_fits_tensors_like_those_it_was_made_for() -> None:
    made = [torch.zeros(3, 4), torch.zeros(5, dtype=torch.bfloat16)]
    room = room_for(made)
    assert fits(room, made) and fits(room, [each.float() for each in made])
    others = [made[::-1], made[:1], [each.double() for each in made], [each.to("meta") for each in made]]
    assert not any(fits(room, other) for other in [*others, [made[0].view(4, 3), made[1]]])
