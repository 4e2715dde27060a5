"""What a private step of real models costs on a GPU: time and peak memory over plain SGD's, and whether it is exact.

    python benchmarks/real_models.py --json benchmarks/results/real-models.json
    python benchmarks/real_models.py --json benchmarks/results/real-models.json --resume   # what is missing there
    python benchmarks/real_models.py --json benchmarks/results/real-models.json --table
    python benchmarks/real_models.py --device cpu --tiny          # tries the script out

Each model and precision (float32, and bf16 autocast) has a process of its own, in which all systems live. Each takes
some steps alone first: they examine the model and decide what is recorded, and give its peak of reserved memory above
what was there before; the time of the first step over a plain one's is what examining costs. Then all take turns in
rounds, in random order; a ratio is (system / plain SGD) of one round, and the median is printed. *isotropic* and
*pca* are dphero with no option set; *-graphs* and *-eager* are `cuda_graphs=True` and `False`, *-poisson* draws lots of
varying size.

Exact: with hardly any noise and a bound that clips every example, the released gradient of the last of some steps is
compared with that of micro-batches of one, and as a yardstick those of bf16 with those of float32: relative error of
the whole gradient.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to look for a GPU does not begin with it: children do

import torch
from _real_models import REAL_MODELS, RealModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Step = Callable[[], None]
_WARMUP = 40
"""Steps before anything is timed: those that examine and record are among them, and those that wait for their sums."""
_REPEATED = 12
"""Steps after which exactness is looked at: the last of them replays, where passes are recorded."""
_CLIP = 0.01
"""A bound that every example exceeds where exactness is tried."""


def autocast(device: str, precision: str) -> Any:
    return torch.autocast(device, torch.bfloat16, enabled=precision == "bf16")


def plain(model: nn.Module, spec: RealModel, data: TensorDataset, rows: int, device: str, precision: str) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, y = data.tensors

    def step() -> None:
        index = torch.randperm(len(x), device=x.device)[:rows]
        optimizer.zero_grad()
        with autocast(device, precision):
            loss = spec.loss(model(x[index]), y[index])
        loss.backward()
        optimizer.step()

    return step


def private(
    guidance: str, sampling: str = "shuffle", **options: Any
) -> Callable[[nn.Module, RealModel, TensorDataset, int, str, str], Step]:
    def make(model: nn.Module, spec: RealModel, data: TensorDataset, rows: int, device: str, precision: str) -> Step:
        from dphero import PrivacyEngine

        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        _, _, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=data,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            guidance=guidance,
            expected_batch_size=rows,
            dataset_size="public",
            sampling=sampling,
            **options,
        )
        stream = endless(loader)

        def step() -> None:
            inputs, labels = next(stream)
            optimizer.zero_grad()
            with autocast(device, precision):
                loss = spec.loss(model(inputs), labels)
            loss.backward()
            optimizer.step()

        return step

    return make


def opacus(model: nn.Module, spec: RealModel, data: TensorDataset, rows: int, device: str, precision: str) -> Step:
    import warnings

    from opacus import PrivacyEngine

    warnings.simplefilter("ignore")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    wrapped, private_optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=rows),
        poisson_sampling=False,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    private_optimizer.attach_step_hook(lambda _: None)  # the step alone: no accountant
    x, y = data.tensors

    def step() -> None:
        index = torch.randperm(len(x), device=x.device)[:rows]
        private_optimizer.zero_grad()
        with autocast(device, precision):
            loss = spec.loss(wrapped(x[index]), y[index])
        loss.backward()
        private_optimizer.step()

    return step


SYSTEMS: dict[str, Callable[..., Step]] = {
    "plain": plain,
    "isotropic": private("isotropic"),
    "pca": private("pca"),
    "isotropic-poisson": private("isotropic", "poisson"),
    "isotropic-graphs": private("isotropic", cuda_graphs=True),
    "isotropic-eager": private("isotropic", cuda_graphs=False),
    "pca-eager": private("pca", cuda_graphs=False),
    "opacus-hooks": opacus,
}


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def fresh(spec: RealModel, options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(options.device):  # where large weights are drawn quickly
        return spec.make(options.tiny).to(options.device).train()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reserved(device: str) -> float:
    if device != "cuda":
        return 0.0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved() / 2**20


def build(
    system: str, spec: RealModel, data: TensorDataset, rows: int, precision: str, options: argparse.Namespace
) -> tuple[Step, dict[str, Any]]:
    """Return a system's step after some of them, with the seconds of the first and the peak memory in MiB."""
    before, model = reserved(options.device), fresh(spec, options)
    wait(options.device)
    start = time.perf_counter()
    step = SYSTEMS[system](model, spec, data, rows, options.device, precision)
    step()
    wait(options.device)
    found: dict[str, Any] = {"first_step_seconds": round(time.perf_counter() - start, 3)}
    if options.device == "cuda":
        found["first_peak_mib"] = peak() - round(before)
    with heard("dphero.cuda_graphs") as messages:
        for _ in range(options.warmup):
            step()
        wait(options.device)
    if options.device == "cuda":
        found["peak_mib"] = peak() - round(before)
    return step, found | ({"recording": messages} if messages else {})


