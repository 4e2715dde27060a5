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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

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


def run_on_torch_threads(work: _Work, threads: int) -> None:
    """Call ``work(0)``, ``work(1)``, … at the same time, each on a thread of its own, and wait for all.

    There are ``threads`` calls at most, and one at least: OpenMP may have fewer threads to spare. So whatever is to be
    done is taken by whoever is called. What torch computes in a call, it computes on that call's thread.

    Raises:
        BaseException: What a call raised first.
        KeyboardInterrupt: If the handler of a signal raised something where it could not be kept.
    """
    numbers, errors, ended = iter(range(threads)), list[BaseException](), list[int]()
    caller = threading.get_ident()

    def call(_: object = None) -> None:
        try:
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
