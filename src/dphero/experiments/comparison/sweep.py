"""Many runs at once: worker processes on this machine, or tasks on a Ray cluster.

The plan is written first. Every run is an ordinary run directory under ``runs/``, so whatever happens to this process
or to a worker, the next sweep of the same plan keeps what is finished and goes on with the rest.
"""

from __future__ import annotations

import fcntl
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from dphero._checks import whole
from dphero._files import DamagedFile, open_for_lock
from dphero.experiments.comparison.plan import Planned, save_plan
from dphero.experiments.comparison.pool import Pool, default_workers
from dphero.experiments.runs.rundir import RunDirectory
from dphero.experiments.stopping import Interrupted, stoppable

_RESULT = ("accuracy", "epsilon", "steps", "seconds", "is_bound", "accountant", "other_prices")  # what tables show


@dataclass(frozen=True)
class Outcome:
    """What became of a planned run.

    Attributes:
        planned: The run.
        path: Its directory.
        result: What ``result.json`` says; ``None`` if it is not finished.
        error: Why it failed, if it did.
    """

    planned: Planned
    path: Path
    result: Mapping[str, Any] | None = None
    error: str | None = None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The evaluations during the run."""
        return RunDirectory(self.path, self.planned.recipe).metrics


@dataclass(frozen=True)
class Standing:
    """Where a sweep stands.

    Attributes:
        runs: How many runs there are.
        done: Names of those that are finished.
        failed: Errors by the name of the run.
        running: What is known of each run at work: ``step``, ``steps``, ``accuracy``, … once it takes steps.
    """

    runs: int
    done: Sequence[str]
    failed: Mapping[str, str]
    running: Mapping[str, Mapping[str, Any]]

    @property
    def completed(self) -> float:
        """Runs that came to an end, and the fractions of those at work."""
        parts = (state["step"] / state["steps"] for state in self.running.values() if state.get("steps"))
        return len(self.done) + len(self.failed) + sum(parts)


Report = Callable[[Standing], None]


def sweep(
    plan: Sequence[Planned],
    directory: str | PathLike[str],
    *,
    workers: int | None = None,
    ray: str | None = None,
    report: Report = lambda standing: None,
) -> list[Outcome]:
    """Train all runs of a plan that are not finished yet, and return what became of each.

    A run that fails, or whose process dies, leaves the others alone. Started again with the same plan, runs that were
    finished are kept, those in the middle go on from their checkpoint, and those that failed are tried again.

    Args:
        plan: The runs.
        directory: Where ``plan.json`` and ``runs/`` are or will be.
        workers: How many processes; by cores and GPU unless given.
        ray: The address of a Ray cluster to use instead, ``"local"`` for one of this machine's own. All its
            machines must see ``directory``.
        report: Told where things stand, several times a second.

    Raises:
        ValueError: If the directory holds another plan, or somebody else works on it.
        OSError: If it cannot be written.
        Interrupted: If the process was asked to stop (Ctrl-C, SIGTERM). All runs were saved.
    """
    if not plan:
        raise ValueError("the plan has no runs")
    if workers is not None:
        whole("workers", workers)
    directory = Path(directory).absolute()
    save_plan(directory, plan)
    for path in (directory / "runs", *(directory / "runs" / planned.name for planned in plan)):
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link, and runs are not written elsewhere: put a directory there")
    with _locked(directory), stoppable() as asked_to_stop:
        state = State(plan, directory, report)
        if state.waiting:
            if ray is None:
                device = plan[0].recipe.device
                pool: Any = Pool(state, min(workers or default_workers(device), len(state.waiting)))
            else:
                from dphero.experiments.comparison.ray_tasks import RayPool

                pool = RayPool(state, ray, workers)
            pool.run(asked_to_stop)
    return outcomes(plan, directory, state.failed)


def outcomes(plan: Sequence[Planned], directory: Path, errors: Mapping[str, str] | None = None) -> list[Outcome]:
    """Return what a sweep's directory holds of each run; one that has a result has not failed, however it ended."""
    found = []
    for planned in plan:
        path = directory / "runs" / planned.name
        result = RunDirectory(path, planned.recipe).result
        if result is not None and (missing := [name for name in _RESULT if name not in result]):
            raise DamagedFile(path / "result.json", f"it lacks {', '.join(missing)}")
        error = (errors or {}).get(planned.name) if result is None else None
        found.append(Outcome(planned, path, result, error))
    return found


class State:
    """What is left to do, what is done, and what went wrong."""

    def __init__(self, plan: Sequence[Planned], directory: Path, report: Report) -> None:
        self.directory, self._report, self._runs = directory, report, len(plan)
        self.waiting: deque[Planned] = deque()
        self.done: list[str] = []
        self.failed: dict[str, str] = {}
        self.running: dict[str, Mapping[str, Any]] = {}
        self.stopping = False  # set when the workers are told to save and stop: then no new run begins
        for outcome in outcomes(plan, directory):
            if outcome.result is None:
                self.waiting.append(outcome.planned)
            else:
                self.done.append(outcome.planned.name)

    def path(self, planned: Planned) -> Path:
        """The run's directory."""
        return self.directory / "runs" / planned.name

    def begin(self) -> Planned:
        """Take the next run."""
        planned = self.waiting.popleft()
        self.running[planned.name] = {}
        return planned

    def end(self, planned: Planned, answer: Mapping[str, Any]) -> None:
        """Note a run's last message."""
        del self.running[planned.name]
        if answer["kind"] == "done" or (self.path(planned) / "result.json").exists():  # its last act: then it is done
            self.done.append(planned.name)
        elif answer["kind"] == "failed":
            self.failed[planned.name] = answer["error"]
        elif self.stopping:  # saved, as it was told to: it waits for a resumption
            self.waiting.appendleft(planned)
        else:
            self.failed[planned.name] = "it was stopped from outside, and saved"

    def report(self) -> None:
        """Tell where things stand."""
        self._report(Standing(self._runs, tuple(self.done), dict(self.failed), dict(self.running)))

    def interrupted(self) -> Interrupted:
        """The exception that says how far it came."""
        return Interrupted(f"stopped with {len(self.done)} of {self._runs} runs finished; the others were saved")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep a second sweep away from the same directory."""
    with open(open_for_lock(directory / ".lock"), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process works on the comparison in {directory} at this moment") from None
        yield
