"""The rule of convolutions; their per-example gradients are those of :mod:`dphero.gradients.convolution`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero.gradients.convolution import conv_piece
from dphero.gradients.patches import convolution_arguments
from dphero.gradients.piece import Explicit, Piece
from dphero.layers.call import LayerCall
from dphero.layers.registry import register
from dphero.numerics.buffers import ReusableBuffer
from dphero.numerics.precision import as_multiplied, widened


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(call: LayerCall, input: Tensor) -> Tensor:
    """Tap a convolution with any stride, padding, dilation and groups."""
    module, x = call.module, as_multiplied(input)
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    padding: tuple[int, ...] | str = module.padding
    if isinstance(padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        padding = (0,) * (x.dim() - 2)
    arguments = convolution_arguments(module.weight, module.stride, padding, module.dilation, module.groups)
    buffer = call.memory.setdefault("buffer", ReusableBuffer())

    def make(delta: Tensor, x: Tensor) -> dict[str, Piece]:
        pieces: dict[str, Piece] = {"weight": conv_piece(x, delta, arguments, buffer)}
        if call.wants("bias"):
            pieces["bias"] = Explicit(widened(delta).flatten(2).sum(2))
        return pieces

    def compute() -> Tensor:
        bias = call.get("bias")
        return torch.convolution(
            x,
            as_multiplied(call["weight"]),
            bias if bias is None else as_multiplied(bias),
            arguments.stride,
            arguments.padding,
            arguments.dilation,
            False,
            (0,) * len(arguments.stride),
            arguments.groups,
        )

    return call.tap(compute, make, x)
