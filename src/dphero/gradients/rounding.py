"""How much rounding may take from a norm or add to a sum: clipping leaves room for that."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["gram_rounding", "rounding"]


def gram_rounding(x: Tensor, terms: int) -> float:
    """Return the relative rounding error to allow for in a Gram norm over this many terms.

    Positions that nearly cancel leave a norm far below its terms, which rounding can hide; a norm that is too small
    would let an example through unclipped. Four times √terms units of the last place is more than blocked sums lose.
    """
    return 4 * torch.finfo(x.dtype).eps * math.sqrt(terms)


def rounding(x: Tensor, *, convolution: bool = False) -> float:
    """Return a bound on the relative error of products in the precision that torch uses for this tensor.

    Norm and sum are computed by different products. In float32 they agree to the last digits; in the shorter formats of
    a GPU the clip bound must leave room for the difference.
    """
    if x.dtype in (torch.bfloat16, torch.float16):
        return 2.0**-7
    if x.device.type == "cuda" and x.dtype == torch.float32:
        allow = torch.backends.cudnn.allow_tf32 if convolution else torch.backends.cuda.matmul.allow_tf32
        return 2.0**-9 if allow else 0.0
    return 0.0
