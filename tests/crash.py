"""A training run that is killed (see test_checkpoint)."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer would import it: a second in each process
import torch.nn.functional as F
from torch import nn

from dphero.guidance import History
from tests.trainer import network, training

STEPS, SAVE_EVERY = 20, 4


def die() -> None:
    """Stop as hard as a process can."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(path: Path, how: str) -> None:
    """Train, saving every few steps; resume where the file left off.

    How: "run", "slowly", "die-in-training" or "die-in-saving".
    """
    torch.manual_seed(1)
    run = training(
        network(0, nn.Dropout(0.2)),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.05),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
        guidance=History(refresh_every=3),
        clipping="adaptive",
        physical_batch_size=5,
    )
    if path.exists():
        run.engine.load(path, scheduler=run.scheduler)
    first = run.engine.steps
    while run.engine.steps < STEPS:
        run.steps(1)
        if how == "slowly":
            time.sleep(0.01)
        if how == "die-in-training" and run.engine.steps == first + 6:
            for x, y in run.loader:  # in the middle of a lot
                F.cross_entropy(run.module(x), y).backward()
                die()
        if run.engine.steps % SAVE_EVERY == 0:
            if how == "die-in-saving" and run.engine.steps == first + 2 * SAVE_EVERY:
                _die_in_saving()
            run.engine.save(path, scheduler=run.scheduler)
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in run.weights().values())).hexdigest()
    price = run.engine.get_epsilon(1e-5, accountant="rdp")
    result = f"{digest}, {run.engine.ledger.steps} releases, epsilon {price}, next lot {run.loader.lots.next}"
    path.with_suffix(".txt").write_text(result)


def _die_in_saving() -> None:
    """Have the next checkpoint stop half-way, when it is to be flushed to disk."""

    def half(descriptor: int) -> None:
        os.truncate(descriptor, os.fstat(descriptor).st_size // 2)
        die()

    os.fsync = half  # type: ignore[assignment]
