"""Where the time of a training run goes: the share that is spent inside the training step.

    python benchmarks/profile_train.py [--data mnist] [--model lenet] [--lot 256] [--steps 400] [--json FILE]

The run is an ordinary one (`dphero.experiments.train`): it draws lots, evaluates, prices, and writes its files. The
step is what any training pays for: forward pass, backward pass, release, optimizer. Everything else is overhead: the
drawing and gathering of lots, progress, evaluation, files. Loading of libraries and data is not counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch
import torch.utils.tensorboard  # loaded here, so that loading it is not counted

from dphero import data as datasets
from dphero.experiments import RunDirectory, resolve, train
from dphero.experiments.runs import training as loop
from dphero.methods.trainers.engine_trainer import PrivateTrainer


class Stopwatch:
    """Adds up the time spent in a method."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds = 0.0
        inner = getattr(owner, name)

        def timed(*arguments, **options):
            started = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - started

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--lot", type=int, default=256)
    parser.add_argument("--steps", type=int, default=936, help="four epochs of MNIST at lot 256")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    data = datasets.load(arguments.data)
    advance = Stopwatch(PrivateTrainer, "advance")
    drawing = Stopwatch(PrivateTrainer, "_next")
    evaluating = Stopwatch(loop.Evaluation, "accuracy")
    pricing = Stopwatch(PrivateTrainer, "price")
    saving = Stopwatch(PrivateTrainer, "save")
    running = Stopwatch(loop._Loop, "run")
    epochs = arguments.steps * arguments.lot / len(data.train.labels)
    settings = {"data": arguments.data, "model": arguments.model, "lot": arguments.lot, "epochs": epochs}
    with tempfile.TemporaryDirectory() as folder:
        recipe = resolve({**settings, "noise_multiplier": 1.1, "seed": 0})
        train(RunDirectory.create(Path(folder) / "run", recipe), data=data)
    step = advance.seconds - drawing.seconds
    record = {
        **settings,
        "steps": arguments.steps,
        "share_in_step": round(step / running.seconds, 4),
        "seconds": {
            "all": round(running.seconds, 3),
            "step": round(step, 3),
            "drawing lots": round(drawing.seconds, 3),
            "evaluation": round(evaluating.seconds, 3),
            "pricing": round(pricing.seconds, 3),
            "checkpoints": round(saving.seconds, 3),
        },
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    print(json.dumps(record, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
