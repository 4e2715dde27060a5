"""What all parts of the fuzzer share: time limits, and the log."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


class Hang(BaseException):
    """The time is up. No exception of the usual kind: nobody may catch it by accident."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise :class:`Hang` if the block takes longer."""

    def stop(*_: Any) -> None:
        raise Hang(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Findings:
    """How many cases ended in which way, and everything that should not have happened."""

    part: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def note(self, outcome: str) -> None:
        """Count a case that ended as it should."""
        self.counts[outcome] += 1

    def fault(self, kind: str, case: str, detail: object) -> None:
        """Keep a case that did not."""
        self.counts[kind] += 1
        self.faults.append(f"{kind}: {case}: {' '.join(str(detail).split())[:400]}")

    @property
    def cases(self) -> int:
        """How many there were."""
        return sum(self.counts.values())

    def summary(self) -> str:
        """One line for the log."""
        figures = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        minutes = (time.monotonic() - self.started) / 60
        return f"{self.part}: {self.cases} cases in {minutes:.1f} min: {figures}; {len(self.faults)} faults"


def attempt(call: Callable[[], Any], seconds: int) -> tuple[Any, BaseException | None]:
    """Return what the call returns, or what it raises; a hang is what it raises."""
    try:
        with within(seconds):
            return call(), None
    except (Exception, Hang, SystemExit) as error:
        return None, error