def peak() -> int:
    return round(torch.cuda.max_memory_reserved() / 2**20)


@contextmanager
def heard(name: str) -> Iterator[list[str]]:
    """Collect what is logged by a part of the library."""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def timed(step: Step, steps: int, device: str) -> float:
    wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return (time.perf_counter() - start) / steps


def measure(name: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what each system took of one model in one precision."""
    spec = REAL_MODELS[name]
    rows = min(spec.rows, 4) if options.tiny else spec.rows
    torch.manual_seed(1)
    data = TensorDataset(*(part.to(options.device) for part in spec.inputs(4 * rows, options.tiny)))
    steps: dict[str, Step] = {}
    found: dict[str, Any] = {}
    for system in options.systems:
        try:
            steps[system], found[system] = build(system, spec, data, rows, precision, options)
        except Exception as error:
            found[system] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
            if options.traceback:
                traceback.print_exc()
    each = timed(steps["plain"], 3, options.device)
    count = 2 * max(1, min(10, round(options.round_seconds / each / 2)))
    times: dict[str, list[float]] = {system: [] for system in steps}
    order, shuffle = list(steps), random.Random(0).shuffle
    for _ in range(options.rounds):
        shuffle(order)
        for system in order:
            times[system].append(timed(steps[system], count, options.device))
    for system in steps:
        ratios = [mine / base for mine, base in zip(times[system], times["plain"], strict=True)]
        found[system] |= {
            "milliseconds": round(1e3 * statistics.median(times[system]), 2),
            "ratio": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
            "first_in_plain_steps": round(found[system]["first_step_seconds"] / statistics.median(times["plain"]), 1),
        }
        if "peak_mib" in found[system]:
            found[system]["memory"] = round(found[system]["peak_mib"] / max(found["plain"]["peak_mib"], 1), 3)
    return found


def micro_batch_gradient(
    spec: RealModel, x: Tensor, y: Tensor, precision: str, options: argparse.Namespace
) -> dict[str, Tensor]:
    """Return the mean of the clipped gradients, one backward pass per example."""
    model = fresh(spec, options)
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for row in range(len(x)):
        model.zero_grad()
        with autocast(options.device, precision):
            loss = spec.loss(model(x[row : row + 1]), y[row : row + 1])
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum().sqrt()
        for name, gradient in gradients.items():
            total[name] += gradient * (_CLIP / max(float(norm), _CLIP)) / len(x)
    return total


def exactness(name: str, precision: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the relative error of a released gradient, and of bf16's micro-batches beside those of float32."""
    from dphero import PrivacyEngine

    spec, rows = REAL_MODELS[name], 4
    torch.manual_seed(2)
    x, y = (part.to(options.device) for part in spec.inputs(rows, options.tiny))
    wanted = micro_batch_gradient(spec, x, y, precision, options)
    model = fresh(spec, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    _, _, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=TensorDataset(x, y),
        noise_multiplier=1e-9,
        max_grad_norm=_CLIP,
        guidance="isotropic",
        expected_batch_size=rows,
        dataset_size="public",
        sampling="shuffle",
    )
    stream = endless(loader)
    for _ in range(_REPEATED):
        inputs, labels = next(stream)
        optimizer.zero_grad()
        with autocast(options.device, precision):
            loss = spec.loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {"error": relative(got, wanted)}
    if precision != "f32":
        found["yardstick"] = relative(micro_batch_gradient(spec, x, y, "f32", options), wanted)
    return found


def relative(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    gap = sum(float((found[name] - wanted[name]).double().square().sum()) for name in wanted if name in found)
    size = sum(float(value.double().square().sum()) for value in wanted.values())
    return float(f"{(gap / size) ** 0.5:.2g}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=list(REAL_MODELS), choices=list(REAL_MODELS))
    parser.add_argument("--precisions", nargs="+", default=["f32", "bf16"], choices=["f32", "bf16"])
    parser.add_argument("--systems", nargs="+", default=["plain", "isotropic", "pca"], choices=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-seconds", type=float, default=0.3, help="about so long each system's part of a round")
    parser.add_argument("--warmup", type=int, default=_WARMUP)
    parser.add_argument("--no-exactness", action="store_true")
    parser.add_argument("--no-timing", action="store_true", help="only whether gradients are exact")
    parser.add_argument("--tiny", action="store_true", help="small models and batches")
    parser.add_argument("--traceback", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too, after each model")
    parser.add_argument("--resume", action="store_true", help="leave out what FILE holds already")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no model after that time")
    parser.add_argument("--table", action="store_true", help="print what FILE holds, and run nothing")
    options = parser.parse_args()
    options.systems = ["plain", *(system for system in options.systems if system != "plain")]
    return options


def table(report: dict[str, Any]) -> str:
    """Return the results as a table: ratios and memory over plain SGD's, first batch in plain steps, and exactness."""
    heads = ("model", "precision", "isotropic", "PCA", "Opacus hooks", "memory", "first batch", "error (yardstick)")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for model, precisions in report["models"].items():
        for precision, found in precisions.items():
            systems, exact = found.get("systems", {}), found.get("exactness", {})
            ratios = [_ratio(systems.get(system)) for system in ("isotropic", "pca", "opacus-hooks")]
            ours = [systems[system] for system in ("isotropic", "pca") if "ratio" in systems.get(system, {})]
            memory = " / ".join(f"{each['memory']:.2f}" for each in ours if "memory" in each)
            first = " / ".join(f"{each['first_in_plain_steps']:.0f}" for each in ours)
            error = f"{exact.get('error', '')}" + (f" ({exact['yardstick']})" if "yardstick" in exact else "")
            lines.append("| " + " | ".join((model, precision, *ratios, memory, first, error)) + " |")
    return "\n".join(lines)


def _ratio(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    return f"{found['ratio']:.2f} ({found['range'][0]:.2f}–{found['range'][1]:.2f})" if "ratio" in found else "fails"


def one(model: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model in one precision."""
    try:
        found: dict[str, Any] = {} if options.no_timing else {"systems": measure(model, precision, options)}
        if not options.no_exactness and not REAL_MODELS[model].random:
            found["exactness"] = exactness(model, precision, options)
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    return found


def apart(model: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own, whose memory nothing else has touched."""
    forks = multiprocessing.get_context("fork")
    here, there = forks.Pipe(duplex=False)

    def work() -> None:
        name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        there.send((name, one(model, precision, options)))

    process = forks.Process(target=work)
    process.start()
    there.close()
    try:
        device, found = here.recv()
    except EOFError:
        device, found = "unknown", {"failed": f"the process ended ({process.exitcode})"}
    process.join()
    return {"device": device, **found}


def load_libraries(models: Sequence[str]) -> None:
    """Import what the models need once, before processes are made."""
    import dphero  # noqa: F401

    with torch.device("meta"):
        for model in models:
            with suppress(Exception):
                REAL_MODELS[model].make(True)


def main() -> None:
    options = parse()
    held = options.resume or options.table
    before = json.loads(options.json.read_text()) if held and options.json and options.json.exists() else None
    if options.table:
        print(table(before or {"models": {}}))
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print("real models are measured on a GPU, and there is none (--device cpu --tiny tries the script out)")
        return
    report: dict[str, Any] = before or {"torch": torch.__version__, "models": {}}
    began = time.perf_counter()
    load_libraries(options.models)
    for model in options.models:
        for precision in options.precisions:
            start = time.perf_counter()
            if precision in report["models"].get(model, {}) or start - began > options.seconds:
                continue
            found = apart(model, precision, options)
            report["device"] = found.pop("device")
            report["models"].setdefault(model, {})[precision] = found
            for system, values in found.get("systems", {}).items():
                shown = "  ".join(f"{key} {value}" for key, value in values.items())
                print(f"{model:16s} {precision:5s} {system:18s} {shown}", flush=True)
            seconds = time.perf_counter() - start
            print(f"{model:16s} {precision:5s} exactness {found.get('exactness')}  ({seconds:.0f} s)", flush=True)
            if options.json is not None:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
