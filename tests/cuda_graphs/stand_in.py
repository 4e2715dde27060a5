"""What stands in for recordings on a CPU: operations are noted, and done again into the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

_PLACES = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty}


class Recorder(TorchDispatchMode):
    """Notes every operation with its tensors; to replay is to do them again into the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _PLACES:  # to take memory is no operation of a GPU
            self.done.append((func, args, kwargs or {}, tree_flatten(out)[0]))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outs in self.done:
            storages = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if _is_tensor(t)}
            for old, new in zip(outs, tree_flatten(func(*args, **kwargs))[0], strict=True):
                if _is_tensor(old) and old.untyped_storage().data_ptr() not in storages:
                    with torch.autograd._unsafe_preserve_version_counter(old):  # autograd knows nothing of a replay
                        old.copy_(new.reshape(old.shape))  # squeeze_ changed its shape since


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


class StandIn:
    """Records on a CPU."""

    def __init__(self, device: torch.device, room: int = 0) -> None:
        pass

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        with Recorder() as recorder:
            result = work()
        return recorder.replay, result


def same_place(tensor: Tensor) -> Tensor:
    """Return another tensor in the same memory: what stands in for one that reads memory without keeping it."""
    if type(tensor) is not Tensor:
        return tensor
    there = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*there)
