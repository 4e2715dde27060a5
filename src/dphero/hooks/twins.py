"""A second place where a tensor's values stand for a while: who needs a copy of them need not make one.

What a recorded model returns is a copy of what stands in the recording. A language model's outputs are large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Twin:
    """The second place."""

    value: Tensor  # not to be changed
    holds: Callable[[], bool]  # whether the values still stand there


def set_twin(tensor: Tensor, twin: Twin) -> None:
    """Let it be known of a tensor, as long as that is the same object."""
    noted: Any = tensor
    noted._dphero_twin = twin


def twin_of(tensor: Tensor) -> Twin | None:
    """Return it, if there is one."""
    twin: Twin | None = getattr(tensor, "_dphero_twin", None)
    return twin
