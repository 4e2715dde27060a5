"""Heat maps of CIFAR-10 under SGD, DP-SGD, DP-Hero and the published recipe: do they look at the same things?

python benchmarks/heatmaps.py [--runs runs/heatmaps] [--seeds 5] [--out benchmarks/results/heatmaps]

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
from typing import Any

from dphero.explain import explain

METHODS = ("sgd", "dp-sgd", "dp-hero", "dp-hero-published")
EPOCHS, EPSILON = 5, 8.0
KEPT = "0,0.1,0.2,0.5,1,2,3,5"
COMPARED = (0, 0.2, 1, 3)  # and the end
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


def summary(numbers: dict[str, Any]) -> str:
    """The tables of docs/explain.md."""
    groups = list(dict.fromkeys(run["group"] for run in numbers["runs"]))
    lines = [*_agreement_table(numbers, groups), "", *_paired(numbers, groups), "", *_noise_table(numbers, groups), ""]
    lines += _trajectory_table(numbers, groups)
    return "\n".join([*lines, "", *(f"{v['group']}, {v['score']}: {v['verdict']}" for v in numbers["verdicts"])])


def _agreement_table(numbers: dict[str, Any], groups: list[str]) -> list[str]:
    lines = [
        "agreement with sgd, other seeds, mean (lowest-highest pair); all at the end of training",
        "training | accuracy | Spearman | IoU | same class | Spearman, same start | faithfulness | empty maps",
    ]
    reference = numbers["reference"]
    for group in (*groups, "random weights"):
        names = {run["name"] for run in numbers["runs"] if run["group"] == group}
        facts = [
            each
            for each in numbers["maps"]
            if each["epoch"] == "last" and (each["run"] in names or each["run"].startswith(f"{group} "))
        ]
        found = _find(numbers, reference, group, "last", "last")
        cells = [_range(found.get(name)) for name in ("spearman", "iou", "same_class", "spearman_same_start")]
        accuracy, faithful, empty = ([each[name] for each in facts] for name in ("accuracy", "faithfulness", "empty"))
        shown = [f"{_mean(accuracy):.1%}" if all(a is not None for a in accuracy) else "-"]
        ends = f"{_mean(faithful):+.3f} ({min(faithful):+.3f} to {max(faithful):+.3f})", f"{_mean(empty):.1%}"
        lines.append(" | ".join([group, *shown, *cells, *ends]))
    lines += ["", "Spearman with sgd's end, other seeds, by epoch (accuracy)"]
    epochs = sorted({each["epoch"] for each in numbers["agreement"] if each["to"] == "last" != each["epoch"]})
    for group in groups:
        cells = []
        for epoch in epochs:
            found = _find(numbers, group, reference, epoch, "last")
            names = {run["name"] for run in numbers["runs"] if run["group"] == group}
            accuracy = [m["accuracy"] for m in numbers["maps"] if m["run"] in names and m["epoch"] == epoch]
            known = f" ({_mean(accuracy):.0%})" if None not in accuracy else ""
            cells.append(f"{epoch:g}: {found['spearman']['mean']:.2f}{known}")
        lines.append(f"{group} | " + " | ".join(cells))
    return lines


def _paired(numbers: dict[str, Any], groups: list[str]) -> list[str]:
    """dp-hero against dp-sgd: the same pairs of seeds, the difference of their agreement with sgd."""
    lines = ["agreement with sgd at the end, minus that of dp-sgd, for each seed (mean over the other seeds of sgd)"]
    by_seed: dict[str, dict[str, dict[str, float]]] = {}
    for group in groups[1:]:
        for pair in _find(numbers, numbers["reference"], group, "last", "last")["pairs"]:
            name = pair["b"] if pair["a"].startswith("sgd") else pair["a"]
            if not pair["same_start"]:
                seed = by_seed.setdefault(group, {}).setdefault(name[-5:], {"spearman": 0.0, "iou": 0.0, "n": 0})
                seed["spearman"], seed["iou"] = seed["spearman"] + pair["spearman"], seed["iou"] + pair["iou"]
                seed["n"] += 1
    for group in groups[1:]:
        if group != "dp-sgd":
            for score in ("spearman", "iou"):
                differences = [
                    value[score] / value["n"] - by_seed["dp-sgd"][seed][score] / by_seed["dp-sgd"][seed]["n"]
                    for seed, value in sorted(by_seed[group].items())
                ]
                lines.append(f"{group} | {score} | " + " | ".join(f"{each:+.3f}" for each in differences))
    return lines


def _noise_table(numbers: dict[str, Any], groups: list[str]) -> list[str]:
    names = ("noise_on_public", "noise_on_released", "signal_share", "cosine")
    lines = ["layer by layer, mean over seeds and over epochs 1 to 5", "training | layer | " + " | ".join(names)]
    group_of = {run["name"]: run["group"] for run in numbers["runs"]}
    for group in groups:
        for layer in dict.fromkeys(each["layer"] for each in numbers["layers"]):
            facts = [f for f in numbers["layers"] if group_of[f["run"]] == group and f["layer"] == layer]
            late = [fact for fact in facts if fact["epoch"] >= 1]
            cells = [
                f"{_mean(v):.3f} ({min(v):.3f}-{max(v):.3f}), n={len(v)}"
                if (v := [f[n] for f in late if n in f])
                else "-"
                for n in names
            ]
            rank = {
                k: _mean([f[k]["rank"] for f in late if k in f])
                for k in ("weights", "noise", "released")
                if k in late[0]
            }
            ranks = ", ".join(f"{k} {v:.1f}" for k, v in rank.items())
            lines.append(
                " | ".join([group, layer, *cells, f"effective ranks of {late[0]['weights']['size']}: {ranks}"])
            )
    return lines


def _trajectory_table(numbers: dict[str, Any], groups: list[str]) -> list[str]:
    lines = [
        "way of the weights against sgd's from the same start, by epoch: distance / cosine / length, lowest-highest"
    ]
    for group in groups[1:]:
        for epoch in sorted({each["epoch"] for each in numbers["trajectory"]}):
            found = [e for e in numbers["trajectory"] if e["group"] == group and e["epoch"] == epoch]
            cells = [
                f"{min(v):.3f}-{max(v):.3f}" for n in ("distance", "cosine", "length") if (v := [e[n] for e in found])
            ]
            at = "last" if epoch == EPOCHS else epoch
            same = _find(numbers, numbers["reference"], group, at, at)
            lines.append(
                f"{group} | {epoch:g} | " + " | ".join(cells) + f" | same class {_range(same.get('same_class'))}"
            )
    for epoch in (*COMPARED, "last"):
        same = _find(numbers, numbers["reference"], numbers["reference"], epoch, epoch)
        lines.append(f"sgd, other seed | {epoch} | same class {_range(same.get('same_class'))}")
    return lines


def _find(numbers: dict[str, Any], first: str, second: str, epoch: object, to: object) -> dict[str, Any]:
    return next(
        (
            each
            for each in numbers["agreement"]
            if {each["a"], each["b"]} == {first, second} and (each["epoch"], each["to"]) == (epoch, to)
        ),
        {},
    )


def _range(value: dict[str, float | None] | None) -> str:
    return (
        "-" if not value or value["mean"] is None else f"{value['mean']:.3f} ({value['low']:.3f}-{value['high']:.3f})"
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs", "heatmaps"), help="where the runs are kept")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=1, help="runs that are trained at a time, one core each")
    parser.add_argument("--per-class", type=int, default=10, help="images of each class that are scored")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "heatmaps")
    arguments = parser.parse_args()
    runs = train(arguments.runs, arguments.seeds, arguments.at_once)
    found = explain(runs, per_class=arguments.per_class, epochs=COMPARED)
    found.save(arguments.out, shown=10)
    text = summary(found.numbers)
    (arguments.out / "summary.log").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
