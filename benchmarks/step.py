"""What a private training step costs: time as a ratio to plain SGD, and peak memory.

    python benchmarks/step.py --processes 5 --json benchmarks/results/step-cpu.json
    python benchmarks/step.py --device cuda --models wrn-16-4 transformer --compile --json ...

Every system takes the same kind of step: draw a batch of a fixed size by index, forward, backward, step. (Those called
`poisson` draw lots of varying size, of which plain SGD's is the mean, as private training does.) In each round
every system, in random order, takes 10 steps, so that each round has one renewal of the guidance. A ratio is (system /
plain SGD) of one round; reported are its median and its quartiles over the rounds. Opacus, which has nothing to renew,
takes as many steps as fit in the time of plain SGD's, at least one, so that it does not stretch the run.

Where memory lies, and what else the process has done, speeds a system up or slows it down by a tenth and more, plain
SGD too, for as long as the process lives. With `--processes N` each system is therefore alone with plain SGD in N
processes of its own, the systems taking turns; reported are the ratios of all rounds together, and each process's
median. `--against isotropic` puts dphero's isotropic noise in plain SGD's place: what guidance adds.

Much of that luck is the kernel's: what C's allocator gives back at the end of a step it has to ask for again in the
next, page by page, and how much that is depends on what happens to lie where. With `--keep-memory` it gives nothing
back (glibc only), and processes agree better.

Memory is measured in a process of its own for each system. On a CPU it is the kernel's high-water mark of resident
memory (VmHWM of /proc/self/status, Linux only) over six steps, above what was resident before the first, the median of
nine processes; on a GPU it is the peak of what torch's allocator reserved over five steps, above what it had reserved
before the first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from _models import MODELS, batch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Step = Callable[[], None]

_MEMORY_PROCESSES = 9
"""Processes that measure the memory of one system on a CPU, where it varies."""

_LONG = 1.0
"""Seconds of plain SGD's part of a round beyond which there are few rounds."""


def plain(model: nn.Module, x: Tensor, y: Tensor, rows: int, compiled: bool) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        index = torch.randperm(len(x), device=x.device)[:rows]
        optimizer.zero_grad()
        F.cross_entropy(run(x[index]), y[index]).backward()
        optimizer.step()

    return step


