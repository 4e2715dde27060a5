"""Tensors that announce their ``backward()``, and so does all that is computed from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import get_default_nowrap_functions

from dphero.checks.loss.recorder import Recorder, Watched

__all__ = ["watched_class"]


def watched_class(
    announce: Callable[[Tensor, Tensor | None], None], recorder: Callable[[], Recorder | None] = lambda: None
) -> type[Watched]:
    """Make the class of tensors whose ``backward`` is announced.

    Results become members of the class in place. A view of the result would do as well, but arithmetic in place on a
    view (``loss /= 2``) hides in the graph which arithmetic it was.

    Args:
        announce: Called with a tensor that is about to be back-propagated, and with the gradient that was given.
        recorder: Returns what writes down all calls on these tensors, while there is one.
    """

    class WatchedTensor(Watched):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is Tensor.backward:
                announce(args[0], args[1] if len(args) > 1 else kwargs.get("gradient"))
            if func in _AS_PLAIN:
                return func(args[0].as_subclass(Tensor), *args[1:], **kwargs)
            if not all(issubclass(other, Watched) or issubclass(cls, other) for other in types):
                return NotImplemented
            recording = recorder() if func not in _UNWATCHED else None
            with torch._C.DisableTorchFunctionSubclass():
                if recording is not None:
                    return recording.call(func, args, kwargs)
                result = func(*args, **kwargs)
            if func not in _UNWATCHED:
                watch(result)
            return result

    def watch(result: Any) -> None:
        if type(result) is Tensor:
            if result.requires_grad:  # what is detached is the user's to keep
                result.__class__ = WatchedTensor
        elif isinstance(result, tuple | list):
            for each in result:
                watch(each)

    return WatchedTensor


_AS_PLAIN = {Tensor.backward, Tensor.__reduce_ex__, Tensor.__deepcopy__}
_UNWATCHED = get_default_nowrap_functions()
