"""Which rule taps which module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from dphero.layers.call import LayerCall

Rule = Callable[..., Any]
"""``rule(call, *args, **kwargs)``: see :mod:`dphero.layers`."""

_R = TypeVar("_R", bound=Rule)
_RULES: dict[type[nn.Module], Rule] = {}


def register(*kinds: type[nn.Module]) -> Callable[[_R], _R]:
    """Register a rule for module types.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import dphero
        >>> from dphero.gradients import Outer
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
    """Return the rule for a module: its type's, or that of a base whose methods it kept, or :func:`followed`."""
    if "forward" in vars(module) or _computes_parameters(module):
        return followed
    for base in type(module).__mro__:
        if base in _RULES and _keeps_methods(type(module), base):
            return _RULES[base]
    return followed


def followed(call: LayerCall, *args: Any, **kwargs: Any) -> Any:
    """Run a module without a rule as it is: its parameters are unbatched values, and its code is followed."""
    return call.original(*args, **kwargs)


def _keeps_methods(kind: type, base: type[nn.Module]) -> bool:
    """Tell whether a class computes what its base computes: it overrides nothing of it but how it is made."""
    family = [parent for parent in base.__mro__ if parent not in nn.Module.__mro__]
    inherited = {name for parent in family for name in vars(parent)}
    changed = {name for child in kind.__mro__ if child not in base.__mro__ for name in vars(child)}
    return not (inherited & changed) - _HARMLESS


_HARMLESS = {"__init__", "__repr__", "extra_repr", "reset_parameters", "_reset_parameters", "__module__", "__doc__"}
_HARMLESS |= {"__annotations__", "__constants__", "__firstlineno__", "__static_attributes__", "__parameters__"}


def _computes_parameters(module: nn.Module) -> bool:
    """Tell whether a weight is computed (weight norm, pruning) rather than the module's own parameter."""
    return hasattr(module, "parametrizations") or any(isinstance(value, Tensor) for value in vars(module).values())
