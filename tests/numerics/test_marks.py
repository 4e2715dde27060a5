"""Numbers that stand for all bits of an example."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dphero.numerics import compare as module
from dphero.numerics.compare import marks, same_marks

ROWS = 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("shape", [(ROWS, 7), (3, ROWS, 5), (2 * ROWS, 6), (ROWS,), (3, 5)])
def test_one_bit_of_one_entry_changes_the_mark(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    value = torch.randn(shape, dtype=dtype)
    assert same_marks(marks(value, ROWS), marks(value.clone(), ROWS))
    for place in range(value.numel()):
        other = value.clone()
        other.view(-1)[place] += torch.finfo(dtype).eps * other.view(-1)[place].abs()
        assert not torch.equal(other, value)
        assert not same_marks(marks(value, ROWS), marks(other, ROWS))


def test_it_is_the_example_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SOME", 8)  # in parts
    torch.manual_seed(0)
    value = torch.randn(ROWS, 33)
    other, order = value.flip(0), torch.arange(ROWS).flip(0)
    first = marks(value, ROWS)
    other[2, 30] += 1.0
    others = torch.arange(ROWS) != 2
    assert same_marks(first, marks(other, ROWS), order, others)
    assert not same_marks(first, marks(other, ROWS), order, ~others)
    assert not same_marks(first, marks(other, ROWS), torch.arange(ROWS), others)


def test_entries_that_changed_places_count_as_others() -> None:
    value = torch.arange(1.0, 65).view(1, -1)
    seen = {int(marks(value[:, torch.randperm(64)], 1)) for _ in range(500)}  # type: ignore[arg-type]
    assert len(seen) == 500


def test_no_gradient_is_a_gradient_of_zeros() -> None:
    assert same_marks(None, None)
    assert same_marks(None, marks(torch.zeros(ROWS, 3), ROWS))
    assert not same_marks(marks(torch.eye(ROWS), ROWS), None)
    assert same_marks(marks(torch.eye(ROWS), ROWS), None, torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.bool))


def test_changes_in_a_pattern_do_not_cancel() -> None:
    value = torch.linspace(1, 2, 8).view(1, -1)
    other = value.clone()
    other.view(torch.int32)[0, [0, 2, 4]] += torch.tensor([1, -2, 1], dtype=torch.int32)  # nor in a line
    assert not same_marks(marks(value, 1), marks(other, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("change", [torch.neg, lambda value: 2 * value, lambda value: 1024 * value, torch.flip])
def test_what_changes_in_all_entries_alike_does_not_cancel(dtype: torch.dtype, change: Any) -> None:
    """Signs and exponents are the highest bits: times an odd number, these stay the highest."""
    torch.manual_seed(0)
    value = torch.randn(500, 8, dtype=dtype)
    other = value.flip(1) if change is torch.flip else change(value)
    assert not bool((marks(value, 500) == marks(other, 500)).any())


def test_columns_in_another_order_in_memory() -> None:
    value = torch.randn(5, ROWS, dtype=torch.float64).T
    assert same_marks(marks(value, ROWS), marks(value.contiguous(), ROWS))
