"""Draw the committed pictures anew from the committed data behind them: nothing is trained.

    .venv/bin/python benchmarks/redraw.py [NAME ...]

Names are those of the files: cifar, epochs, iterations, learning-rates, lots, table1, mnist-methods.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

from dphero.experiments.comparison.table import Row
from dphero.experiments.plots import plot_accuracy
from dphero.experiments.reproduction.figures import convergence, table1
from dphero.experiments.reproduction.figures.curves import Curves
from dphero.experiments.reproduction.settings import Setting

RESULTS = Path(__file__).parent / "results"
CURVES = {each.name: each for each in vars(convergence).values() if isinstance(each, Curves)}


def redraw_curves(item: Curves, directory: Path) -> None:
    """Draw a figure of curves from its CSV file (accuracy by step) and its JSON file (prices)."""
    kept = json.loads((directory / f"{item.name}.json").read_text())
    sums: dict[tuple[Setting, str], dict[int, list[tuple[float, float]]]] = {}
    with (directory / f"{item.name}.csv").open() as file:
        for line in csv.DictReader(file):
            noise = float(line["noise_multiplier"]) if line["noise_multiplier"] else None
            key = (Setting(noise, int(line["lot"]), float(line["lr"])), line["method"])
            point = (float(line["epoch"]), 100 * float(line["accuracy"]))
            sums.setdefault(key, {}).setdefault(int(line["step"]), []).append(point)
    curves = {
        key: [(step, seeds[0][0], sum(each[1] for each in seeds) / len(seeds)) for step, seeds in sorted(steps.items())]
        for key, steps in sums.items()
    }
    rows = [row | {"setting": Setting(row["σ"], row["L"], row["η"])} for row in kept["rows"]]
    item._draw(curves, rows, item.shapes[kept["size"]], kept["size"], directory)


def redraw_comparison(directory: Path) -> None:
    """Draw a comparison's accuracies from its ``table.json``."""
    names = set(Row.__dataclass_fields__)
    rows: list[dict[str, Any]] = json.loads((directory / "table.json").read_text())["rows"]
    found = []
    for row in rows:
        values = {name: value for name, value in row.items() if name in names}
        private = row["protects"] != "nothing"
        values["epsilon"] = row["epsilon"] if row["epsilon"] is not None or private else float("inf")
        found.append(Row(**values))
    plot_accuracy(found, directory)


def main(names: list[str]) -> None:
    """Draw what is named, or everything."""
    reproduction = RESULTS / "reproduction"
    for name, item in CURVES.items():
        if not names or name in names:
            redraw_curves(item, reproduction)
    if not names or "table1" in names:
        kept = json.loads((reproduction / "table1.json").read_text())
        rows = [
            {**row, "ε printed": float("inf") if row["ε printed"] is None else row["ε printed"]} for row in kept["rows"]
        ]
        table1._draw(rows, kept["size"], reproduction)
    if not names or "mnist-methods" in names:
        redraw_comparison(RESULTS / "mnist-methods")


if __name__ == "__main__":
    main(sys.argv[1:])
