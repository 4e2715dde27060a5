"""Heat maps of CIFAR-10 under SGD, DP-SGD, DP-Hero and the published recipe: do they look at the same things?

python benchmarks/heatmaps.py --runs DIRECTORY [--seeds 3] [--out benchmarks/results/heatmaps]

Trains what is not there yet (LeNet-5, 5 epochs, ε = 8: about a minute of one core each; stopped, it goes on where it
was), then explains all runs by `dphero.explain`. All four trainings share lot, learning rate, momentum and epochs; the
private ones also the clip norm and the noise multiplier.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

METHODS = ("sgd", "dp-sgd", "dp-hero", "dp-hero-published")
EPOCHS, EPSILON = 5, 8.0
KEPT = "0,0.1,0.2,0.5,1,2,3,5"
SHARED = {"data": "cifar10", "model": "lenet", "lot": 500, "lr": 0.05, "momentum": 0.9, "epochs": EPOCHS, "clip": 1.0}


def train(runs: Path, seeds: int, at_once: int) -> list[Path]:
    """Train what is missing, seed by seed, each run in a process of its own, and return the directories of all."""
    wanted = [(method, seed) for seed in range(1, seeds + 1) for method in METHODS]
    runs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda each: _train(runs / f"{each[0]}-seed{each[1]}", *each), wanted))


def _train(path: Path, method: str, seed: int) -> Path:
    settings = [f"--resume={path}"]
    if not (path / "checkpoint.pt").exists():
        given = {**SHARED, "method": method, "seed": seed, "out": path, "keep-epochs": KEPT, "device": "cpu"}
        given |= {} if method == "sgd" else {"epsilon": EPSILON}
        settings = [f"--{name}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", "dphero.cli", "train", "--json", *settings]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(f"{path.name}: {done.stdout.strip()}", flush=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs that are trained at a time, one core each")
    arguments = parser.parse_args()
    train(arguments.runs, arguments.seeds, arguments.at_once)


if __name__ == "__main__":
    main()