def plain_with_noise(model: nn.Module, x: Tensor, y: Tensor, rows: int, compiled: bool) -> Step:
    """Plain SGD with one torch normal added to each entry of the gradient: what noise alone costs at least."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = torch.compile(model) if compiled else model
    noise = [torch.empty_like(parameter) for parameter in model.parameters()]

    def step() -> None:
        index = torch.randperm(len(x), device=x.device)[:rows]
        optimizer.zero_grad()
        F.cross_entropy(run(x[index]), y[index]).backward()
        for parameter, room in zip(model.parameters(), noise, strict=True):
            assert parameter.grad is not None
            parameter.grad.add_(room.normal_(0.0, 1.0 / rows))
        optimizer.step()

    return step


def dphero(guidance: str, graphs: bool | str = "auto", sampling: str = "shuffle") -> Callable[..., Step]:
    def make(model: nn.Module, x: Tensor, y: Tensor, rows: int, compiled: bool) -> Step:
        from dphero import PrivacyEngine

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = PrivacyEngine()
        _, _, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=TensorDataset(x, y),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            guidance=guidance,
            cuda_graphs=graphs,
            expected_batch_size=rows,
            dataset_size="public",
            sampling=sampling,
        )
        run = torch.compile(model) if compiled else model

        def batches() -> Iterator[Any]:
            while True:
                yield from loader

        stream = batches()

        def step() -> None:
            inputs, labels = next(stream)
            optimizer.zero_grad()
            F.cross_entropy(run(inputs), labels).backward()
            optimizer.step()

        return step

    return make


def with_fresh_memory(make: Callable[..., Step]) -> Callable[..., Step]:
    """The same without memory that layers use again at each batch: what recycled buffers are worth."""

    def made(*arguments: Any) -> Step:
        from dphero.numerics.buffers import RefCountedBuffer, ReusableBuffer

        lends = {
            RefCountedBuffer: lambda self, like, rows, columns: like.new_empty(rows, columns),
            ReusableBuffer: lambda self, borrower, like, shape: like.new_empty(shape),
        }
        step = make(*arguments)

        def fresh() -> None:
            with ExitStack() as stack:
                for kind, lend in lends.items():
                    stack.enter_context(patch.object(kind, "lend", lend))
                step()

        return fresh

    return made


def opacus(mode: str) -> Callable[..., Step]:
    def make(model: nn.Module, x: Tensor, y: Tensor, rows: int, compiled: bool) -> Step:
        import warnings

        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader

        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(x, y), batch_size=rows)
        criterion: Any = nn.CrossEntropyLoss()
        arguments: dict[str, Any] = {"poisson_sampling": False, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=criterion,
            grad_sample_mode=mode,
            **arguments,
        )
        private, optimizer = made[0], made[1]
        if mode == "ghost":
            criterion = made[2]
        optimizer.attach_step_hook(lambda _: None)  # the step alone: no accountant

        def step() -> None:
            index = torch.randperm(len(x), device=x.device)[:rows]
            optimizer.zero_grad()
            criterion(private(x[index]), y[index]).backward()
            optimizer.step()

        return step

    return make


SYSTEMS: dict[str, Callable[..., Step]] = {
    "plain": plain,
    "plain+noise": plain_with_noise,
    "isotropic": dphero("isotropic"),
    "pca": dphero("pca"),
    "isotropic-fresh": with_fresh_memory(dphero("isotropic")),
    "isotropic-eager": dphero("isotropic", graphs=False),
    "pca-eager": dphero("pca", graphs=False),
    "isotropic-graphs": dphero("isotropic", graphs=True),
    "pca-graphs": dphero("pca", graphs=True),
    "pca-poisson": dphero("pca", sampling="poisson"),
    "pca-graphs-poisson": dphero("pca", graphs=True, sampling="poisson"),
    "opacus-ghost": opacus("ghost"),
    "opacus-hooks": opacus("hooks"),
}


def build(system: str, name: str, rows: int, device: str, compiled: bool) -> Step:
    torch.manual_seed(0)
    make_model, shape = MODELS[name]
    x, y = batch(shape, 4 * rows, device)
    return SYSTEMS[system](make_model().to(device), x, y, rows, compiled)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Step, steps: int, device: str, clock: Callable[[], float]) -> float:
    """Return the seconds of one step, over some of them."""
    wait(device)
    start = clock()
    for _ in range(steps):
        step()
    wait(device)
    return (clock() - start) / steps


Times = dict[str, list[tuple[float, float]]]
"""For each system, the seconds of one step in each round, with those of what it is compared to."""


def time_systems(name: str, rows: int, options: argparse.Namespace) -> tuple[Times, dict[str, int]]:
    """Time all systems in this process; return the times, and the steps that each took in a round."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    shuffle = random.Random(0).shuffle
    base = options.against
    systems = [base, *(system for system in options.systems if system != base)]
    made = {system: build(system, name, rows, options.device, options.compile) for system in systems}
    for step in made.values():
        step()  # the first step examines the model
    seconds = {system: timed(step, 1, options.device, clock) for system, step in made.items()}
    steps = dict.fromkeys(systems, options.steps)
    for system in systems:
        if system.startswith("opacus"):
            steps[system] = max(1, min(options.steps, round(options.steps * seconds[base] / seconds[system])))
        timed(made[system], min(options.warmup, steps[system]), options.device, clock)
    rounds = options.rounds or (15 if options.steps * seconds[base] < _LONG else 5)
    times: Times = {system: [] for system in systems}
    for _ in range(rounds):
        shuffle(systems)
        found = {system: timed(made[system], steps[system], options.device, clock) for system in systems}
        for system, value in found.items():
            times[system].append((value, found[base]))
    return times, steps


