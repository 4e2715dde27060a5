"""What the guards around the mechanism cost in a training step, after the first batches.

    python benchmarks/guards.py --processes 3 --json benchmarks/results/guards-cpu.json

One engine trains; in each round it takes 10 steps with all guards and 10 steps without each of them (and without all),
in random order. A ratio is (with all guards / without) of one round; reported are its median and quartiles over the
rounds of all processes. The guards look at a batch in full at ever longer intervals: the rounds come after the first
200 steps. What is compared is the step as it stands with the guard's functions replaced by empty ones, so that work
which others share with a guard is not counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

import torch
from step import build

from dphero.checks.loss.check import LossCheck
from dphero.noise.fast import FastNoise
from dphero.sampling.randomness import SecretGenerators

GUARDS: dict[str, list[tuple[type, str, Any]]] = {
    "the loss is watched": [
        (LossCheck, "hand_out", lambda self, batch: None),
        (LossCheck, "enter", lambda self, *arguments: nullcontext()),
        (LossCheck, "watch", lambda self, output: output),
        (LossCheck, "back_propagated", lambda self: None),
    ],
    "random numbers are secret": [
        (SecretGenerators, "begin", lambda self, source: None),
        (SecretGenerators, "end", lambda self: None),
        (SecretGenerators, "hold", lambda self: None),
    ],
    "noise is bound to its sum": [(FastNoise, "_bind", lambda self, release, values: None)],
}
GUARDS["all of them"] = [each for guard in list(GUARDS.values()) for each in guard]


def measure(model: str, rows: int, warm_up: int, rounds: int) -> dict[str, list[float]]:
    """Return, for each guard, the ratios of the rounds."""
    step = build("isotropic", model, rows, "cpu", False)
    for _ in range(warm_up):
        step()
    ratios: dict[str, list[float]] = {name: [] for name in GUARDS}
    for _ in range(rounds):
        times = {}
        for name in random.sample([*GUARDS, ""], len(GUARDS) + 1):
            with ExitStack() as stack:
                for kind, function, empty in GUARDS.get(name, []):
                    stack.enter_context(patch.object(kind, function, empty))
                start = time.perf_counter()
                for _ in range(10):
                    step()
                times[name] = time.perf_counter() - start
        for name in GUARDS:
            ratios[name].append(times[""] / times[name])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lenet", "mlp", "cifar-cnn"])
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, 256, options.warm_up, options.rounds)))
        return
    results: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    results["processor"] = platform.processor() or platform.machine()
    for model in options.models:
        ratios: dict[str, list[float]] = {name: [] for name in GUARDS}
        for _ in range(options.processes):
            command = [sys.executable, __file__, "--child", model]
            command += ["--rounds", str(options.rounds), "--warm-up", str(options.warm_up)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for name, found in json.loads(printed.splitlines()[-1]).items():
                ratios[name] += found
        results[model] = {}
        for name, found in ratios.items():
            low, middle, high = statistics.quantiles(found, n=4)
            results[model][name] = {"ratio": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}
            print(f"{model:10s} {name:28s} {middle:.4f}  quartiles [{low:.4f}, {high:.4f}]  rounds {len(found)}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
