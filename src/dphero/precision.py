"""Which precision products are computed in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Explicitly", "exactly", "products_in"]

_aten = torch.ops.aten


_AS_EVER = nullcontext()


def products_in(x: Tensor, *, short: bool) -> AbstractContextManager[None]:
    """Let a GPU round the factors of matrix products to TF32 or not, whatever its user set for his own."""
    return _products_on_gpu(short) if x.is_cuda else _AS_EVER


@contextmanager
def _products_on_gpu(short: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = short
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def exactly() -> AbstractContextManager[Any]:
    """Compute without a graph, and in full precision even inside the user's autocast: norm and noise must agree."""
    shorter = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not shorter:
        return torch.no_grad()
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    for device in shorter:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


@torch.library.custom_op("dphero::product", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _product(left: Tensor, right: Tensor, short: bool) -> Tensor:
    """Return the products of two stacks of matrices in the precision that is asked for."""
    with products_in(left, short=short):
        return torch.bmm(left, right)


@_product.register_fake
def _(left: Tensor, right: Tensor, short: bool) -> Tensor:
    return left.new_empty(len(left), left.shape[1], right.shape[2])


class Explicitly(TorchDispatchMode):
    """Makes the precision of products part of the operation, where it is not the user's own.

    For a compiler, which sees operations and not what was set when they ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self._usual = torch.backends.cuda.matmul.allow_tf32

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        short, kwargs = torch.backends.cuda.matmul.allow_tf32, dict(kwargs or {})
        if short == self._usual or func not in _PRODUCTS:
            return func(*args, **kwargs)
        *add, left, right = args
        single = left.dim() == 2
        found = _product(left[None], right[None], short)[0] if single else _product(left, right, short)
        if add:
            found = found * kwargs.pop("alpha", 1) + add[0] * kwargs.pop("beta", 1)
        if "out" in kwargs:
            return kwargs.pop("out").copy_(found)
        assert not kwargs, f"{func} with {kwargs}"
        return found


_PRODUCTS = {
    _aten.mm.default, _aten.mm.out, _aten.bmm.default, _aten.bmm.out, _aten.addmm.default, _aten.baddbmm.default
}  # fmt: skip
