"""The paper's figures at full length, in slices: trains for a time, packs what is finished, goes on from that.

    python benchmarks/reproduction.py train --items iterations lots --seconds 300 --runs DIR --pack FILE.tar.xz
    python benchmarks/reproduction.py unpack FILE.tar.xz --runs DIR         # on any machine
    dphero reproduce iterations --full --runs DIR --out benchmarks/results/reproduction

`train` puts the runs of all items into one queue, in their order, and trains once what several items share. It stops
after so many seconds (runs in hand are saved), and packs of each finished run what a picture needs: its recipe, result,
metrics and ledger, and weights where an item looks at them. `pack --begun` packs the others, to go on elsewhere.
Unpacked where `train` begins, finished runs are kept, and begun ones go on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dphero.experiments import Interrupted
from dphero.experiments.comparison.plan import Planned, save_plan
from dphero.experiments.comparison.pool import Pool, default_workers
from dphero.experiments.comparison.sweep import State
from dphero.experiments.reproduction.items import ITEMS
from dphero.experiments.stopping import stoppable

_KEPT = ("recipe.toml", "result.json", "metrics.jsonl", "ledger.json", "environment.json")
_WITH_WEIGHTS = ("noise-spectra", "sigma-per-iteration")
_REPORT_SECONDS = 20.0


class Queue(State):
    """The runs of several items: workers need not wait for an item's last run, nor start anew for the next item.

    Args:
        plans: The runs to train, by their folder.
        runs: Where these folders are.
    """

    def __init__(self, plans: Mapping[str, Sequence[Planned]], runs: Path) -> None:
        super().__init__((), runs, lambda standing: None)
        self._folders = {folder: len(plan) for folder, plan in plans.items()}
        self._taken: dict[str, int] = {}
        self._started = self._reported = time.monotonic()
        self._same: dict[str, list[Planned]] = {}  # runs of one recipe
        for folder, plan in plans.items():
            for planned in plan:
                placed = replace(planned, name=f"{folder}/runs/{planned.name}")
                self._same.setdefault(repr(planned.recipe), []).append(placed)
        self.share()
        self.waiting.extend(same[0] for same in self._same.values() if not self._finished(same[0]))
        self._runs = len(self.waiting)

    def path(self, planned: Planned) -> Path:
        """The run's directory."""
        return self.directory / planned.name

    def share(self) -> None:
        """Copy finished runs to where another item needs the same."""
        for same in self._same.values():
            done = next((planned for planned in same if self._finished(planned)), None)
            for planned in same if done else ():
                if done and not self._finished(planned):
                    shutil.rmtree(self.path(planned), ignore_errors=True)
                    shutil.copytree(self.path(done), self.path(planned))

    def report(self) -> None:
        """Print now and then where things stand."""
        for name, state in self.running.items():
            self._taken[name] = state.get("step", 0)
        now = time.monotonic()
        if now - self._reported > _REPORT_SECONDS:
            self._reported = now
            self.tell()

    def tell(self) -> None:
        """Print where things stand."""
        seconds = time.monotonic() - self._started
        found = Counter(path.parents[2].name for path in self.directory.glob("*/runs/*/result.json"))
        stand = ", ".join(f"{folder} {found[folder]}/{runs}" for folder, runs in self._folders.items())
        print(f"{seconds:.0f} s, {sum(self._taken.values()):,} steps: {stand}", flush=True)

    def _finished(self, planned: Planned) -> bool:
        return (self.path(planned) / "result.json").exists()


def train(options: argparse.Namespace) -> None:
    started = time.monotonic()
    runs = options.runs.absolute()
    plans = {}
    for name in options.items:
        whole, folder = ITEMS[name].plan(options.size), f"{name}-{options.size}"
        if whole:
            save_plan(runs / folder, whole)
            plans[folder] = [each for each in whole if not options.data or each.recipe.data in options.data]
    queue = Queue(plans, runs)
    workers = min(options.workers or default_workers(), max(1, len(queue.waiting)))
    print(f"{len(queue.waiting)} runs to train, {workers} at a time", flush=True)
    left = max(0.0, options.seconds - (time.monotonic() - started))
    stop = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM))
    stop.daemon = True
    stop.start()
    try:
        with stoppable() as asked_to_stop:
            Pool(queue, workers).run(asked_to_stop)
    except Interrupted as error:
        print(error, flush=True)
    finally:
        stop.cancel()
        queue.share()
        queue.tell()
        for name, why in list(queue.failed.items())[:20]:
            print(f"failed: {name}: {why}", flush=True)
        if options.pack:
            pack(runs, options.pack)


def pack(runs: Path, file: Path, begun: bool = False) -> None:
    """Write what pictures need of all finished runs; or, of those that were begun, what is needed to go on."""
    with tarfile.open(file, "w:xz", preset=2) as archive:
        for plan in sorted(runs.glob("*/plan.json")):
            archive.add(plan, plan.relative_to(runs))
        for recipe in sorted(runs.glob("*/runs/*/recipe.toml")):
            run = recipe.parent
            if (run / "result.json").exists() == begun:
                continue
            whole = begun or run.parent.parent.name.rpartition("-")[0] in _WITH_WEIGHTS
            kept = sorted(path for path in run.rglob("*") if path.is_file()) if whole else [run / n for n in _KEPT]
            for path in kept:
                if path.exists() and (begun or not path.name.startswith("checkpoint")):
                    archive.add(path, path.relative_to(runs))
    print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB", flush=True)


def unpack(options: argparse.Namespace) -> None:
    options.runs.mkdir(parents=True, exist_ok=True)
    with tarfile.open(options.file) as archive:
        archive.extractall(options.runs, filter="data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train")
    training.add_argument("--items", nargs="+", choices=list(ITEMS), default=list(ITEMS), help="in this order")
    training.add_argument("--data", nargs="+", help="train on these data sets alone, where an item has several")
    training.add_argument("--seconds", type=float, default=1e6)
    training.add_argument(
        "--size", default="full", choices=["tiny", "quick", "full"], help="tiny tries this script out"
    )
    training.add_argument("--workers", type=int)
    training.add_argument("--pack", type=Path)
    training.set_defaults(run=train)
    packing = commands.add_parser("pack")
    packing.add_argument("file", type=Path)
    packing.add_argument("--begun", action="store_true", help="the runs that are not finished")
    packing.set_defaults(run=lambda options: pack(options.runs, options.file, options.begun))
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("file", type=Path)
    unpacking.set_defaults(run=unpack)
    for command in (training, packing, unpacking):
        command.add_argument("--runs", type=Path, required=True)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
