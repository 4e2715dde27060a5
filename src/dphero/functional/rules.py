"""How the per-example gradient of an unbatched value is read off products, convolutions and look-ups.

Each rule returns, for the arguments that may be unbatched, what makes their piece from the gradient of the
output and some of the other arguments, rows in front: nothing is formed. Norms are taken apart into simpler operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dphero.gradients.convolution import conv_piece
from dphero.gradients.outer import Outer
from dphero.gradients.patches import convolution_arguments
from dphero.gradients.piece import Explicit, Piece
from dphero.gradients.rows import Rows
from dphero.numerics.precision import widened

PieceRule = tuple[Any, Callable[..., Piece], tuple[Tensor, ...]]
"""An unbatched argument, what makes its piece, and the tensors that this needs besides the output's gradient."""


_R = TypeVar("_R", bound=Callable[..., "list[PieceRule] | None"])


def register_function(*functions: Any) -> Callable[[_R], _R]:
    """Register a rule for torch functions (``docs/extend/function-rule.md``).

    The rule takes the function's arguments, and returns a :data:`PieceRule` for each that may be unbatched; ``None``
    where it does not fit them.
    """

    def add(rule: _R) -> _R:
        _RULES.update(dict.fromkeys(functions, rule))
        return rule

    return add


def piece_rules(func: Any, args: Any, kwargs: Any, unbatched: Sequence[Tensor]) -> list[PieceRule] | None:
    """Return how the gradient of each unbatched argument is read off, or ``None`` where no rule fits."""
    if func not in _RULES:
        return None
    try:
        rules = _RULES[func](*args, **kwargs)
    except TypeError:  # arguments that the rule does not know
        return None
    wanted = {id(value) for value in unbatched}
    if rules is None or any(id(tensor) in wanted for _, _, saved in rules for tensor in saved):
        return None
    rules = [rule for rule in rules if id(rule[0]) in wanted]
    return rules if len(rules) == len(wanted) else None


def _flat(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1, x.shape[-1])


def _linear(input: Tensor, weight: Any, bias: Any = None) -> list[PieceRule]:
    return [
        (weight, lambda delta, x: Outer(_flat(delta), _flat(x)), (input,)),
        (bias, lambda delta: Explicit(_flat(widened(delta)).sum(1)), ()),
    ]


def _addmm(bias: Any, input: Tensor, weight: Any) -> list[PieceRule]:
    return [
        (weight, lambda delta, x: Outer(_flat(x), _flat(delta)), (input,)),
        (bias, lambda delta: Explicit(_flat(widened(delta)).sum(1)), ()),
    ]


def _matmul(input: Any, other: Any) -> list[PieceRule] | None:
    if other.dim() == 2 and input.dim() >= 2:
        return [(other, lambda delta, x: Outer(_flat(x), _flat(delta)), (input,))]
    if input.dim() == 2 and other.dim() == 3:
        return [(input, lambda delta, x: Outer(delta.transpose(1, 2), x.transpose(1, 2)), (other,))]
    return None


def _embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> list[PieceRule] | None:
    if max_norm is not None or scale_grad_by_freq:
        return None
    rows = weight.shape[0]

    def make(delta: Tensor, index: Tensor) -> Piece:
        index, delta = index.reshape(len(index), -1) % rows, _flat(delta)
        if padding_idx is not None:
            delta = delta * (index != padding_idx % rows).unsqueeze(-1)
        return Rows(index, delta, rows)

    return [(weight, make, (input,))]


def _item(table: Any, index: Any) -> list[PieceRule] | None:
    integer = isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64)
    return _embedding(index, table) if integer and table.dim() == 2 else None


def _convolution(
    input: Tensor,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> list[PieceRule] | None:
    if isinstance(padding, str) or input.dim() != weight.dim():
        return None
    arguments = convolution_arguments(weight, stride, padding, dilation, groups)
    return [
        (weight, lambda delta, x: conv_piece(x, delta, arguments), (input,)),
        (bias, lambda delta: Explicit(widened(delta).flatten(2).sum(2)), ()),
    ]


_RULES: dict[Any, Callable[..., list[PieceRule] | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.mm: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: lambda other, input: _matmul(input, other),
    torch.Tensor.__getitem__: _item,
    F.embedding: _embedding,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
}

PRODUCTS = frozenset(_RULES) - {torch.Tensor.__getitem__, F.embedding}
"""What autocast multiplies in a shorter format."""


# -- operations that are made of simpler ones -----------------------------------------------------------------------


def _affine(out: Tensor, weight: Any, bias: Any) -> Tensor:
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _layer_norm(input: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    return _affine(F.layer_norm(input, shape, None, None, eps), weight, bias)


def _rms_norm(input: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
    return _affine(F.rms_norm(input, shape, None, eps), weight, None)


def _group_norm(input: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    channels = (-1, *[1] * (input.dim() - 2))
    weight, bias = (value if value is None else value.reshape(channels) for value in (weight, bias))
    return _affine(F.group_norm(input, groups, None, None, eps), weight, bias)


def _prelu(input: Tensor, weight: Any) -> Tensor:
    if weight.numel() > 1:
        weight = weight.reshape(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, input * weight)


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *rest: Any, **options: Any) -> Any:
    """Let each example have its own copy of a bias that is added to the attention scores of all (T5, Swin)."""
    if attn_mask is None:
        return NotImplemented
    shape = (*query.shape[:-1], key.shape[-2])
    if attn_mask.shape == shape:
        return NotImplemented
    return F.scaled_dot_product_attention(query, key, value, attn_mask.expand(shape), *rest, **options)


def _set_item(target: Tensor, index: Any, value: Any) -> Any:
    """Write a copy of the value for each example into the batch (a token that stands for what is masked)."""
    masked = isinstance(index, Tensor) and index.dtype == torch.bool
    if not isinstance(value, Tensor) or (masked and value.dim() > target.dim() - index.dim()):
        return NotImplemented
    copies = value.expand(target.shape if masked else target[index].shape)
    if type(copies) is not Tensor:  # no example is there to have one
        return NotImplemented
    target[index] = copies[index] if masked else copies
    return None


SIMPLER: dict[Any, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.prelu: _prelu,
    torch.prelu: _prelu,
    F.scaled_dot_product_attention: _attention,
    torch.Tensor.__setitem__: _set_item,
}
"""Functions that are made of simpler ones; ``NotImplemented`` where a call of theirs is not."""
