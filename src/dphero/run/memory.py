"""How much memory of a GPU a batch takes, and how much there is."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class CudaMemory:
    """What one batch after another takes of a GPU's memory, as torch's allocator counts it; nothing waits for the GPU.

    To measure from one batch to the next, ``torch.cuda.max_memory_allocated`` is set back at each.

    Attributes:
        room: How many bytes the batch could have taken when it began.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._before, self.room = device, 0, 0

    def begin(self) -> None:
        """A batch begins."""
        device = self._device
        self._before, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        free, all_of_it = torch.cuda.mem_get_info(device)
        allowed = torch.cuda.get_per_process_memory_fraction(device) * all_of_it
        self.room = int(min(free, allowed - reserved)) + reserved - self._before - _kept_by_recordings(device)
        torch.cuda.reset_peak_memory_stats(device)

    @property
    def peak(self) -> int:
        """The most bytes that were taken at a time since the batch began."""
        return torch.cuda.max_memory_allocated(self._device) - self._before


def _kept_by_recordings(device: torch.device) -> int:
    """Return how many bytes torch keeps for CUDA graphs: nothing else can use them."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if device.index in (None, segment["device"]) and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    )


def memory_of(parameters: Iterable[Tensor]) -> CudaMemory | None:
    """Return the memory in which a model is trained, if it is that of a GPU.

    Raises:
        ValueError: If it is that of several devices.
    """
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise ValueError(
            f'physical_batch_size="auto" goes by the memory of one device, and the model is on '
            f"{' and '.join(sorted(map(str, devices)))}: give a number of rows"
        )
    device = devices.pop()
    return CudaMemory(device) if device.type == "cuda" else None
