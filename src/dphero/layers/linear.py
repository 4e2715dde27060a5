"""Linear layers: G_i = Σ_t δ_it a_itᵀ."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dphero.gradients.outer import Bias, Outer
from dphero.gradients.piece import Piece
from dphero.layers.call import LayerCall
from dphero.layers.registry import register
from dphero.numerics.buffers import RefCountedBuffer
from dphero.numerics.precision import as_multiplied


@register(nn.Linear)
def linear(call: LayerCall, input: Tensor) -> Tensor:
    """Tap a linear layer with any number of positions."""
    buffer = call.memory.setdefault("sum", RefCountedBuffer()) if input.is_cpu else None

    def make(delta: Tensor, x: Tensor) -> dict[str, Piece]:
        return linear_pieces(delta, x, bias=call.wants("bias"), buffer=buffer)

    x = as_multiplied(input)
    return call.tap(lambda: F.linear(x, call["weight"], call.get("bias")), make, x)


def linear_pieces(delta: Tensor, x: Tensor, *, bias: bool, buffer: RefCountedBuffer | None = None) -> dict[str, Piece]:
    """Return the pieces of a linear layer from its output gradient and input, features last."""
    left, right = delta.reshape(len(delta), -1, delta.shape[-1]), x.reshape(len(x), -1, x.shape[-1])
    outer = Outer(left, right, None, buffer)
    return {"weight": outer, "bias": Bias(outer)} if bias else {"weight": outer}
