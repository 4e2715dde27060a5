"""Trainings of all methods, killed (kill -9) at random moments and resumed: do they end as the unbroken run does?

    python benchmarks/kills.py [--kills 100] [--seed 0] [--methods dp-hero,sgd] [--json FILE]

For each method one run is trained in peace. Then runs of the same recipe are killed one to three times, at moments
drawn at random over the time that is left, and resumed; every process is a fork of this one, so it begins with the
training, not with importing torch. Half of the runs save after every step, so that many kills hit a write; the others
every fifth of a second, so that steps have to be taken again. Every second run of a method gets a SIGTERM first.
Compared are, byte by byte, the weights, the ledger and the statement, and metrics and result but for times.
Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.utils.tensorboard  # loaded here, so that no fork has to

from dphero import data as datasets
from dphero.experiments import Interrupted, RunDirectory, resolve, train
from dphero.methods import METHODS

SETTINGS: dict[str, Any] = {
    "data": "digits", "model": "mlp", "noise_multiplier": 3.0, "epochs": 10, "seed": 1, "evaluate_every": 4,
}  # fmt: skip
OF_METHODS: dict[str, dict[str, Any]] = {
    "dp-randp": {"options": {"pretrain_steps": 8, "pretrain_batch": 8}, "model": "digits"},
    "projected": {"options": {"examples": 40, "directions": 10}},
    "dp-hero-published": {"options": {"floor": 0.1}},
    "feature-dp": {"model": "scatter-linear"},
    "label-dp": {"noise_multiplier": None, "epsilon": 2.0},
    "geoclip": {"epochs": 4, "model": "digits"},
}
SAME = ("model.safetensors", "model.json", "ledger.json", "statement.txt", "statement.json")


def recipe_of(method: str) -> Any:
    """The recipe of a method: ordinary settings of `digits`, made short."""
    chosen = {**SETTINGS, "method": method, **OF_METHODS.get(method, {})}
    return resolve({name: value for name, value in chosen.items() if value is not None})


def begin(path: Path, data: Any, save_seconds: float) -> int:
    """Train, or go on, in a process of its own; return its number."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        with open(path.parent / f"{path.name}.log", "a") as log:
            os.dup2(log.fileno(), 2)
            try:
                train(RunDirectory.open(path), data=data, save_seconds=save_seconds)
                status = 0
            except Interrupted:
                status = 130
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(status)


def finish(process: int) -> int:
    """Wait for a process; return its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def outcome(path: Path) -> dict[str, Any]:
    """What a run left, but for times and places."""
    directory = RunDirectory.open(path)
    result = directory.result
    assert result is not None, f"{path} is not finished"
    found: dict[str, Any] = {name: (path / name).read_bytes() for name in SAME}
    found["metrics"] = [{name: line[name] for name in line if name != "seconds"} for line in directory.metrics]
    found["result"] = {name: result[name] for name in result if name not in ("seconds", "run")}
    return found


def broken(path: Path, data: Any, seconds: float, chance: random.Random, orderly: bool) -> dict[str, int]:
    """Train a run that is killed on the way; return how often, and how."""
    save_seconds = chance.choice([0.0, 0.2])
    counts = {"kills": 0, "orderly": 0}
    for number in range(chance.randint(1, 3)):
        process = begin(path, data, save_seconds)
        time.sleep(chance.random() * seconds / (number + 1))
        polite = orderly and number == 0
        os.kill(
            process, signal.SIGTERM if polite else signal.SIGKILL
        )  # it is not waited for yet: the number is its own
        status = finish(process)
        if status == 0:  # it had finished before
            return counts
        if status == -signal.SIGKILL:
            counts["kills"] += 1
        elif status in (130, -signal.SIGTERM):
            counts["orderly"] += 1
        else:
            raise RuntimeError((path.parent / f"{path.name}.log").read_text()[-2000:])
    status = finish(begin(path, data, save_seconds))
    if status:
        raise RuntimeError((path.parent / f"{path.name}.log").read_text()[-2000:])
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="at least as many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default=",".join(sorted(METHODS)))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # forks have no threads of their parent's
    chance, data = random.Random(arguments.seed), datasets.load("digits")
    methods = arguments.methods.split(",")
    totals: dict[str, dict[str, int]] = {}
    different: list[str] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DPHERO_DATA"] = folder
        whole: dict[str, tuple[dict[str, Any], float]] = {}
        for method in methods:
            path = Path(folder) / method
            RunDirectory.create(path, recipe_of(method))
            before = time.monotonic()
            if finish(begin(path, data, 0.2)):
                sys.exit((path.parent / f"{path.name}.log").read_text())
            whole[method] = outcome(path), time.monotonic() - before
            totals[method] = {"runs": 0, "kills": 0, "orderly": 0, "different": 0}
        number = 0
        while sum(each["kills"] for each in totals.values()) < arguments.kills:
            method = methods[number % len(methods)]
            path = Path(folder) / f"{method}-{number}"
            RunDirectory.create(path, recipe_of(method))
            expected, seconds = whole[method]
            counts = broken(path, data, seconds, chance, orderly=(number // len(methods)) % 2 == 1)
            found = outcome(path)
            wrong = [name for name in expected if found[name] != expected[name]]
            total = totals[method]
            total["runs"] += 1
            total["different"] += bool(wrong)
            for name, count in counts.items():
                total[name] += count
            if wrong:
                different.append(f"{path.name}: {', '.join(wrong)}")
            number += 1
    print(f"{'method':20} {'runs':>5} {'kill -9':>8} {'SIGTERM':>8} {'different':>10}")
    for method, total in totals.items():
        print(f"{method:20} {total['runs']:5} {total['kills']:8} {total['orderly']:8} {total['different']:10}")
    all_of = {name: sum(each[name] for each in totals.values()) for name in ("runs", "kills", "orderly", "different")}
    print(f"{'all':20} {all_of['runs']:5} {all_of['kills']:8} {all_of['orderly']:8} {all_of['different']:10}")
    print(f"seed {arguments.seed}, {time.monotonic() - started:.0f} s")
    print("\n".join(different))
    if arguments.json:
        values = {"seed": arguments.seed, "all": all_of, "methods": totals, "different": different}
        arguments.json.write_text(json.dumps(values, indent=1) + "\n")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
