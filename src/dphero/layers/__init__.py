"""Layer rules: how each layer family computes its output and reports its per-example gradients.

A rule is a function ``rule(call, *args, **kwargs)`` that returns what the module's ``forward`` would return,
computed from the detached parameters ``call["weight"]``, with each intermediate that parameters reach
tapped by ``call.tap(compute, make, *saved)``. Rules are found by the module's exact type, or by a
base class whose methods the subclass kept. The code of any other module is followed as it runs
(:mod:`dphero.functional.unbatched`), or recomputed by the generic ``vmap`` rule where that is not possible.
"""

from __future__ import annotations

from dphero.layers import attention, convolution, embedding, group_norm, linear, norm, recurrent  # noqa: F401
from dphero.layers.registry import Rule, find_rule, register

__all__ = ["Rule", "find_rule", "register"]
