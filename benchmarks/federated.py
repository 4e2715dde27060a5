"""Federated training on MNIST, measured: each part writes its table to results/federated-….md.

    python benchmarks/federated.py table       # IID and Dirichlet(50, 10, 1, 0.1), three seeds, true ε of each client
    python benchmarks/federated.py strategies  # without privacy, Dirichlet(0.5): FedAvg, FedProx, SCAFFOLD, FedNova
    python benchmarks/federated.py scale       # 10, 100 and 1000 virtual clients, 10 of them in a round
    python benchmarks/federated.py sharing     # FedFed's shared data sets beside none

`scale` runs `dphero federate` itself, on Ray. In the other parts the clients take turns in one process, without Ray,
which saves half of the time on one core: settings, app, server, messages and files are those of `dphero federate`, and
with the same seed it gives the same figures, digit for digit. Runs that are finished are not repeated, and one that was
stopped goes on, so a measurement can be stopped and started again; several may run beside each other, one for each
`--seed`, and the last to end writes the whole table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PARTITIONS = {
    "IID": "--partition iid",
    **{f"Dirichlet({alpha})": f"--partition dirichlet --alpha {alpha}" for alpha in (50, 10, 1, 0.1)},
}
LOOPBACK = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "ns"]
PUBLISHED = {"fedavg": 98.89, "fedprox": 99.02, "scaffold": 99.07, "fednova": 98.03}  # Flower's niid_bench, best round
SHARED = ("none", "generated", "distilled", "distilled-published")


def take_turns(out: Path, settings: str) -> dict:
    """Run a federation in this process, or read the result of one that is finished."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for the grid of the tests
    from typer.testing import CliRunner

    from dphero.cli import app
    from dphero.federated import simulation
    from tests.federated.local_grid import LocalGrid

    def run_simulation(*, server_app: Any, client_app: Any, num_supernodes: int, backend_config: Any) -> None:
        server_app(LocalGrid(client_app, num_supernodes), None)

    simulation.run_simulation = run_simulation
    if not (out / "result.json").exists():
        chosen = ["--resume", str(out)] if (out / "checkpoint.pt").exists() else [*settings.split(), "--out", str(out)]
        found = CliRunner().invoke(app, ["federate", "--json", *chosen])
        if found.exit_code:
            raise SystemExit(f"failed: dphero federate {' '.join(chosen)}: {found.output}")
    return json.loads((out / "result.json").read_text())


def federate(out: Path, settings: str) -> dict:
    """Run a federation on Ray, unless it is finished; return what it cost: see :class:`Watch`."""
    if not (out / "cost.json").exists():
        inside = LOOPBACK if subprocess.run([*LOOPBACK, "true"], capture_output=True).returncode == 0 else []
        command = [*inside, sys.executable, "-m", "dphero.cli", "federate", "--json", "--workers", "1"]
        process = subprocess.Popen([*command, *settings.split(), "--out", str(out)], stdout=subprocess.DEVNULL)
        watch = Watch(process.pid, out / "metrics.jsonl")
        if process.wait():
            raise SystemExit(f"failed: {settings}")
        (out / "cost.json").write_text(json.dumps(watch.stop()))
    return json.loads((out / "cost.json").read_text())


class Watch(threading.Thread):
    """Looks, every second, at what a process and all that it started hold in memory and have used of the processor.

    Wall-clock time would tell more of the machine's other work than of the run.
    """

    def __init__(self, process: int, metrics: Path) -> None:
        super().__init__(daemon=True)
        self.process, self.metrics, self.over = process, metrics, threading.Event()
        self.peak, self.after = 0.0, {}  # processor seconds, by rounds that were finished
        self.start()

    def run(self) -> None:
        while not self.over.wait(1):
            found = tree(self.process)
            self.peak = max(self.peak, sum(map(proportional, found)) / 1024)
            rounds = len(self.metrics.read_text().splitlines()) if self.metrics.exists() else 0
            self.after.setdefault(rounds, sum(map(processor, found)))

    def stop(self) -> dict:
        self.over.set()
        self.join()
        first, last = min(set(self.after) - {0}), max(self.after)
        each = (self.after[last] - self.after[first]) / (last - first)
        return {"memory": round(self.peak), "first": round(self.after[first], 1), "each": round(each, 2)}


