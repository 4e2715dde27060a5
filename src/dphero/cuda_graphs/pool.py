"""The memory of recordings, how one is made so that a failure leaves nothing behind, and what it takes and saves."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Pool:
    """Memory and stream of recordings of which never two are under way: they may lie in the same places.

    A recording takes places that no tensor holds when it is made, whatever earlier ones do there when they are
    replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        # one of its own: what libraries keep for a stream lies in the memory of the first recording made there
        self.stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record what ``work`` does on the GPU; return what does it again, and results that stay where they are.

        Raises:
            RuntimeError: If it cannot be recorded, because it waits for the GPU, say.
        """
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on meanwhile (one that pins memory for a loader, say).
        way = torch.cuda.graph(graph, pool=self.handle, stream=self.stream, capture_error_mode="thread_local")
        with _no_collection(), torch.cuda.device(self.device), _left_as_it_was(self.device), way, _no_waiting():
            result = work()

        index: Any = self.device if self.device.index is None else self.device.index  # of a number torch asks nothing

        def replay() -> None:
            with torch.cuda.device(index):
                graph.replay()

        return replay, result


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage where it is: to free an earlier recording that lies in it would spoil the one made now."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Let torch refuse to wait for the GPU: the GPU itself would refuse too, and break off the recording."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch does not notice everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _left_as_it_was(device: torch.device) -> Iterator[None]:
    """After a recording that broke off, go back to the stream before, and let random numbers be drawn again."""
    before = torch.cuda.current_stream(device)
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(before)
        torch.cuda.synchronize(device)
        generator = torch.cuda.default_generators[before.device_index]
        state = generator.get_state()
        try:
            torch.empty(1, device=device).uniform_()
            generator.set_state(state)
        except RuntimeError:  # it still counts what is drawn as part of the recording
            generator.graphsafe_set_state(generator.clone_state())
        raise


def seconds(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the time that some work takes, and the part of it in which Python was busy to start it all."""
    _wait(device)
    start = time.perf_counter()
    work()
    issued = time.perf_counter() - start
    _wait(device)
    return time.perf_counter() - start, issued


def give_back() -> None:
    """Let torch give back what it does not use: recordings that are gone, too."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> float:
    """Return how many bytes a device has left, once torch has given back what it does not use."""
    if device.type != "cuda":
        return float("inf")
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
