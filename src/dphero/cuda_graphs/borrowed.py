"""Tensors that read memory without keeping it: what a recording left, until another one writes there."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Geometry

_KEPT = (Factor, Geometry, type)


def borrowed(value: Any, known: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """Return a copy of pieces, or of containers of them, whose tensors on a GPU do not keep their memory.

    What is not understood (a tensor that a function holds, say) is kept, and so is a tensor with a gradient, since a
    place in memory has no graph: that costs memory, nothing else. Whoever uses the copy must keep the memory from being
    given back to the device, as a recording does that lies there.

    Args:
        value: What is to be copied.
        known: What was copied already, by its ``id``: objects that share one still do.
    """
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)][1]
    made = value
    if isinstance(value, Tensor):
        made = value if value.requires_grad else _place(value)
    elif type(value) in (list, tuple):
        made = type(value)(borrowed(each, known) for each in value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        made = type(value)(*(borrowed(each, known) for each in value))
    elif type(value) is dict:
        made = {name: borrowed(each, known) for name, each in value.items()}
    elif type(value).__module__.startswith("dphero.") and hasattr(value, "__dict__") and not isinstance(value, _KEPT):
        made = copy.copy(value)
        known[id(value)] = (value, made)
        vars(made).update({name: borrowed(each, known) for name, each in vars(value).items()})
    known[id(value)] = (value, made)
    return made


class _Bytes:
    """Some memory of a GPU, as libraries show it to each other."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def _place(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    if not tensor.is_cuda or type(tensor) is not Tensor or not storage.nbytes():
        return tensor
    whole = storage.nbytes() // tensor.element_size() * tensor.element_size()
    flat = torch.as_tensor(_Bytes(storage.data_ptr(), whole), device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
