"""What recording a model's passes would save, and what it takes: measured before it is done unasked."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the time that some work takes, and the part of it in which Python was busy to start it all."""
    _wait(device)
    start = time.perf_counter()
    work()
    issued = time.perf_counter() - start
    _wait(device)
    return time.perf_counter() - start, issued


def free_memory(device: torch.device) -> float:
    """Return how many bytes a device has left, once torch has given back what it does not use."""
    if device.type != "cuda":
        return float("inf")
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
