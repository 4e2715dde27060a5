"""numpy's global generator, put back: what it draws then is what it would have drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dphero.numerics import numpy_state
from dphero.numerics.numpy_state import NumpyGenerator


@pytest.fixture(autouse=True)
def left_as_it_was() -> Iterator[None]:
    generator, state = np.random.get_bit_generator(), np.random.get_state(legacy=False)
    yield
    np.random.set_bit_generator(generator)
    np.random.set_state(state)


def drawn() -> list[float]:
    return [np.random.standard_normal(), np.random.random(), *np.random.randn(3), *np.random.rand(700)]


WAYS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a number": np.random.random,
    "a normal, of a pair": np.random.randn,
    "two normals": lambda: np.random.randn(2),
    "a seed": lambda: np.random.seed(5),
    "all its words": lambda: np.random.rand(1000),
}


@pytest.mark.parametrize("before", WAYS)
@pytest.mark.parametrize("within", WAYS)
@pytest.mark.parametrize("after", WAYS)
def test_it_draws_what_it_would_have_drawn(before: str, within: str, after: str) -> None:
    """Three times over: what is known from one time must not be taken for the next."""
    found: dict[bool, list[list[float]]] = {}
    for put_back in (False, True):
        generator = NumpyGenerator()
        np.random.seed(0)
        found[put_back] = []
        for turn in range(3):
            WAYS[before]()
            if put_back:
                state = generator.state()
                generator.seed([turn, 7])
                WAYS[within]()
                generator.set_state(state)
                assert generator.state() == state
            WAYS[after]()
            found[put_back].append([np.random.randn()] if turn else drawn())
    assert found[True] == found[False]


def test_a_normal_in_store_is_part_of_where_it_stands() -> None:
    generator = NumpyGenerator()
    np.random.seed(0)
    np.random.randn()
    first = generator.state()
    np.random.randn()  # takes no words
    assert generator.state() != first
    generator.set_state(first)
    assert generator.state() == first


def test_seeded_as_by_numpy() -> None:
    generator, words = NumpyGenerator(), np.arange(4, dtype=np.uint32)
    generator.seed(words)
    first = drawn()
    np.random.seed(words)
    assert drawn() == first


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937])
def test_another_generator_in_its_place(kind: Any) -> None:
    generator = NumpyGenerator()
    generator.set_state(generator.state())
    np.random.set_bit_generator(kind(3))
    state, first = generator.state(), drawn()
    assert generator.state() != state
    generator.set_state(state)
    assert drawn() == first


def test_memory_that_is_not_as_it_is_known_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_state, "_WORDS", 623)
    assert numpy_state._memory_of(np.random.get_bit_generator()) is None
    monkeypatch.setattr(numpy_state, "_memory_of", lambda generator: None)
    generator = NumpyGenerator()
    state, first = generator.state(), drawn()
    generator.set_state(state)
    assert drawn() == first
