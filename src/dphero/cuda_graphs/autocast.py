"""The user's autocast, as a recording sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

Autocast = tuple[tuple[str, torch.dtype], ...]
"""For which kinds of devices it is on, and with which type."""

_DEVICES = ("cpu", "cuda")


def autocast_now() -> Autocast:
    """Return what is on."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in _DEVICES if torch.is_autocast_enabled(kind))


@contextmanager
def computing_in(autocast: Autocast) -> Iterator[None]:
    """Compute as there, but for the cache of what was cast.

    A copy of a weight that was cast for a recording lies in its memory, where the next recording writes; and one that
    was cast before would be read for ever.
    """
    types = dict(autocast)
    with ExitStack() as stack:
        for kind in _DEVICES:
            if kind in types or torch.is_autocast_enabled(kind):
                way = torch.autocast(kind, dtype=types.get(kind), enabled=kind in types, cache_enabled=False)
                stack.enter_context(way)
        yield
