"""Which rule taps which module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

__all__ = ["Rule", "find_rule", "register"]

Rule = Callable[..., Any]
"""``rule(call, *args, **kwargs)``: see :mod:`dphero.layers`."""

_R = TypeVar("_R", bound=Rule)
_RULES: dict[type[nn.Module], Rule] = {}


def register(*kinds: type[nn.Module]) -> Callable[[_R], _R]:
    """Register a rule for module types.

    Example:
        >>> import torch.nn.functional as F
        >>> from torch import nn
        >>> import dphero
        >>> from dphero.pieces import Outer
        >>> class Projection(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.matrix = nn.Parameter(torch.randn(3, 5))
        ...     def forward(self, x):
        ...         return x @ self.matrix.T
        >>> @dphero.register(Projection)
        ... def projection(call, x):
        ...     return call.tap(lambda: x @ call["matrix"].T, lambda delta, x: {"matrix": Outer(delta, x)}, x)
    """

    def add(rule: _R) -> _R:
        for kind in kinds:
            _RULES[kind] = rule
        return rule

    return add


def find_rule(module: nn.Module) -> Rule:
    """Return the rule for a module: its type's, or that of a base whose ``forward`` it kept, or the bare one."""
    from dphero.layers.bare import bare

    kind = type(module)
    if kind in _RULES:
        return _RULES[kind]
    if not hasattr(module, "parametrizations"):
        for base in kind.__mro__[1:]:
            if base in _RULES and kind.forward is base.forward:
                return _RULES[base]
    return bare
