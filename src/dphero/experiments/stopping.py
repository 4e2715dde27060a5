"""How a training is asked to stop: Ctrl-C, SIGTERM, and SIGHUP when a terminal closes."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


class Interrupted(RuntimeError):
    """The run was asked to stop. It was saved first, and can be resumed."""


@contextmanager
def stoppable(unit: str = "step") -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into a request that the loop answers between two steps, after saving.

    The first Ctrl-C says what a second one does: it raises ``KeyboardInterrupt`` at once, and nothing is saved. Other
    signals may come as often as they like: a machine that shuts down sends several. A process that was told to ignore
    SIGHUP (``nohup``) goes on ignoring it.

    Args:
        unit: What the loop finishes before it stops.
    """
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and signal.SIGINT in asked:
            raise KeyboardInterrupt
        asked.append(number)
        if number == signal.SIGINT:
            logger.warning(
                "stopping after this %s, and saving; a second Ctrl-C stops at once and saves nothing: a resumed run "
                "then repeats what came after the checkpoint before",
                unit,
            )

    former: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                former[number] = signal.signal(number, ask)
    except ValueError:  # not the main thread: somebody else handles signals
        former = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
