"""Methods against each other within seeds, and early on: from the CSV files of the paper's convergence figures.

    python benchmarks/reproduction_pairs.py learning-rates --until 30

For each lot size or learning rate, and for all together: the mean accuracy at the last look until then, and the mean
distance from SGD of the same seed, over all σ; and how far methods differ in both. ± is the sample deviation over seeds
of what one seed has on the average over σ. Then the settings in which methods differ by more than a t-test of 5 % on
the seeds allows; one pair in twenty does by chance.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from scipy import stats

RESULTS = Path(__file__).parent / "results" / "reproduction"
METHODS = ("dp-sgd", "dp-hero", "dp-hero-published")
PAIRS = tuple((b, a) for a, b in itertools.combinations(METHODS, 2))


class Setting(NamedTuple):
    lot: int
    lr: float
    sigma: float | None


Curves = dict[tuple[Setting, str, int], dict[int, float]]  # of a setting, method and seed: percent by step


def read(item: str, until: int | None) -> Curves:
    curves: Curves = defaultdict(dict)
    with open(RESULTS / f"{item}.csv", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            step, sigma = int(line["step"]), line["noise_multiplier"]
            setting = Setting(int(line["lot"]), float(line["lr"]), float(sigma) if sigma else None)
            if until is None or step <= until:
                curves[setting, line["method"], int(line["seed"])][step] = 100 * float(line["accuracy"])
    return curves


def measures(curves: Curves) -> dict[str, dict[tuple[Setting, str, int], float]]:
    """The accuracy at the last look, and the mean distance from SGD, of every private run."""
    found: dict[str, dict[tuple[Setting, str, int], float]] = {"accuracy": {}, "distance": {}}
    for (setting, method, seed), curve in curves.items():
        if setting.sigma is not None:
            plain = curves[setting._replace(sigma=None), "sgd", seed]
            found["accuracy"][setting, method, seed] = curve[max(curve)]
            found["distance"][setting, method, seed] = fmean(abs(plain[step] - each) for step, each in curve.items())
    return found


def spread(values: list[float]) -> str:
    return f"{fmean(values):.1f} ± {stdev(values):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item", choices=("iterations", "epochs", "cifar", "lots", "learning-rates"))
    parser.add_argument("--until", type=int, help="the last step to look at (all)")
    options = parser.parse_args()
    curves = read(options.item, options.until)
    settings = sorted({setting for setting, _, _ in curves if setting.sigma is not None})
    seeds = sorted({seed for _, _, seed in curves})
    groups = [list(each) for _, each in itertools.groupby(settings, lambda setting: setting[:2])]
    for group in (*groups, settings) if len(groups) > 1 else groups:
        print("all" if group == settings else f"L = {group[0].lot}, η = {group[0].lr:g}")
        for name, found in measures(curves).items():
            of = {m: [fmean(found[setting, m, seed] for setting in group) for seed in seeds] for m in METHODS}
            pairs = {f"{a} - {b}": [x - y for x, y in zip(of[a], of[b], strict=True)] for a, b in PAIRS}
            print(f"  {name}:", ", ".join(f"{m} {spread(each)}" for m, each in (of | pairs).items()))
    allowed = float(stats.t.ppf(0.975, len(seeds) - 1))
    for name, found in measures(curves).items():
        beyond = []
        for setting, (a, b) in itertools.product(settings, PAIRS):
            differences = [found[setting, a, seed] - found[setting, b, seed] for seed in seeds]
            if abs(fmean(differences)) > allowed * stdev(differences) / math.sqrt(len(seeds)):
                where = f"L = {setting.lot}, η = {setting.lr:g}, σ = {setting.sigma:g}"
                beyond.append(f"  {where}: {a} - {b} {spread(differences)}")
        print(f"{name}: {len(beyond)} of {len(settings) * len(PAIRS)} pairs", *beyond, sep="\n")


if __name__ == "__main__":
    main()
