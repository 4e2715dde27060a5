"""Nested containers: taken apart and built again."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dphero.numerics.trees import arguments_flatten, tree_flatten, tree_map, tree_unflatten

Pair = namedtuple("Pair", "first second")


@dataclass
class Answer:
    logits: Any
    hidden: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    values: Any
    count: int = field(default=0, init=False)


TREES = [
    3,
    [1, (2, {"a": 3})],
    Answer(1, [2, 3]),
    {"x": Answer(Answer(1, 2), Pair(3, Frozen((4, 5)))), "y": [6, Frozen(7), 8]},
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_trees_are_taken_apart_and_built_again(tree: Any) -> None:
    leaves, structure = tree_flatten(tree)
    assert tree_unflatten(leaves, structure) == tree
    assert all(isinstance(leaf, int | None) for leaf in leaves)
    assert tree_flatten(tree)[1] == structure
    assert all(structure != tree_flatten([tree, other])[1] for other in TREES)


def test_a_function_of_each_leaf() -> None:
    assert tree_map(lambda x: 2 * x, {"x": Answer([1, 2], Frozen(3))}) == {"x": Answer([2, 4], Frozen(6))}


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("kwargs", [{}, {"mask": 3}])
def test_arguments_are_taken_apart_like_any_tree(count: int, kwargs: dict[str, Any]) -> None:
    args = tuple(torch.zeros(2) for _ in range(count))
    leaves, structure = arguments_flatten(args, kwargs)
    expected, as_a_tree = tree_flatten((args, kwargs))
    assert [*map(id, leaves)] == [*map(id, expected)] and structure == as_a_tree
    assert structure != arguments_flatten((*args, [1]), kwargs)[1]
    assert tree_unflatten(leaves, structure) == (args, kwargs)
