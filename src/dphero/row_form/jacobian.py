"""Jᵀ of a value in row form, found from what it makes of three vectors of each row.

For each row, Jᵀ is s · I on all that is orthogonal to Q, an orthonormal basis of span{1, p_r}, and stays inside that
span on Q (:mod:`dphero.row_form.form`). So with c = Qᵀĝ,

    Jᵀ ĝ = s ĝ + E c,    E = JᵀQ - s Q.

Q, and numbers that are not in its span, the same for all examples, are pulled back; all else follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dphero.numerics.compare import scattered_numbers
from dphero.numerics.precision import full_precision, matmul_tf32

_NOTHING = 1e-30
"""What is added to a variance, so that rows of one number have no direction besides 1."""
ROUNDINGS = 32
"""Units of rounding that a pass through f may lose, of what goes in."""
_REFUSED = 2.0**-4
"""From which part of Jᵀ on that is not of this form it is none of rounding: a mistake in the form makes half of it so.

Weights whose rows vary by 10⁻⁵ of their mean lose 10⁻² in float32; so do gradients that are pulled back one by one."""
_SMALL, _MANY = 1 << 20, 64
"""Constants are kept for the next batch: of so many entries at most, for so many shapes."""


class _Constants(NamedTuple):
    """What is the same for all matrices of one shape.

    Attributes:
        equal: A row of equal numbers, of length one.
        scattered: Rows of scattered numbers, of length one, whose sum is zero.
        joined: Of each row, a matrix that makes of vectors in its span, and one besides, those that are pulled back.
        parted: Its inverse.
        inside: One where a map that keeps to the span and to what is besides has any entries, otherwise zero.
    """

    equal: Tensor
    scattered: Tensor
    joined: Tensor
    parted: Tensor
    inside: Tensor


_KNOWN: dict[tuple[int, int, torch.dtype, torch.device], _Constants] = {}


class RowMap(NamedTuple):
    """Jᵀ, in all rows.

    Attributes:
        span: Q and z, orthonormal, of shape ``(3, rows, columns)``.
        block: Jᵀ in their terms, of shape ``(rows, 3, 3)``: entry jk is how much of vector j it makes of vector k. s is
            its last one. ``None`` where the leaf has one number for each row.
        along: E, of shape ``(rows, 2, columns)``; or what becomes of Q, of shape ``(rows, 2)``.
        missing: How much of Jᵀ is not of this form: what of it is seen besides rounding. Infinite where that is so much
            that the form is wrong: so are all norms then, and nothing is added up.
    """

    span: Tensor
    block: Tensor | None
    along: Tensor
    missing: Tensor

    def products(self, rows: Tensor) -> Tensor:
        """Return c of gradients of shape ``(n, rows, columns)``, of shape ``(rows, n, 2)``."""
        return torch.bmm(rows.transpose(0, 1), self.span[:2].permute(1, 2, 0))

    def pull(self, gradients: Tensor) -> Tensor:
        """Return Jᵀ of each gradient, of shape ``(n, rows, columns)``, or ``(n, rows)``."""
        rows = gradients.to(self.span.dtype).reshape(len(gradients), *self.span.shape[1:])
        if self.block is None:
            return self.numbers(self.products(rows))
        out = rows * self.block[:, 2, 2:]
        out.transpose(0, 1).baddbmm_(self.products(rows), self.along)
        return out

    def numbers(self, products: Tensor) -> Tensor:
        """Return Jᵀ of each gradient with these c, of shape ``(n, rows)``, where it has one number for each row."""
        return (products * self.along.unsqueeze(1)).sum(2).T

    def pull_sum(self, gradient: Tensor) -> Tensor:
        """Return Jᵀ of one gradient, a sum of those of many examples."""
        with full_precision(), matmul_tf32(gradient, allow=False):
            return self.pull(gradient.unsqueeze(0))[0]


def span_of(p: Tensor) -> Tensor:
    """Return, of the rows of a matrix, a basis of span{1, p_r} and a vector at right angles to it, all orthonormal."""
    known, shape = _constants(p), p.shape[1:]
    # twice: the second time for what the first one left by rounding
    unit = F.layer_norm(F.layer_norm(p, shape, eps=_NOTHING), shape, known.equal, eps=_NOTHING)
    shared = torch.bmm(known.scattered.unsqueeze(1), unit.unsqueeze(2))
    other = torch.baddbmm(known.scattered.unsqueeze(1), shared, unit.unsqueeze(1), alpha=-1)[:, 0]
    # no numbers if p should be just these: nothing tells s then
    other = F.layer_norm(other, shape, known.equal, eps=0.0)
    return torch.stack([known.equal.expand_as(p), unit, other])


def _constants(like: Tensor) -> _Constants:
    key = (*like.shape, like.dtype, like.device)
    found = _KNOWN.get(key)
    if found is None:
        wide = scattered_numbers(like).double()
        wide = F.normalize(wide - wide.mean(1, keepdim=True), dim=1)
        same = torch.eye(3, dtype=like.dtype, device=like.device)
        joined = same.repeat(len(like), 1, 1)
        joined[:, 2, :2] = scattered_numbers(like[:, :2])  # not the same in any two rows: what mixes them is seen
        inside = same.clone()
        inside[:2, :2] = 1
        equal = like.new_full(like.shape[1:], like.shape[1] ** -0.5)
        found = _Constants(equal, wide.to(like.dtype), joined, 2 * same - joined, inside)
        # the memory of what a CUDA graph computes is the graph's
        recorded = like.is_cuda and torch.cuda.is_current_stream_capturing()
        if like.numel() <= _SMALL and len(_KNOWN) < _MANY and not recorded:
            _KNOWN[key] = found
    return found


def row_map(span: Tensor, pull: Callable[[Tensor], Tensor], shape: torch.Size) -> RowMap:
    """Find Jᵀ.

    Args:
        span: What :func:`span_of` returned.
        pull: Returns Jᵀ of each of several gradients of the value;
        shape: the value's shape.
    """
    with matmul_tf32(span, allow=False):
        known, (_, rows, columns) = _constants(span[0]), span.shape
        into = span.transpose(0, 1)
        probes = torch.empty_like(span)
        torch.bmm(known.joined, into, out=probes.transpose(0, 1))
        pulled = pull(probes.view(3, *shape)).reshape(3, rows, -1)
        out = torch.bmm(known.parted, pulled.transpose(0, 1))
        block: Tensor | None = None
        if out.shape[2] == columns:
            block = torch.bmm(into, out.mT) * known.inside
            gaps = torch.baddbmm(out, block.mT, into, alpha=-1)
            along = torch.addcmul(out[:, :2], block[:, 2:, 2:], into[:, :2], value=-1)
        else:  # one number for each row
            along, gaps = out[:, :2, 0], out[:, 2]
        missing = torch.linalg.vector_norm(gaps)
        size = torch.linalg.vector_norm(along if block is None else block)
        wrong, rounding = missing > size * _REFUSED, ROUNDINGS * torch.finfo(out.dtype).eps
        missing = torch.sub(missing, size, alpha=rounding).clamp_(min=0)  # NaN stays
        return RowMap(span, block, along, missing.masked_fill_(wrong, math.inf))
