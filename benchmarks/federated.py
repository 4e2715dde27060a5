"""Federated training on MNIST: accuracy against how unevenly the data is held, with true per-client ε; and its cost.

    python benchmarks/federated.py table    # IID and Dirichlet(50, 10, 1, 0.1), 3 seeds each: results/federated.md
    python benchmarks/federated.py scale    # 10, 100, 1000 virtual clients, 10 sampled: results/federated-scale.md

Every run is `dphero federate` in processes of its own. Runs that are there already are not repeated, so that a
measurement that was stopped goes on. Without arguments: both.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PARTITIONS = {
    "IID": ["--partition", "iid"],
    **{f"Dirichlet({alpha})": ["--partition", "dirichlet", "--alpha", str(alpha)] for alpha in (50, 10, 1, 0.1)},
}
LOOPBACK = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "ns"]


def federate(out: Path, *settings: str) -> dict:
    """Run a federation, or read the result of one that is finished."""
    if not (out / "result.json").exists():
        command = [sys.executable, "-m", "dphero.cli", "federate", "--json"]
        inside = LOOPBACK if subprocess.run([*LOOPBACK, "true"], capture_output=True).returncode == 0 else []
        begun = (out / "checkpoint.pt").exists()
        subprocess.run(
            [*inside, *command, *(["--resume", str(out)] if begun else [*settings, "--out", str(out)])],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    return json.loads((out / "result.json").read_text())


def table(runs: Path, seeds: int, rounds: int, epsilon: float) -> None:
    settings = [
        "--data",
        "mnist",
        "--clients",
        "10",
        "--sampled",
        "5",
        "--rounds",
        str(rounds),
        "--epsilon",
        f"{epsilon:g}",
    ]
    found: dict[str, list[dict]] = {name: [] for name in PARTITIONS}
    for seed in range(1, seeds + 1):
        for name, partition in PARTITIONS.items():
            out = runs / f"{name.lower().replace('(', '-').rstrip(')')}-{seed}"
            found[name].append(federate(out, *settings, *partition, "--seed", str(seed)))
            print(f"{name}, seed {seed}: {found[name][-1]['accuracy']:.2%}", flush=True)
            write_table(found, settings)


def write_table(found: dict[str, list[dict]], settings: list[str]) -> None:
    lines = [
        f"`dphero federate {' '.join(settings)}`",
        "",
        "Tanh network, DP-Hero SGD, lots of 256, one local epoch; test accuracy, mean ± standard deviation over seeds.",
        "ε is each client's over all rounds, at δ = 1e-5, largest and median over clients and seeds; declined: clients",
        "that ran out of budget, in the mean.",
        "",
        "| partition | accuracy | seeds | ε largest | ε median | declined |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        if runs:
            accuracies = [100 * run["accuracy"] for run in runs]
            spread = f" ± {statistics.stdev(accuracies):.2f}" if len(runs) > 1 else ""
            largest = max(run["epsilon"] for run in runs)
            median = statistics.median(run["epsilon_median"] for run in runs)
            declined = statistics.mean(len(run["declined"]) for run in runs)
            lines.append(
                f"| {name} | {statistics.mean(accuracies):.2f}{spread} | {len(runs)} | {largest:.3f} | {median:.3f} | "
                f"{declined:.1f} |"
            )
    (RESULTS / "federated.md").write_text("\n".join(lines) + "\n")


def scale(runs: Path) -> None:
    lines = [
        "10 clients are sampled in each of 4 rounds. MNIST has 60,000 records for all clients together: of 10, each",
        "trains for 188 steps a round, of 100 for 19, of 1000 for 2. Memory is the largest process's peak.",
        "",
        "| clients | seconds a round | seconds until the end of the first round | memory (MB) |",
        "|---|---|---|---|",
    ]
    for clients in (10, 100, 1000):
        out = runs / f"scale-{clients}"
        federate(
            out, "--data", "mnist", "--clients", str(clients), "--sampled", "10", "--rounds", "4", "--lot", "32",
            "--lr", "0.5", "--momentum", "0", "--noise-multiplier", "1", "--accountant", "rdp", "--seed", "1",
        )  # fmt: skip
        times = [json.loads(line)["seconds"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        each = (times[-1] - times[0]) / (len(times) - 1)
        print(f"{clients} clients: {each:.2f} s a round, {times[0]:.1f} s until the end of the first", flush=True)
        lines.append(f"| {clients} | {each:.2f} | {times[0]:.1f} | {peak:.0f} |")
        (RESULTS / "federated-scale.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("table", "scale", "both"), default="both")
    parser.add_argument("--runs", type=Path, default=Path("runs/federated"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epsilon", type=float, default=8.0)
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if options.what in ("table", "both"):
        table(options.runs, options.seeds, options.rounds, options.epsilon)
    if options.what in ("scale", "both"):
        scale(options.runs)


if __name__ == "__main__":
    main()
