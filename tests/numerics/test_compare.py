"""Comparisons of many tensors at once."""

from __future__ import annotations

import math

import pytest
import torch

from dphero.numerics import compare
from dphero.numerics.compare import all_equal, gap_and_size, largest_gap, largest_gaps, numbers_of

NAN, INF = math.nan, math.inf


def test_gaps_of_many_are_those_of_each() -> None:
    torch.manual_seed(0)
    pairs = [(torch.randn(5, dtype=dtype), torch.randn(5, dtype=dtype)) for dtype in (torch.float32, torch.float64) * 2]
    pairs += [(torch.tensor([1.0, NAN, INF]), torch.tensor([1.5, NAN, INF])), (torch.ones(0), torch.ones(0))]
    pairs += [(torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0])), (torch.tensor([INF]), torch.tensor([-INF]))]
    found = largest_gaps([gap_and_size(*pair) for pair in pairs])
    assert found == [largest_gap(*pair) for pair in pairs]
    assert found[4:] == [(0.5, 1.0), (0.0, 0.0), (INF, 1.0), (INF, 0.0)]
    assert found[1] == (float((pairs[1][0] - pairs[1][1]).abs().max()), float(pairs[1][0].abs().max()))


@pytest.mark.parametrize("at_once", [("cpu",), ()])
def test_equality_of_many_is_that_of_each(at_once: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_AT_ONCE", at_once)
    ones = torch.ones(3)
    others = [torch.ones(3), torch.ones(3) + 1e-7, torch.ones(4), torch.ones(3).double(), torch.ones(3, device="meta")]
    assert all_equal([(ones, other) for other in others]) == [True, False, False, False, False]
    assert all_equal([]) == [] and all_equal([(ones * NAN, ones * NAN), (ones[:0], ones[:0])]) == [False, True]


def test_numbers_come_back_in_order() -> None:
    rows = [torch.full((2,), float(i), dtype=(torch.float64, torch.float32)[i % 2]) for i in range(5)]
    assert numbers_of(rows) == [[i, i] for i in range(5)] and numbers_of([]) == []
