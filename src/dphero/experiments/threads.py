"""How many CPU threads a run uses: one where the work of a lot is too small to share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

_WORTH_SHARING = 5e7  # multiply-adds of a forward pass over one lot: a step of some 30 ms on one core


def work(module: nn.Module, example: Tensor, lot: int) -> float:
    """Return the multiply-adds of one forward pass over a lot; infinity if the network does not take the example.

    Args:
        module: The network.
        example: One input, as a batch.
        lot: Examples in a lot.
    """
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(example)
    except Exception:  # the checks of the first batch say better what is wrong
        return math.inf
    finally:
        module.train(training)
    return lot * counter.get_total_flops() / 2


def threads_for(work: float, cores: int) -> int:
    """Return how many threads to use. It depends on the size alone: a resumed run computes as the first part did."""
    return 1 if work < _WORTH_SHARING else cores


@contextmanager
def threads_by_size(module: nn.Module, example: Tensor, lot: int) -> Iterator[None]:
    """Use one thread meanwhile if the lot is small: threads that wait for each other cost more than they save."""
    before = torch.get_num_threads()
    if example.is_cpu and before > 1:
        torch.set_num_threads(threads_for(work(module, example, lot), before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
