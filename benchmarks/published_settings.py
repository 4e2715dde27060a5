"""Published figures against ours, at the published settings: accuracy over seeds, and the honest price.

    python benchmarks/published_settings.py [--out DIR] [--data mnist|cifar10] [--only TEXT] [--seeds 3] [--workers N]
        [--json FILE]

Each run is an ordinary run directory under DIR/DATA/runs; a second call with the same DIR goes on. The data must be
there: `dphero data get mnist`, `dphero data get cifar10`.

Settings are those of the sources; where a source gives only ε, σ is calibrated by PLD. Differences that cannot be
removed: lots are Poisson here, as the price assumes, while most sources shuffle fixed batches; ε is PLD's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dphero.experiments import resolve
from dphero.experiments.comparison.plan import Planned
from dphero.experiments.comparison.sweep import Standing, sweep


@dataclass(frozen=True)
class Row:
    """A published figure: what was claimed, and the recipe that should give it."""

    name: str
    published: float
    claimed: str
    recipe: Mapping[str, Any]


def tutorial(lr: float, sigma: float, clip: float, epochs: int) -> dict[str, Any]:
    """Return a setting of TensorFlow Privacy's tutorial."""
    plain = {"lot": 256, "momentum": 0.0, "model": "tutorial-cnn", "method": "dp-sgd"}
    return {**plain, "lr": lr, "noise_multiplier": sigma, "clip": clip, "epochs": epochs}


PAPER_CNN = {"model": "cifar-cnn", "lot": 4096, "lr": 4.0, "epochs": 30}

ROWS = {
    "mnist": [
        Row("dp-sgd sigma 1.3", 95.0, "1.19 (old RDP)", tutorial(0.25, 1.3, 1.5, 15)),
        Row("dp-sgd sigma 1.1", 96.6, "3.01 (old RDP), 2.32 (CLT)", tutorial(0.15, 1.1, 1.0, 60)),
        Row("dp-sgd sigma 0.7", 97.0, "7.10 (old RDP), 5.07 (CLT)", tutorial(0.25, 0.7, 1.5, 45)),
        Row("feature-dp epsilon 3", 98.7, "3 (old RDP)", {"method": "feature-dp", "epsilon": 3.0}),
        Row("label-dp epsilon 1", 95.82, "1, labels only", {"method": "label-dp", "epsilon": 1.0}),
        Row("label-dp epsilon 2", 98.78, "2, labels only", {"method": "label-dp", "epsilon": 2.0}),
    ],
    "cifar10": [
        Row("feature-dp epsilon 3", 69.3, "3 (old RDP)", {"method": "feature-dp", "epsilon": 3.0}),
        Row("dp-randp epsilon 1", 72.3, "1", {"method": "dp-randp", "epsilon": 1.0, "physical_batch": 1024}),
        Row("cifar-cnn dp-sgd epsilon 3", float("nan"), "", {**PAPER_CNN, "method": "dp-sgd", "epsilon": 3.0}),
        Row("cifar-cnn dp-hero epsilon 3", 64.93, "3.0", {**PAPER_CNN, "method": "dp-hero", "epsilon": 3.0}),
        Row("cifar-cnn dp-hero epsilon 8", float("nan"), "", {**PAPER_CNN, "method": "dp-hero", "epsilon": 8.0}),
        Row("scatter-cnn dp-hero epsilon 3", float("nan"), "", {"method": "dp-hero", "epsilon": 3.0}),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/published-settings"))
    parser.add_argument("--data", choices=sorted(ROWS), default="mnist")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    rows = [row for row in ROWS[arguments.data] if arguments.only in row.name]
    plan, of = [], {}
    for row in rows:
        for seed in range(arguments.seeds):
            name = f"{row.name.replace(' ', '-')}-seed-{seed}"
            plan.append(Planned(name, resolve({"data": arguments.data, **row.recipe, "seed": seed})))
            of[name] = row.name
    seen: set[str] = set()

    def report(standing: Standing) -> None:
        for name in [*standing.done, *standing.failed]:
            if name not in seen:
                seen.add(name)
                print(f"{len(seen)}/{standing.runs} {name} {standing.failed.get(name, 'done')}", flush=True)

    outcomes = sweep(plan, arguments.out / arguments.data, workers=arguments.workers, report=report)
    table = []
    for row in rows:
        results = [found.result for found in outcomes if of[found.planned.name] == row.name and found.result]
        accuracies = [100 * result["accuracy"] for result in results]
        table.append(
            {
                "data": arguments.data,
                "row": row.name,
                "published": None if row.published != row.published else row.published,
                "published epsilon": row.claimed,
                "accuracy": round(statistics.mean(accuracies), 2) if accuracies else None,
                "spread (sample sd)": round(statistics.stdev(accuracies), 2) if len(accuracies) > 1 else None,
                "seeds": len(accuracies),
                "epsilon": max((result["epsilon"] for result in results), default=None),
                "protects": results[0]["protects"] if results else None,
                "steps": results[0]["steps"] if results else None,
                "seconds": [result["seconds"] for result in results],
            }
        )
    print(json.dumps(table, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
