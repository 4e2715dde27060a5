"""The runs of a sweep as tasks of a Ray cluster (``pip install 'dphero[ray]'``)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dphero.experiments.comparison.worker import train_run

if TYPE_CHECKING:
    from dphero.experiments.comparison.plan import Planned
    from dphero.experiments.comparison.sweep import State


_CONNECT_SECONDS = 10
_OBJECT_STORE_BYTES = 100 << 20  # tasks exchange names and errors; Ray would take a third of the memory


def _require_answer(address: str) -> None:
    """Try to reach ``host:port`` or ``ray://host:port``: Ray itself tries again and again, for many minutes.

    Raises:
        ValueError: If nothing answers there.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # a word, such as "local" or "auto"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"no Ray cluster answers at {address!r}: {error}") from error


class RayPool:
    """Hands each run to Ray as one task.

    Args:
        state: What is to be done.
        address: Of the cluster; ``"local"`` starts one on this machine, for the time of the sweep.
        workers: The most tasks at a time; as many as the cluster has room for unless given.

    Raises:
        ValueError: If Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, state: State, address: str, workers: int | None) -> None:
        try:
            import ray
        except ImportError as error:
            raise ValueError(f"--ray needs Ray, which is not installed ({error}): pip install 'dphero[ray]'") from error
        self._ray, self._state = ray, state
        local = address == "local"
        _require_answer(address)
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                **({"object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False} if local else {}),
            )
        except Exception as error:  # Ray raises many kinds
            raise ValueError(f"no Ray cluster answers at {address!r}: {' '.join(str(error).split())[:300]}") from error
        self._room = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        gpus = ray.cluster_resources().get("GPU", 0)
        # one core each; GPUs are shared by four
        self._task = ray.remote(num_cpus=1, num_gpus=0.25 if gpus else 0, max_retries=0)(train_run)

    def run(self, asked_to_stop: Callable[[], bool]) -> None:
        """Work until nothing is left, or until asked to stop."""
        state, tasks = self._state, dict[Any, "Planned"]()
        try:
            while tasks or (state.waiting and not state.stopping):
                if asked_to_stop() and not state.stopping:
                    state.stopping = True
                    for task in tasks:
                        self._ray.cancel(task)  # arrives as a Ctrl-C: the run saves, and stops
                while state.waiting and len(tasks) < self._room and not state.stopping:
                    planned = state.begin()
                    task = self._task.remote(str(state.path(planned)), planned.recipe.as_dict())
                    tasks[task] = planned
                ended, _ = self._ray.wait(list(tasks), timeout=0.5) if tasks else ([], None)
                for task in ended:
                    state.end(tasks.pop(task), self._answer(task))
                state.report()
        finally:
            self._ray.shutdown()
        if state.stopping:
            raise state.interrupted()

    def _answer(self, task: Any) -> Mapping[str, Any]:
        try:
            return self._ray.get(task)
        except self._ray.exceptions.TaskCancelledError:
            return {"kind": "stopped"}
        except self._ray.exceptions.RayError as error:  # the worker died, or its machine
            return {"kind": "failed", "error": f"Ray: {' '.join(str(error).split())[-400:]}"}
