"""The paper's figures at full length, in slices: trains for a time, packs what is finished, goes on from that.

    python benchmarks/reproduction.py train --items iterations lots --seconds 300 --runs DIR --pack FILE.tar.xz
    python benchmarks/reproduction.py unpack FILE.tar.xz --runs DIR         # on any machine
    dphero reproduce iterations --full --runs DIR --out benchmarks/results/reproduction

`train` stops after so many seconds (runs in hand are saved), and packs of each finished run what a picture needs: its
recipe, result, metrics and ledger, and weights where an item looks at them. Unpacked where `train` begins, finished
runs are kept.
"""

from __future__ import annotations

import argparse
import os
import signal
import tarfile
import threading
import time
from pathlib import Path

from dphero.experiments import Interrupted
from dphero.experiments.comparison.sweep import Standing, sweep
from dphero.experiments.reproduction.items import ITEMS

_KEPT = ("recipe.toml", "result.json", "metrics.jsonl", "ledger.json", "environment.json")
_WITH_WEIGHTS = ("noise-spectra", "sigma-per-iteration")


def train(options: argparse.Namespace) -> None:
    started = time.monotonic()
    stop = threading.Timer(options.seconds, os.kill, (os.getpid(), signal.SIGTERM))
    stop.daemon = True
    stop.start()
    try:
        for name in options.items:
            left = options.seconds - (time.monotonic() - started)
            if left < 5:
                break
            plan = ITEMS[name].plan(options.size)
            last = [time.monotonic()]

            def report(standing: Standing, name: str = name, last: list[float] = last) -> None:
                if time.monotonic() - last[0] > 20:
                    last[0] = time.monotonic()
                    failed = f", failed {dict(standing.failed)}" if standing.failed else ""
                    print(f"{name}: {len(standing.done)} of {standing.runs}{failed}", flush=True)

            found = sweep(plan, options.runs / f"{name}-{options.size}", workers=options.workers, report=report)
            bad = [f"{each.planned.name}: {each.error}" for each in found if each.error]
            seconds = time.monotonic() - started
            print(f"{name}: {len(found)} runs, {len(bad)} failed, {seconds:.0f} s {bad[:3]}", flush=True)
    except Interrupted as error:
        print(error, flush=True)
    finally:
        stop.cancel()
        if options.pack:
            pack(options.runs, options.pack)


def pack(runs: Path, file: Path) -> None:
    """Write what pictures need of all finished runs."""
    with tarfile.open(file, "w:xz") as archive:
        for plan in sorted(runs.glob("*/plan.json")):
            archive.add(plan, plan.relative_to(runs))
        for result in sorted(runs.glob("*/runs/*/result.json")):
            run = result.parent
            weights = run.parent.parent.name.rpartition("-")[0] in _WITH_WEIGHTS
            kept = [path for path in run.rglob("*") if path.is_file()] if weights else [run / name for name in _KEPT]
            for path in kept:
                if path.exists() and not path.name.startswith("checkpoint"):
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
    training.add_argument("--items", nargs="+", choices=list(ITEMS), default=list(ITEMS))
    training.add_argument("--seconds", type=float, default=1e6)
    training.add_argument(
        "--size", default="full", choices=["tiny", "quick", "full"], help="tiny tries this script out"
    )
    training.add_argument("--workers", type=int)
    training.add_argument("--pack", type=Path)
    training.set_defaults(run=train)
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("file", type=Path)
    unpacking.set_defaults(run=unpack)
    for command in (training, unpacking):
        command.add_argument("--runs", type=Path, required=True)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
