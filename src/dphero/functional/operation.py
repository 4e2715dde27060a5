"""One call of a function, taken apart so that it can be made again with other tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

Arguments = tuple[Sequence[Any], dict[str, Any]]


class Operation:
    """A function and its arguments, with holes for the tensors among them (it keeps none of them alive)."""

    def __init__(
        self,
        func: Any,
        leaves: list[Any],
        holes: list[tuple[int, int]],
        put_together: Callable[[list[Any]], Arguments],
    ) -> None:
        self.func, self.name = func, _name(func)
        self._leaves, self._holes, self._put_together = leaves, holes, put_together

    def run(self, tensors: Sequence[Any]) -> Any:
        """Call the function with these tensors in the holes, each in all of its places."""
        leaves = list(self._leaves)
        for place, number in self._holes:
            leaves[place] = tensors[number]
        args, kwargs = self._put_together(leaves)
        return self.func(*args, **kwargs)

    @property
    def in_place(self) -> bool:
        """Whether it changes its first argument."""
        return self.name in _CHANGING or (self.name.endswith("_") and not self.name.endswith("__"))


def take_apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Operation, list[Tensor]]:
    """Return the operation, and the distinct tensors among its arguments in the order of its holes."""
    leaves, put_together = _flatten(args, kwargs)
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}
    holes: list[tuple[int, int]] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
            holes.append((place, numbers[id(leaf)]))
            leaves[place] = None
    return Operation(func, leaves, holes, put_together), tensors


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Callable[[list[Any]], Arguments]]:
    leaves, names = [*args, *kwargs.values()], tuple(kwargs)
    if not any(isinstance(leaf, tuple | list | dict) for leaf in leaves):  # mostly, and much faster
        count = len(args)
        return leaves, lambda leaves: (leaves[:count], dict(zip(names, leaves[count:], strict=True)))
    leaves, structure = tree_flatten((args, kwargs))
    return leaves, lambda leaves: tree_unflatten(leaves, structure)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return f".{func.__self__.__name__}" if name == "__get__" else name


_CHANGING = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "matmul"))}
