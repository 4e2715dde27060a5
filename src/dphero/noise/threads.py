"""Python work on torch's own threads.

torch's OpenMP threads stay awake for many milliseconds after their work, in case there is more. Threads of ours would
take turns with them on the cores that both want: for noise after a matrix product, two of ours were no faster than one.
So the work goes to those threads themselves, through the function that compilers call to enter an OpenMP region. Where
torch brings no OpenMP of that interface, and in a forked process, whose copy of OpenMP has lost its threads, the
threads are our own.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["overlap", "run_on_torch_threads"]

_Work = Callable[[int], None]


def _openmp() -> Any:
    """Return ``GOMP_parallel(function, data, threads, flags)`` of the OpenMP that torch runs on, or ``None``."""
    try:
        enter = ctypes.CDLL(torch._C.__file__).GOMP_parallel  # found among the libraries that torch is linked with
    except (AttributeError, OSError):
        return None
    enter.argtypes, enter.restype = [_FUNCTION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return enter


_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_enter_region = _openmp()


def _after_fork() -> None:
    global _enter_region
    _enter_region = None


if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(after_in_child=_after_fork)


class _Waiting(threading.local):
    """What this thread does alongside the next team that it calls together."""

    work: Callable[[], None] | None = None

    def take(self) -> Callable[[], None] | None:
        """Return the work, which then is no longer waiting."""
        work, self.work = self.work, None
        return work


_waiting = _Waiting()


@contextmanager
def overlap(work: Callable[[], None] | None) -> Iterator[None]:
    """Do what is in the block, and ``work`` (if any) on this thread while the first team called there does its own.

    Where none is called, the work is done at the end. For what consists of many small operations, during which other
    threads would have nothing to do.
    """
    if work is None:
        yield
        return
    _waiting.work = work
    try:
        yield
    except BaseException:
        _waiting.take()
        raise
    left = _waiting.take()
    if left is not None:
        left()


def run_on_torch_threads(work: _Work, threads: int) -> None:
    """Call ``work(0)``, ``work(1)``, … at the same time, each on a thread of its own, and wait for all.

    There are ``threads`` calls at most, and one at least: OpenMP may have fewer threads to spare. So whatever is to be
    done is taken by whoever is called. What torch computes in a call, it computes on that call's thread.

    Raises:
        BaseException: What a call raised first.
        KeyboardInterrupt: If the handler of a signal raised something where it could not be kept.
    """
    numbers, errors, ended = iter(range(threads)), list[BaseException](), list[int]()
    own, caller = _waiting.take(), threading.get_ident()
    if own is not None:  # then one thread more can be of use
        threads = max(threads, min(threads + 1, torch.get_num_threads()))

    def call(_: object = None) -> None:
        try:
            if own is not None and threading.get_ident() == caller:
                _alone(own)
            number = next(numbers, None)
            if number is not None:
                work(number)
        except BaseException as error:  # nobody above this frame is Python
            errors.append(error)
        ended.append(threading.get_ident())

    if threads > 1 and _enter_region is not None:
        _enter_region(_FUNCTION(call), None, threads, 0)
    else:
        _apart(call, threads)
    if errors:
        raise errors[0]
    if caller not in ended:  # a signal came before the first line above; C has nowhere to put what its handler raises
        raise KeyboardInterrupt


def _alone(work: Callable[[], None]) -> None:
    """Call on this thread, with no others: LAPACK would ask for some of its own, and wait for those that are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work()
    finally:
        torch.set_num_threads(before)


def _apart(call: Callable[[], None], threads: int) -> None:
    """Call on this thread and on new ones. In a region torch keeps to the thread it is called on; here it is told."""
    before = torch.get_num_threads()
    if before > 1:
        torch.set_num_threads(1)  # of this thread, and of those that are new to torch
    try:
        if threads == 1:
            call()
        else:
            with ThreadPoolExecutor(threads - 1, thread_name_prefix="dphero-noise") as pool:
                for _ in range(threads - 1):
                    pool.submit(call)
                call()
    finally:
        if before > 1:
            torch.set_num_threads(before)
