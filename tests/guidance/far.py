"""A device that is not there: tensors of it live on the CPU, but what a GPU would be asked for is counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
_LOOKS = ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero")


class Far(Tensor):
    """A tensor on the far device; `near` is where its numbers are."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        layout: dict[str, Any] = {"strides": near.stride(), "storage_offset": near.storage_offset()}
        made: Far = Tensor._make_wrapper_subclass(cls, near.shape, **layout, dtype=near.dtype, device=DEVICE)
        made.near = near
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Far({self.near})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("use far tensors within Orders() only")


class Orders(TorchDispatchMode):
    """Counts the orders that the far device gets (views are none), and in `waits` those that wait for its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.given: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), str(func).rsplit(".", 1)[0]
        device = kwargs.pop("device", None)
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        far = any(isinstance(each, Far) for each in inputs)
        if far and not all(isinstance(each, Far) or each.dim() == 0 for each in inputs):
            raise RuntimeError(f"{name}: some tensors are on the far device, some are not")
        made = func(*tree_map(_near, args), **tree_map(_near, kwargs))
        if not far and device != DEVICE:
            return made
        if not (func.is_view or name == "aten._unsafe_view"):
            self.given[name] += 1
        comes_back = name in _LOOKS or (device is not None and device != DEVICE)
        if comes_back or name == "aten.linalg_qr":
            self.waits[name] += 1
        return made if comes_back else tree_map(lambda each: Far(each) if isinstance(each, Tensor) else each, made)


def _near(each: Any) -> Any:
    return each.near if isinstance(each, Far) else each
