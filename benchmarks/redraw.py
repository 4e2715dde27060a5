"""Draw the committed pictures anew from the committed data behind them: nothing is trained.

    .venv/bin/python benchmarks/redraw.py [NAME ...]

Names are those of the files: cifar, epochs, epsilon-boxes, heterogeneity, iterations, learning-rates,
linear-analysis, lots, noise-spectra, sigma-per-iteration, table1, mnist-methods.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch

from dphero.experiments.comparison.table import Row
from dphero.experiments.plots import plot_accuracy
from dphero.experiments.reproduction.figures import boxes, convergence, heterogeneity, linear, sigma, spectra, table1
from dphero.experiments.reproduction.figures.curves import Curves, Look
from dphero.experiments.reproduction.settings import MNIST, Setting

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
        key: [Look.of(step, seeds[0][0], [each[1] for each in seeds]) for step, seeds in sorted(steps.items())]
        for key, steps in sums.items()
    }
    rows = [row | {"setting": Setting(row["σ"], row["L"], row["η"])} for row in kept["rows"]]
    item.draw(curves, rows, item.shapes[kept["size"]], kept["size"], directory)


def read_points(path: Path) -> list[dict[str, Any]]:
    """Read the data behind a picture; what is not written is left out, what is a number becomes one."""
    with path.open() as file:
        lines = [{name: text for name, text in line.items() if text} for line in csv.DictReader(file)]
    return [{name: _number(text) for name, text in line.items()} for line in lines]


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def redraw_boxes(directory: Path) -> None:
    """Draw accuracies at several ε."""
    kept = json.loads((directory / "epsilon-boxes.json").read_text())
    groups: dict[tuple[float, str], list[float]] = {}
    for point in read_points(directory / "epsilon-boxes.csv"):
        groups.setdefault((point["ε asked"], point["method"]), []).append(point["accuracy"])
    words = kept["notes"][0].removeprefix(f"{kept['size']}: ").removesuffix(".")
    boxes.draw(groups, kept["rows"], kept["size"], words, directory)


def redraw_linear(directory: Path) -> None:
    """Draw the analysis of a linear classifier; its accuracy without noise is in the first note, rounded."""
    kept = json.loads((directory / "linear-analysis.json").read_text())
    rows = [row | {"true ε": math.inf if row["true ε"] is None else row["true ε"]} for row in kept["rows"]]
    found = re.search(r"([\d.]+) % right", kept["notes"][0])
    assert found is not None
    words = kept["notes"][0].removeprefix(f"{kept['size']}: ")
    note = f"{kept['size'].upper()}: {words} ε of one release at σ = 1, δ = 1e-05."
    linear.draw(read_points(directory / "linear-analysis.csv"), rows, float(found[1]) / 100, note, directory)


def redraw_spectra(directory: Path) -> None:
    """Draw the noise along principal directions, and what the weakest costs."""
    kept = json.loads((directory / "noise-spectra.json").read_text())
    points = read_points(directory / "noise-spectra.csv")
    scales: dict[tuple[str, str, str, str], list[float]] = {}
    for point in points:
        if "curve" not in point:
            key = (point["model"], point["state"], point["layer"], point["rule"])
            scales.setdefault(key, []).append(point["noise / σC"])
    prices = [{"epsilon": math.inf} | point for point in points if "curve" in point]
    tensors = {key: torch.tensor(values) for key, values in scales.items()}
    spectra.draw(tensors, prices, kept["size"], MNIST[kept["size"]], directory)


def redraw_heterogeneity(directory: Path) -> None:
    """Draw accuracies by exponent and scope."""
    kept = json.loads((directory / "heterogeneity.json").read_text())
    words = kept["notes"][0].removeprefix(f"{kept['size']}: ").removesuffix(".")
    heterogeneity.draw(kept["rows"], heterogeneity.SHAPES[kept["size"]], kept["size"], words, directory)


def redraw_sigma(directory: Path) -> None:
    """Draw σ of each direction at each iteration, layers in the order of the network."""
    kept = json.loads((directory / "sigma-per-iteration.json").read_text())
    with (directory / "sigma-per-iteration.csv").open() as file:
        points = [
            {"layer": line["layer"], "rule": line["rule"], "step": int(line["step"])}
            | {"σ / σ of DP-SGD": float(line["σ / σ of DP-SGD"])}
            for line in csv.DictReader(file)
        ]
    rows = sorted(kept["rows"], key=lambda row: [int(part) for part in row["layer"].split(".")])
    words = kept["notes"][0].removeprefix(f"{kept['size']}: ").partition(";")[0]
    sigma.draw(points, rows, f"{kept['size'].upper()}: {words}.", directory)


OTHERS = {
    "epsilon-boxes": redraw_boxes, "heterogeneity": redraw_heterogeneity, "linear-analysis": redraw_linear,
    "noise-spectra": redraw_spectra, "sigma-per-iteration": redraw_sigma,
}  # fmt: skip


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
    for name, redraw in OTHERS.items():
        if not names or name in names:
            redraw(reproduction)
    if not names or "table1" in names:
        kept = json.loads((reproduction / "table1.json").read_text())
        rows = [
            {**row, "ε printed": float("inf") if row["ε printed"] is None else row["ε printed"]} for row in kept["rows"]
        ]
        table1.draw(rows, kept["size"], reproduction)
    if not names or "mnist-methods" in names:
        redraw_comparison(RESULTS / "mnist-methods")


if __name__ == "__main__":
    main(sys.argv[1:])