def tree(root: int) -> list[int]:
    """A process and all that it started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def proportional(process: int) -> int:
    """Its memory in kB; what several processes share counts for each of them in part."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def processor(process: int) -> float:
    """Seconds that it has used of the processor."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def rounds_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def write(name: str, heading: list[str], header: str, rows: list[str]) -> None:
    rule = "|" + "---|" * (header.count("|") - 1)
    (RESULTS / f"federated-{name}.md").write_text("\n".join([*heading, "", header, rule, *rows]) + "\n")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


# -- the paper's table ---------------------------------------------------------------------------------------------

TABLE = "--data mnist --clients 10 --sampled 5 --rounds 10 --epsilon 8"


def table(runs: Path, seeds: list[int], methods: list[str]) -> None:
    for method in methods:
        for seed in seeds:
            for name, partition in PARTITIONS.items():
                settings = f"{TABLE} --method {method} {partition} --seed {seed}"
                result = take_turns(runs / folder(method, name, seed), settings)
                say(
                    f"{method}, {name}, seed {seed}: {result['accuracy']:.2%}, ε largest {result['epsilon']:.3f}, "
                    f"median {result['epsilon_median']:.3f}, declined {len(result['declined'])}, "
                    f"{result['seconds']:.0f} s"
                )
                write_table(runs, methods)


def folder(method: str, name: str, seed: int) -> str:
    return f"{method}-{name.lower().replace('(', '-').rstrip(')')}-{seed}"


def write_table(runs: Path, methods: list[str]) -> None:
    rows = []
    for method in methods:
        for name in PARTITIONS:
            found = [
                json.loads(path.read_text())
                for path in sorted(runs.glob(folder(method, name, 0)[:-1] + "[0-9]/result.json"))
            ]
            if not found:
                continue
            accuracies = [100 * each["accuracy"] for each in found]
            spread = f" ± {statistics.stdev(accuracies):.2f}" if len(found) > 1 else ""
            spent = [epsilon for each in found for epsilon in each["clients"].values()]
            declined = statistics.mean(len(each["declined"]) for each in found)
            seconds = statistics.mean(each["seconds"] for each in found)
            rows.append(
                f"| {method} | {name} | {statistics.mean(accuracies):.2f}{spread} | {len(found)} | "
                f"{max(spent):.3f} | {statistics.median(spent):.3f} | {declined:.1f} | {seconds:.0f} |"
            )
    heading = [
        f"`dphero federate {TABLE}`, tanh network, lots of 256, one local epoch a round. Test accuracy in %,",
        "mean ± standard deviation over seeds. ε is that of a client over all rounds, at δ = 1e-5: the largest and the",
        "median over all clients that answered, of all seeds. Declined: clients that ran out of budget, in the mean.",
    ]
    header = "| method | partition | accuracy | seeds | ε largest | ε median | declined | seconds |"
    write("table", heading, header, rows)


# -- strategies without privacy ------------------------------------------------------------------------------------


def strategies(runs: Path, rounds: int) -> None:
    common = f"--data mnist --model lenet --method sgd --clients 10 --sampled 10 --rounds {rounds}"
    common += " --partition dirichlet --alpha 0.5 --lot 32 --momentum 0 --seed 1"
    rows = []
    for strategy, rate in (("fedavg", 0.2), ("fedprox", 0.2), ("scaffold", 0.2), ("scaffold", 0.1), ("fednova", 0.2)):
        out = runs / f"strategy-{strategy}-{rate}-{rounds}"
        result = take_turns(out, f"{common} --lr {rate} --strategy {strategy} --proximal-mu 0.01")
        accuracies = [100 * each["accuracy"] for each in rounds_of(out)]
        say(f"{strategy}, lr {rate}: {', '.join(f'{each:.2f}' for each in accuracies)}, {result['seconds']:.0f} s")
        best, last, published = max(accuracies), accuracies[-1], PUBLISHED[strategy]
        rows.append(f"| {strategy} | {rate} | {best:.2f} | {last:.2f} | {rounds} | {published:.2f} |")
        heading = [f"`dphero federate {common}`: without privacy, one local epoch a round. Accuracy in %."]
        write("strategies", heading, "| strategy | lr | best round | last round | rounds | niid_bench |", rows)


# -- scale ---------------------------------------------------------------------------------------------------------


def scale(runs: Path) -> None:
    rows = []
    for clients in (10, 100, 1000):
        out = runs / f"scale-{clients}"
        settings = f"--data mnist --clients {clients} --sampled 10 --rounds 6 --lot 32 --lr 0.5 --momentum 0"
        settings += f" --local-epochs {clients / 1000:g}"  # 2 steps, whatever a client holds
        cost = federate(out, f"{settings} --noise-multiplier 1 --accountant rdp --seed 1")
        say(f"{clients} clients: {cost}")
        rows.append(f"| {clients} | {cost['each']} | {cost['first']} | {cost['memory']} |")
        heading = [
            "10 clients are sampled in each of 6 rounds, and each takes 2 steps of 32 examples, whatever it holds.",
            "Seconds are processor time, and memory is the peak, of all processes of the run: the server, Ray, and one",
            "worker for all clients. The first round has loaded the data, twice, and asked every client's name.",
        ]
        header = "| clients | seconds a round | seconds until the first is done | memory (MB) |"
        write("scale", heading, header, rows)


# -- FedFed's shared data ------------------------------------------------------------------------------------------


def sharing(runs: Path) -> None:
    common = "--data mnist --clients 10 --sampled 5 --rounds 5 --partition dirichlet --alpha 0.1 --seed 1"
    rows = []
    for shared in SHARED:
        price = "--epsilon 8" if shared != "distilled-published" else "--noise-multiplier 0.8 --unsound"
        out = runs / f"shared-{shared}"
        result = take_turns(out, f"{common} --shared {shared} {price}")
        epsilon = "∞" if result["epsilon"] is None else f"{result['epsilon']:.3f}"
        accuracies = [f"{100 * each['accuracy']:.2f}" for each in rounds_of(out)]
        say(f"{shared}: {', '.join(accuracies)}, ε {epsilon}, {result['seconds']:.0f} s")
        rows.append(f"| {shared} | {' | '.join(accuracies)} | {epsilon} |")
        heading = [f"`dphero federate {common}`, ε = 8 for each client. Accuracy in % after each round."]
        numbers = " | ".join(str(number) for number in range(1, 6))
        write("sharing", heading, f"| `--shared` | {numbers} | ε largest |", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("table", "strategies", "scale", "sharing"))
    parser.add_argument("--runs", type=Path, default=Path("runs/federated"))
    parser.add_argument("--seed", type=int, action="append", help="of table; 1, 2 and 3 unless given")
    parser.add_argument("--method", action="append", help="of table; dp-hero and dp-sgd unless given")
    parser.add_argument("--rounds", type=int, default=8, help="of strategies")
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if options.part == "table":
        table(options.runs, options.seed or [1, 2, 3], options.method or ["dp-hero", "dp-sgd"])
    elif options.part == "strategies":
        strategies(options.runs, options.rounds)
    elif options.part == "scale":
        scale(options.runs)
    else:
        sharing(options.runs)


if __name__ == "__main__":
    main()
