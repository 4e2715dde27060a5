"""One call of a torch function, taken apart so that it can be made again with other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["Operation", "take_apart"]


class Operation:
    """A function and its arguments, with holes for the tensors among them (it keeps none of them alive).

    Attributes:
        func: The function.
        name: Its name, for messages and as a key.
    """

    def __init__(self, func: Any, leaves: list[Any], structure: Any, holes: list[tuple[int, int]]) -> None:
        self.func, self.name = func, _name(func)
        self._leaves, self._structure, self._holes = leaves, structure, holes

    def run(self, tensors: Sequence[Any]) -> Any:
        """Call the function with these tensors in the holes, each in all of its places."""
        leaves = list(self._leaves)
        for place, number in self._holes:
            leaves[place] = tensors[number]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return self.func(*args, **kwargs)

    @property
    def in_place(self) -> bool:
        """Whether it changes its first argument."""
        return self.name in _CHANGING or (self.name.endswith("_") and not self.name.endswith("__"))


def take_apart(func: Any, args: Any, kwargs: Any) -> tuple[Operation, list[Tensor]]:
    """Return the operation, and the distinct tensors among its arguments in the order of its holes."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors: dict[int, Tensor] = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    numbers = {key: number for number, key in enumerate(tensors)}
    holes = [(place, numbers[id(leaf)]) for place, leaf in enumerate(leaves) if id(leaf) in numbers]
    blank = [None if id(leaf) in numbers else leaf for leaf in leaves]
    return Operation(func, blank, structure, holes), list(tensors.values())


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return f".{func.__self__.__name__}" if name == "__get__" else name


_CHANGING = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "matmul"))}
