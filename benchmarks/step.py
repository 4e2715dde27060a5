"""What a private training step costs: ratio to plain SGD, interleaved in one process, and peak memory.

    python benchmarks/step.py --out benchmarks/results/step-cpu.json
    python benchmarks/step.py --device cuda --models wrn-16-4 transformer --compile --out ...

Every method takes the same steps on the same batches: draw a batch of a fixed size by index, forward, backward,
step. Rounds alternate between the methods; a ratio is the median over rounds of (method / plain SGD) of that round.
Memory is measured in a process of its own for each method.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from _models import MODELS, batch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Step = Callable[[], None]
DEFAULT_METHODS = ["plain", "dphero-isotropic", "dphero-pca", "opacus-ghost", "opacus-hooks"]


def plain(model: nn.Module, x: Tensor, y: Tensor, rows: int, compiled: bool) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        index = torch.randperm(len(x), device=x.device)[:rows]
        optimizer.zero_grad()
        F.cross_entropy(run(x[index]), y[index]).backward()
        optimizer.step()

    return step


def dphero(guidance: str) -> Callable[..., Step]:
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
            expected_batch_size=rows,
            sampling="shuffle",  # lots of one fixed size, to compare with plain SGD at that size
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


METHODS: dict[str, Callable[..., Step]] = {
    "plain": plain,
    "dphero-isotropic": dphero("isotropic"),
    "dphero-pca": dphero("pca"),
    "opacus-ghost": opacus("ghost"),
    "opacus-hooks": opacus("hooks"),
}


def build(method: str, name: str, rows: int, device: str, compiled: bool) -> Step:
    torch.manual_seed(0)
    make_model, shape = MODELS[name]
    x, y = batch(shape, 4 * rows, device)
    return METHODS[method](make_model().to(device), x, y, rows, compiled)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_methods(name: str, rows: int, options: argparse.Namespace, methods: list[str]) -> dict[str, Any]:
    steps = {method: build(method, name, rows, options.device, options.compile) for method in methods}
    times: dict[str, list[float]] = {method: [] for method in methods}
    for step in steps.values():
        for _ in range(options.warmup):
            step()
    for _ in range(options.rounds):
        for method, step in steps.items():
            wait(options.device)
            start = time.perf_counter()
            for _ in range(options.steps):
                step()
            wait(options.device)
            times[method].append((time.perf_counter() - start) / options.steps)
    return {
        method: {
            "milliseconds": round(1e3 * statistics.median(values), 3),
            "ratio": round(statistics.median(v / p for v, p in zip(values, times["plain"], strict=True)), 3),
            "ratio_spread": [
                round(q, 3)
                for q in statistics.quantiles([v / p for v, p in zip(values, times["plain"], strict=True)], n=4)[::2]
            ],
        }
        for method, values in times.items()
    }


def measure_memory(options: argparse.Namespace, method: str, name: str, rows: int) -> float:
    """Return the peak memory in MiB of some steps of one method, above what was there before the first."""
    command = [sys.executable, __file__, "--memory-of", method, "--models", name, "--rows", str(rows)]
    command += ["--device", options.device, *(["--compile"] if options.compile else [])]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return float(out.stdout.strip().splitlines()[-1])


def memory_of(options: argparse.Namespace) -> None:
    name, rows = options.models[0], options.rows
    step = build(options.memory_of, name, rows, options.device, options.compile)
    if options.device == "cuda":
        before = torch.cuda.memory_allocated()
        step()  # the first step also examines the model
        step()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step()
        print((torch.cuda.max_memory_allocated() - before) / 2**20)
        return
    Path("/proc/self/clear_refs").write_text("5")  # start the kernel's high-water mark anew
    before = resident("VmRSS")
    for _ in range(4):
        step()
    print(resident("VmHWM") - before)


def resident(field: str) -> float:
    """Return a memory figure of this process in MiB, as the kernel reports it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=["lenet", "cifar-cnn", "mlp"], choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=DEFAULT_METHODS, choices=list(METHODS))
    parser.add_argument("--rows", type=int, default=256, help="examples per batch (the transformer takes a quarter)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.memory_of:
        memory_of(options)
        return
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "compile": options.compile,
        "models": {},
    }
    for name in options.models:
        rows = options.rows // 4 if name == "transformer" else options.rows
        # a method that is several times slower would only stretch the rounds: it is timed in a run of its own
        quick = [m for m in options.methods if not m.startswith("opacus-hooks")]
        found = time_methods(name, rows, options, quick)
        if "opacus-hooks" in options.methods:
            found["opacus-hooks"] = time_methods(name, rows, options, ["plain", "opacus-hooks"])["opacus-hooks"]
        for method, values in found.items():
            if not options.no_memory:
                values["peak_mib"] = round(measure_memory(options, method, name, rows), 1)
        report["models"][name] = {"rows": rows, "methods": found}
        for method, values in found.items():
            print(f"{name:12s} {method:17s} " + "  ".join(f"{k} {v}" for k, v in values.items()), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