def time_apart(name: str, options: argparse.Namespace) -> tuple[list[Times], dict[str, int]]:
    """Time each system in processes of its own, with what it is compared to; return the times of each process."""
    found: list[Times] = []
    steps: dict[str, int] = {}
    for number in range(options.processes):
        for system in [each for each in options.systems if each != options.against]:
            command = [sys.executable, __file__, "--times-of", system, *sys.argv[1:], "--models", name]
            out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(options))
            times, each = json.loads(out.stdout.strip().splitlines()[-1])
            found.append(times)
            steps.update(each)
            ratio = statistics.median(seconds / unit for seconds, unit in times[system])
            print(f"  {name} {system}, process {number + 1} of {options.processes}: {ratio:.3f}", file=sys.stderr)
    return found, steps


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables of a process that times a system."""
    kept = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 40)}
    return {**os.environ, **(kept if options.keep_memory else {})}


def summary(system: str, base: str, processes: list[Times], steps: int) -> dict[str, Any]:
    apart = [[seconds / unit for seconds, unit in times[system]] for times in processes if system in times]
    ratios = [ratio for some in apart for ratio in some]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    seconds = [seconds for times in processes for seconds, _ in times.get(system, [])]
    found = {
        "milliseconds": round(1e3 * statistics.median(seconds), 3),
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "rounds": len(ratios),
        "steps": steps,
    }
    if len(apart) > 1 and system != base:
        found["processes"] = [round(statistics.median(some), 3) for some in apart]
    return found


def measure_memory(options: argparse.Namespace, system: str, name: str, rows: int) -> float:
    """Return the peak memory in MiB of some steps of one system, above what was there before the first."""
    command = [sys.executable, __file__, "--memory-of", system, "--models", name, "--rows", str(rows)]
    command += ["--device", options.device, *(["--compile"] if options.compile else [])]
    found = []
    for _ in range(1 if options.device == "cuda" else _MEMORY_PROCESSES):
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        found.append(float(out.stdout.strip().splitlines()[-1]))
    return statistics.median(found)


def memory_of(options: argparse.Namespace) -> None:
    name, rows = options.models[0], options.rows
    step = build(options.memory_of, name, rows, options.device, options.compile)
    if options.device == "cuda":
        before = (
            torch.cuda.memory_reserved()
        )  # reserved, not allocated: graphs keep memory that the latter does not count
        for _ in range(5):
            step()
        print((torch.cuda.max_memory_reserved() - before) / 2**20)
        return
    Path("/proc/self/clear_refs").write_text("5")  # start the kernel's high-water mark anew
    before = resident("VmRSS")
    for _ in range(2 if options.memory_of == "opacus-hooks" else 6):
        step()
    print(resident("VmHWM") - before)


def resident(field: str) -> float:
    """Return a memory figure of this process in MiB, as the kernel reports it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=["lenet", "cifar-cnn", "mlp"], choices=list(MODELS))
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help="all that the device can run, if not given")
    parser.add_argument("--rows", type=int, default=256, help="examples per batch (the transformer takes a quarter)")
    parser.add_argument("--rounds", type=int, help="15 if not given, 5 where plain SGD's 10 steps take above a second")
    parser.add_argument("--steps", type=int, default=10, help="steps in a round; a multiple of 10 is fair to guidance")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="the process's CPU time: for a machine that is shared")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--against", default="plain", choices=list(SYSTEMS), help="what the others are compared to")
    parser.add_argument(
        "--processes", type=int, help="each system alone with what it is compared to, in so many processes"
    )
    parser.add_argument("--keep-memory", action="store_true", help="processes give no memory back to the kernel")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--times-of", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args()
    if options.keep_memory and not options.processes:
        parser.error("--keep-memory is for the processes of --processes")
    if options.systems is None:
        options.systems = [
            name for name in SYSTEMS if options.device == "cuda" or name.split("-")[1:2] not in (["graphs"], ["eager"])
        ]
    return options


def rows_of(name: str, options: argparse.Namespace) -> int:
    return options.rows // 4 if name == "transformer" else options.rows


def main() -> None:
    options = parse()
    if options.memory_of:
        memory_of(options)
        return
    if options.times_of:
        options.systems = [options.against, options.times_of]
        print(json.dumps(time_systems(options.models[0], rows_of(options.models[0], options), options)))
        return
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "clock": "cpu" if options.cpu_time else "wall",
        "compile": options.compile,
        "against": options.against,
        "keep_memory": options.keep_memory,
        "models": {},
    }
    for name in options.models:
        rows = rows_of(name, options)
        if options.processes:
            processes, steps = time_apart(name, options)
        else:
            times, steps = time_systems(name, rows, options)
            processes = [times]
        found = {system: summary(system, options.against, processes, steps[system]) for system in steps}
        report["models"][name] = {"rows": rows, "systems": found}
        for system, values in found.items():
            print(f"{name:12s} {system:18s} " + "  ".join(f"{k} {v}" for k, v in values.items()), flush=True)
        write(report, options.json)
        for system, values in found.items() if not options.no_memory else []:
            values["peak_mib"] = round(measure_memory(options, system, name, rows), 1)
            print(f"{name:12s} {system:18s} peak_mib {values['peak_mib']}", flush=True)
            write(report, options.json)


def write(report: dict[str, Any], file: Path | None) -> None:
    """Write what has been measured so far: nothing is lost if the rest is interrupted."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
