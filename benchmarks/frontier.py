"""The recipes of the frontier, several seeds each, as processes side by side, within a time.

    python benchmarks/frontier.py [--only TEXT] [--seeds 3] [--workers 8] [--seconds 600] [--out DIR] [--validate N]
        [--set NAME=VALUE ...] [--continue] [--one-process]

Each training is an ordinary run directory under DIR, with checkpoints. When the time is up all are asked to stop and
save; a second call with --continue and the same DIR goes on with them, and leaves finished ones alone. Every finished
run adds a line to DIR/frontier.jsonl. With --validate the last N training images take the place of the test images:
settings were chosen that way. With --one-process all run one after another in this process, and fixed features, which
depend on no seed, are computed once for all (on a CPU they are kept under DIR: they take longer than the training).
The data must be there: `dphero data get mnist`, and so on.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_BLOCK = 1000  # images whose features are kept at a time


def place(out: Path, recipe: str, seed: int) -> Path:
    return out / f"{recipe}-seed-{seed}"


def one(recipe: str, seed: int, out: Path, validate: int, changes: dict[str, Any]) -> None:
    """Train one run, or go on with it; its directory tells the rest."""
    from dphero import data as datasets
    from dphero.data import Data, Split
    from dphero.experiments import RunDirectory, frontier, resolve, train

    settings = {**frontier.named(recipe), **changes, "seed": seed}
    data = datasets.load(settings["data"])
    if validate:
        images, labels = data.train.images, data.train.labels
        kept = len(labels) - validate
        data = Data(
            name=data.name,
            train=Split(images[:kept], labels[:kept]),
            test=Split(images[kept:], labels[kept:]),
            classes=data.classes,
            public_size=True,
        )
        settings["lot"] = min(settings["lot"], kept)
    directory = place(out, recipe, seed)
    run = RunDirectory.open(directory) if directory.exists() else RunDirectory.create(directory, resolve(settings))
    train(run, data=data)


def share_features(place: Path) -> None:
    """Compute the fixed features of the same images by the same model once, and keep them: a GPU's in its memory.

    Those of a CPU are kept in files. Beside a file of features stands how many of its rows are done: a process that was
    stopped goes on from there.
    """
    import torch

    from dphero.experiments.runs import evaluation, preparation

    compute, kept = evaluation.features, dict[str, torch.Tensor]()
    place.mkdir(exist_ok=True)

    def features(model: Any, images: Any) -> Any:
        key = repr((repr(model.features), tuple(images.shape), float(images.double().sum())))
        if images.is_cuda:
            if key not in kept:
                kept[key] = compute(model, images)
            return kept[key]
        with torch.no_grad():
            one = model.features(images[:1])
        shape, dtype = one.shape[1:], one.dtype
        file = place / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.f32"
        count, size = file.with_suffix(".rows"), len(images) * shape.numel()
        done = int(count.read_text()) if count.exists() else 0
        rows = torch.from_file(str(file), shared=True, size=size, dtype=dtype).view(len(images), *shape)
        for first in range(done, len(images), _BLOCK):
            rows[first : first + _BLOCK] = compute(model, images[first : first + _BLOCK])
            count.write_text(str(min(first + _BLOCK, len(images))))
        return torch.from_file(str(file), size=size, dtype=dtype).view(len(images), *shape)

    evaluation.features = preparation.features = features  # type: ignore[attr-defined]


def started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def work(plan: list[tuple[str, int]], arguments: argparse.Namespace) -> None:
    """Run the plan, at most so many at a time, until it is done or the time is up."""
    end, waiting, running = time.monotonic() + arguments.seconds, list(plan), {}
    passed = [f"--set={each}" for each in arguments.set]
    while (waiting or running) and time.monotonic() < end:
        for key in [key for key, process in running.items() if process.poll() is not None]:
            noted(key, arguments.out, running.pop(key).returncode)
        while waiting and len(running) < arguments.workers:
            name, seed = key = waiting.pop(0)
            command = [sys.executable, __file__, "--one", name, "--seed", str(seed), "--out", str(arguments.out)]
            command += [f"--validate={arguments.validate}", *passed]
            running[key] = started(command, arguments.out / f"{name}-seed-{seed}.log")
        time.sleep(0.2)
    for process in running.values():
        process.send_signal(signal.SIGTERM)  # each saves where it stands
    for key, process in running.items():
        noted(key, arguments.out, process.wait())


def work_here(plan: list[tuple[str, int]], arguments: argparse.Namespace) -> None:
    """Run the plan in this process with shared features, all seeds of a recipe before the next one."""
    from dphero.experiments import Interrupted

    share_features(arguments.out / "features")
    names = [name for name, _ in plan]
    for name, seed in sorted(plan, key=lambda key: names.index(key[0])):
        try:
            one(name, seed, arguments.out, arguments.validate, changed(arguments.set))
        except Interrupted as error:
            print(f"{name} seed {seed}: {error}", flush=True)
            return
        noted((name, seed), arguments.out, 0)


def changed(settings: list[str]) -> dict[str, Any]:
    """Return NAME=VALUE settings as a mapping."""
    pairs = (each.partition("=") for each in settings)
    return {name: ast.literal_eval(value) for name, _, value in pairs}


def noted(key: tuple[str, int], out: Path, status: int) -> None:
    """Add a finished run to the lines, once."""
    name, seed = key
    found = place(out, name, seed) / "result.json"
    if not found.exists():
        tail = (out / f"{name}-seed-{seed}.log").read_text()[-300:]
        print(f"{name} seed {seed}: not finished, exit {status}; {' '.join(tail.split())}", flush=True)
        return
    result = json.loads(found.read_text())
    keys = ("accuracy", "epsilon", "delta", "steps", "noise_multiplier", "seconds", "protects", "is_bound")
    line = {"recipe": name, "seed": seed, **{each: result[each] for each in keys}}
    print(json.dumps(line), flush=True)
    with (out / "frontier.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def table(out: Path) -> None:
    """Print mean and spread of what is finished."""
    if not (out / "frontier.jsonl").exists():
        print("nothing is finished")
        return
    lines = [json.loads(line) for line in (out / "frontier.jsonl").read_text().splitlines()]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["recipe"], {})[line["seed"]] = line
    for name, runs in sorted(found.items()):
        values = [100 * run["accuracy"] for run in runs.values()]
        spread = f"{statistics.stdev(values):.2f}" if len(values) > 1 else "-"
        epsilon = max(run["epsilon"] for run in runs.values())
        print(f"{name:28s} {statistics.mean(values):6.2f} ± {spread}  seeds {len(values)}  epsilon {epsilon:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="recipes of these names, or whose names contain one of these; commas between"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"))
    parser.add_argument("--validate", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="a recipe's setting to change, NAME=VALUE")
    parser.add_argument("--continue", dest="goes_on", action="store_true")
    parser.add_argument("--one-process", action="store_true", help="one after another here, features computed once")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one, arguments.seed, arguments.out, arguments.validate, changed(arguments.set))
        return
    from dphero.experiments import frontier

    if arguments.out.exists() and not arguments.goes_on:
        parser.error(f"{arguments.out} exists: go on with --continue, or name another --out")
    arguments.out.mkdir(parents=True, exist_ok=True)
    wanted = arguments.only.split(",")
    exact = [name for name in wanted if name in frontier.NAMES]
    names = exact or [name for name in frontier.NAMES if any(each in name for each in wanted)]
    plan = [(name, seed) for seed in range(arguments.seeds) for name in names]
    plan = [key for key in plan if not (place(arguments.out, *key) / "result.json").exists()]
    if arguments.one_process:
        work_here(plan, arguments)
    else:
        work(plan, arguments)
    table(arguments.out)


if __name__ == "__main__":
    main()
