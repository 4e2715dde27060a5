"""How a command shows that it works: bars on a terminal, now and then a plain line in a pipe or a log. On stderr."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from dphero.cli._console import console, say

_LINE_SECONDS = 10.0  # between two lines where there is no terminal
_NARROW, _SHORT_BAR, _LONG_BAR = 100, 12, 20
_TIME = len("10:00:00 left")


class ProgressDisplay:
    """Shows one piece of work with its counter, figures and time left; smaller pieces in bars of their own below.

    On a terminal these are bars, and figures that do not fit its width are left out, the last ones first. Anywhere
    else, a line is written at the first count, at the last, and at most every ten seconds between.

    Args:
        first: What is done until the first :meth:`update`.
        speed_seconds: The time over which the speed is averaged.
    """

    def __init__(self, first: str, *, speed_seconds: float = 30.0) -> None:
        self._screen = console(stderr=True)
        self._plain = not self._screen.is_terminal
        bar_width = _SHORT_BAR if self._screen.width < _NARROW else _LONG_BAR
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=bar_width),
            _Counter(),
            _Figures(self._screen.width - bar_width),
            _Time(),
            console=self._screen,
            disable=self._plain,
            speed_estimate_period=speed_seconds,
        )
        self._main = self._bars.add_task(first, total=None, figures=(), counter=None)
        self._parts: dict[str, Any] = {}
        self._last_line, self._unwritten = -_LINE_SECONDS, False

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def update(
        self,
        what: str,
        done: float | None = None,
        total: float | None = None,
        figures: Sequence[str] = (),
        counter: str | None = None,
    ) -> None:
        """Show where the work stands.

        Args:
            what: What is being done.
            done: How much of it.
            total: Of how much; ``None`` if that is not known.
            figures: What else is worth seeing, the most important first.
            counter: How far it is, in words; ``done/total`` unless given.
        """
        if what != self._task(self._main).description:
            self._write_line()
        self._set(self._main, what, done, total, figures, counter)
        if self._plain and total is not None:
            self._unwritten = True
            finished = done is not None and done >= total  # figures of the end may follow: written when it is over
            if not finished and time.monotonic() - self._last_line >= _LINE_SECONDS:
                self._write_line()

    def update_part(self, name: str, done: float | None, total: float | None, figures: Sequence[str] = ()) -> None:
        """Show where a smaller piece of the work stands; on a terminal only."""
        if self._plain:
            return
        if name not in self._parts:
            self._parts[name] = self._bars.add_task(name, total=None, figures=(), counter=None)
        self._set(self._parts[name], f"  {name}", done, total, figures)

    def keep_parts(self, names: Sequence[str]) -> None:
        """Show no longer the pieces that are not among ``names``."""
        for name in set(self._parts) - set(names):
            self._bars.remove_task(self._parts.pop(name))

    def say(self, line: str) -> None:
        """Write a line that stays."""
        if self._plain:
            say(line)
        else:
            self._bars.console.print(line)

    def stop(self) -> None:
        """Show no more. Work of which no count was ever shown leaves nothing behind."""
        self._write_line()
        if self._task(self._main).total is None:
            self._bars.update(self._main, visible=False)
        self._bars.stop()

    def _set(
        self,
        number: Any,
        what: str,
        done: float | None,
        total: float | None,
        figures: Sequence[str],
        counter: str | None = None,
    ) -> None:
        task = self._task(number)
        if total is not None and (task.total is None or task.description != what):
            self._bars.reset(number, total=total)  # other work: its time is counted from here
        task.total = total
        self._bars.update(number, description=what, completed=done, figures=tuple(figures), counter=counter)

    def _task(self, number: Any) -> Task:
        return next(task for task in self._bars.tasks if task.id == number)

    def _write_line(self) -> None:
        """Write where the work stands, if that was not written yet."""
        if not self._unwritten:
            return
        task = self._task(self._main)
        parts = (f"{task.description} {_counter(task)}".strip(), *task.fields["figures"], _time(task))
        say("  ".join(part for part in parts if part))
        self._last_line, self._unwritten = time.monotonic(), False


class _Counter(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_counter(task), style="progress.download")


class _Figures(ProgressColumn):
    """As many figures as the line has room for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def render(self, task: Task) -> Text:
        left = self._width - len(task.description) - len(_counter(task)) - _TIME - 4
        shown: list[str] = []
        for figure in task.fields["figures"]:
            if len("  ".join([*shown, figure])) > left:
                break
            shown.append(figure)
        return Text("  ".join(shown))


class _Time(ProgressColumn):
    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text(_time(task), style="progress.remaining")


def _counter(task: Task) -> str:
    if task.fields["counter"] is not None or task.total is None:
        return task.fields["counter"] or ""
    return f"{task.completed:,.0f}/{task.total:,.0f}"


def _time(task: Task) -> str:
    """The time that is left, or that all of it took."""
    if task.finished:
        return f"took {_clock(task.finished_time or 0)}"
    left = task.time_remaining if task.total is not None else None
    return "" if left is None else f"{_clock(left)} left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
