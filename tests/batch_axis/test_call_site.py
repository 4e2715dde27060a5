"""Where in the model's own code a layer is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FunctionType

import pytest

from dphero.batch_axis.call_site import CallSite, find_call_site


def note(found: list[CallSite], outermost: CodeType) -> int:
    found.append(find_call_site(outermost))
    return 0


class Layer:
    def __call__(self, found: list[CallSite], outermost: CodeType) -> int:
        return note(found, outermost)

    def method(self, found: list[CallSite], outermost: CodeType) -> int:
        return note(found, outermost)


def of_the_test() -> CodeType:
    return sys._getframe(2).f_code


def three_places(call: Callable[..., int], found: list[CallSite]) -> int:
    here = of_the_test()
    return call(found, outermost=here) + call(found, here) + sum(call(found, here) for _ in range(2))


def without_columns(code: CodeType) -> CodeType:
    """Return what ``python -X no_debug_ranges`` makes of the source: all on one line."""
    units = len(code.co_code) // 2
    no_columns, same_line = 0x80 | 13 << 3, 0
    lengths = [min(8, units - start) for start in range(0, units, 8)]
    return code.replace(co_linetable=b"".join(bytes((no_columns | n - 1, same_line)) for n in lengths))


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("call", [note, Layer(), Layer().method, lambda *a, **k: note(*a, **k)])
def test_a_call_has_one_place_however_often_it_is_made(call: Callable[..., int], columns: bool) -> None:
    """Python makes a frequent call by other instructions than a rare one. Here, one line has three of them."""
    code = three_places.__code__ if columns else without_columns(three_places.__code__)
    assert {column for _, _, column, _ in code.co_positions()} != {None} or not columns
    found: list[CallSite] = []
    for _ in range(100):
        FunctionType(code, globals())(call, found)
    first = found[:4]
    assert len(set(first)) == 3 and first[2] == first[3]
    assert found == first * 100
