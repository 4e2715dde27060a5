"""What torch keeps of a GPU's memory for later: it is given back between phases that need pieces of other sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cache_emptied() -> Iterator[None]:
    """Let torch not keep, on a GPU, memory from before this phase during it, nor what it takes after it."""
    _empty()
    try:
        yield
    finally:
        _empty()


def _empty() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
