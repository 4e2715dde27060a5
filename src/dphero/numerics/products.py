"""Products of matrices, accumulated and returned in float32 at least, whatever is multiplied.

A number in bfloat16 has 8 significant bits, so a product of two has 16, and float32 holds it exactly. A GPU's tensor
cores multiply in bfloat16 and add in float32: what rounds is the addition alone, as for float32 numbers, at many times
the speed. Where there are none, numbers are widened first, which gives the same products.

TF32, which drops the last 13 bits of float32 numbers, is used only where it is asked for here: where one product gives
both what a norm is taken of and what is summed. Two products round differently, and what cancels could differ much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dphero.numerics.precision import at_least_single, matmul_tf32

WEIGHT_ROUNDING = 2.0**-8
"""By how much :func:`weighted_in_two` may round a weight up, relatively."""


PARTING_ERROR = 2.0**-18
"""Of an entry of :func:`square_product`: 2⁻²⁰ for what is left out, and 2⁻¹⁹ for what TF32 drops of the lower part."""
_HIGH = -(1 << 13)
"""The bits of a float32 number that TF32 keeps."""
_SOME = 1 << 24
"""So many numbers are parted at a time: the parts of all would be two more copies, of a language model's logits say."""
_FEWEST = 64
"""Columns are parted in multiples of so many."""
ALIGNED = 8
"""Numbers in bfloat16 that are read at once: sizes that are multiples of it are multiplied faster."""


def on_tensor_cores(x: Tensor) -> bool:
    """Tell whether tensor cores multiply bfloat16 numbers where this tensor is."""
    return x.is_cuda and torch.version.hip is None


def multiplied_short(x: Tensor) -> bool:
    """Tell whether products of this tensor with another one of its type are made in bfloat16."""
    return x.dtype == torch.bfloat16 and on_tensor_cores(x)


def product(a: Tensor, b: Tensor, out: Tensor | None = None, *, tf32: bool = False) -> Tensor:
    """Return a @ b of two matrices, or of two batches of them, written into ``out`` where that is given."""
    if b.dtype == a.dtype and multiplied_short(a):
        return _of_short(a, b, out)
    dtype = torch.promote_types(at_least_single(a.dtype), b.dtype)
    a, b = a.to(dtype), b.to(dtype)
    with matmul_tf32(a, allow=tf32):
        return torch.mm(a, b, out=out) if a.dim() == 2 else torch.bmm(a, b, out=out)


def _of_short(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    if out is None:
        return multiply(aligned(a), aligned(b), out_dtype=torch.float32)
    return multiply(aligned(a), aligned(b), out_dtype=torch.float32, out=out)


def square_product(x: Tensor) -> Tensor:
    """Return x xᵀ of batches of matrices, or something with the same symmetric part, which is all that a norm sees.

    On a GPU, float32 numbers are parted in two of 11 significant bits, which tensor cores multiply exactly as TF32:
    x = h + l, and x xᵀ is h hᵀ + 2 h lᵀ but for l lᵀ, in its symmetric part. An entry is off by :data:`PARTING_ERROR`
    at most, relative to the lengths of the two rows, beside what the addition rounds.
    """
    if x.dtype != torch.float32 or not on_tensor_cores(x):
        return product(x, x.mT)
    rows = x.shape[0] * x.shape[1]
    columns = max(_FEWEST, _SOME // max(rows, 1) // _FEWEST * _FEWEST)
    first, *others = x.split(columns, 2)  # not some examples at a time: products of few are slow
    total = _add_square(None, first)
    for part in others:
        _add_square(total, part)
    return total


def _add_square(total: Tensor | None, x: Tensor) -> Tensor:
    """Return ``total`` with the product of the columns x with themselves added; that alone where there is none yet."""
    high = x.view(torch.int32).bitwise_and(_HIGH).view(torch.float32)
    low = x - high
    with matmul_tf32(x, allow=True):
        total = torch.bmm(high, high.mT) if total is None else total.baddbmm_(high, high.mT)
        return total.baddbmm_(high, low.mT, alpha=2)


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy of it whose rows (or columns) start where tensor cores read them at full speed."""
    if not multiplied_short(x) or x.dim() < 2:
        return x
    turned = x.stride(-1) != 1
    rows = x.mT if turned else x
    width = rows.shape[-1]
    if rows.stride(-1) != 1 or rows.stride(-2) % ALIGNED == 0:
        return x
    copy = rows.new_empty(*rows.shape[:-1], _up(width))[..., :width].copy_(rows)
    return copy.mT if turned else copy


def _up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def short_parts(matrix: Tensor) -> Tensor | None:
    """Return three matrices in bfloat16, side by side, whose sum is a float32 matrix; ``None`` where that has no use.

    Each takes 8 of its 24 significant bits.
    """
    if matrix.dtype != torch.float32 or not on_tensor_cores(matrix):
        return None
    parts, rest = [matrix.bfloat16()], matrix
    for _ in range(2):
        rest = rest - parts[-1]
        parts.append(rest.bfloat16())
    return torch.cat(parts, 1)


def thin_product(x: Tensor, matrix: Tensor, parts: Tensor | None) -> Tensor:
    """Return x @ matrix for a narrow matrix and its :func:`short_parts`: x is not widened for it."""
    rows = x.reshape(-1, x.shape[-1])
    if parts is not None and x.dtype == torch.bfloat16:
        found = product(rows, parts).unflatten(1, (3, -1)).sum(1)
    else:
        found = product(rows, matrix)
    return found.view(*x.shape[:-1], matrix.shape[1])


def rounded_weights(weights: Tensor) -> Tensor:
    """Return weights of which 8 bits are left."""
    return weights.to(torch.bfloat16).to(at_least_single(weights.dtype))


def weighted_in_two(x: Tensor, weights: Tensor, axis: int = 0) -> tuple[Tensor, Tensor]:
    """Return two tensors in bfloat16 whose difference is x in bfloat16 times a weight for each of its first axis.

    With ``axis``, the weights are those of another axis.

    The weights are rounded, as by :func:`rounded_weights`. Nothing else is: a product has 16 bits.
    """
    spread = weights.to(torch.bfloat16).view(-1, *[1] * (x.dim() - 1 - axis))
    near = x * spread
    return near, torch.addcmul(near, x, spread, value=-1)
