"""Worker processes that share this machine's cores and GPU."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dphero._files import open_for_append

if TYPE_CHECKING:
    from dphero.experiments.comparison.plan import Planned
    from dphero.experiments.comparison.sweep import State


_TAIL = 400  # characters of a log that an error shows


def default_workers(device: str = "auto") -> int:
    """Return how many runs go at once: one for two cores; up to four on a GPU, which they share."""
    pairs = max(1, _cores() // 2)
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return min(4, pairs) if on_gpu else pairs


class _Worker:
    """A worker process, and the run that it has in hand."""

    def __init__(self, log: Path, threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with open(open_for_append(log), "ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dphero.experiments.comparison.worker"],  # a queue.py here is not Python's
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # a Ctrl-C is ours to pass on: two signals would mean haste
            )
        self.planned: Planned | None = None
        self._rest = b""

    def order(self, planned: Planned, path: Path) -> None:
        """Hand it a run."""
        self.planned = planned
        assert self.process.stdin is not None
        line = json.dumps({"run": str(path), "recipe": planned.recipe.as_dict()})
        with suppress(BrokenPipeError):  # it died; the end of its output says so, too
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def hear(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages that came, and whether more can come."""
        assert self.process.stdout is not None
        chunk = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [json.loads(line) for line in lines], bool(chunk)

    def close(self) -> None:
        """Have no more orders for it, and hear no more of it: it ends when it has nothing in hand."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


class Pool:
    """Processes that each train one run at a time.

    Args:
        state: What is to be done.
        size: How many processes.
    """

    def __init__(self, state: State, size: int) -> None:
        self._state, self._size = state, size
        self._threads = threads_each(size)
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._log = state.directory / "workers.log"

    def run(self, asked_to_stop: Callable[[], bool]) -> None:
        """Work until nothing is left, or until asked to stop."""
        state = self._state
        try:
            while state.running or (state.waiting and not state.stopping):
                if asked_to_stop() and not state.stopping:
                    state.stopping = True
                    self._signal(signal.SIGTERM)
                if not state.stopping:
                    self._employ()
                for key, _ in self._selector.select(timeout=0.2):
                    self._hear(key.data)
                state.report()
        finally:
            self._dismiss()
        if state.stopping:
            raise state.interrupted()

    def _employ(self) -> None:
        """Give every worker something to do, as long as there is something."""
        while self._state.waiting:
            worker = next((worker for worker in self._workers if worker.planned is None), None)
            if worker is None:
                if len(self._workers) == self._size:
                    return
                worker = _Worker(self._log, self._threads)
                self._workers.append(worker)
                self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
            planned = self._state.begin()
            worker.order(planned, self._state.path(planned))

    def _hear(self, worker: _Worker) -> None:
        messages, alive = worker.hear()
        for message in messages:
            assert worker.planned is not None
            if message["kind"] == "progress":
                self._state.running[worker.planned.name] = message
            else:
                self._state.end(worker.planned, message)
                worker.planned = None
                alive = alive and message["kind"] != "stopped" and not message.get("tired")
        if not alive:
            self._bury(worker)

    def _bury(self, worker: _Worker) -> None:
        """Let go of a worker that ended, or is about to; if it had a run in hand, that has failed.

        Unless it was told to stop, and a signal ended it before it could answer: then the run waits, as it was saved.
        """
        self._selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        self._workers.remove(worker)
        worker.close()
        status = worker.process.wait()
        if worker.planned is None:
            return
        if self._state.stopping and status < 0:
            self._state.end(worker.planned, {"kind": "stopped"})
        else:
            error = self._epitaph(self._state.path(worker.planned) / "log.txt", status)
            self._state.end(worker.planned, {"kind": "failed", "error": error})

    def _epitaph(self, log: Path, status: int) -> str:
        """Say how a process died, with the last it said."""
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if status == -signal.SIGKILL:
            how += " (out of memory?)"
        for path in (log, self._log):
            if path.exists() and (said := path.read_text(encoding="utf-8", errors="replace").strip()):
                return f"its process {how}; the last it said: …{' '.join(said[-_TAIL:].split())}"
        return f"its process {how}"

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            worker.process.send_signal(number)

    def _dismiss(self) -> None:
        """End all processes: those without work by themselves, the others (only after a second Ctrl-C) at once."""
        for worker in self._workers:
            if worker.planned is not None:
                worker.process.kill()
            worker.close()
        for worker in self._workers:
            worker.process.wait()
        self._selector.close()
        if self._log.exists() and not self._log.stat().st_size:
            self._log.unlink()


def threads_each(workers: int) -> int:
    """Return how many threads each worker may use: its share of the cores, or fewer if OMP_NUM_THREADS says so."""
    share, given = max(1, _cores() // workers), os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(given)) if given.isdecimal() and int(given) else share


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
