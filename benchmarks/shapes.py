"""When does the shape of the noise pay, and other levers? Accuracy at the same ε with one thing changed at a time.

    python benchmarks/shapes.py [SETTING ...] [--epsilons 1 3] [--seeds 5] [--minutes 60] [--variants NAME ...]
    python benchmarks/shapes.py --table

Settings are those of SETTINGS below, on MNIST (`dphero data get mnist`), on a GPU where there is one. For each variant
the learning rate, a power of two, is chosen on 5,000 training images that are held out then; the search goes on until
the best rate is not at its edge. Then all 60,000 are trained on, with that rate and further seeds, and the test images
are looked at once, at the end. The search is not charged: ε is that of a training alone.

Every finished training is a line of benchmarks/results/shapes/SETTING.jsonl; whatever is there already is not run
again, so the command may be stopped at any time and given again. --table prints what there is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _models import TransformerBlock
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero import PrivacyEngine, data, models
from dphero.accounting import calibrate_noise_multiplier
from dphero.guidance import PCA, Guidance, History, Isotropic, Prior
from dphero.guidance.prior.processes import PROCESSES
from dphero.methods.trainers.averaging import WeightAverage
from dphero.models import FeatureModel

RESULTS = Path(__file__).parent / "results" / "shapes"
DELTA, HELD_OUT, REFRESH = 1e-5, 5000, 40
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDEST = 8  # doublings of the learning rate, up and down, at which the search ends


@dataclass(frozen=True)
class Setting:
    """What is trained, and how.

    Attributes:
        model: Name of the model.
        lot: Expected size of a lot.
        steps: Lots in a training.
        clip: C.
        optimizer: "sgd" (momentum 0.9) or "adam".
        start: The learning rate at which the search begins.
        searches: Seeds whose mean accuracy decides on a learning rate.
    """

    model: str
    lot: int
    steps: int
    clip: float = 0.1
    optimizer: str = "sgd"
    start: float = 1.0
    searches: int = 2


SETTINGS = {
    "tanh-cnn-short": Setting("tanh-cnn", 512, 120, start=4.0, searches=1),
    "tanh-cnn-adam-short": Setting("tanh-cnn", 512, 120, optimizer="adam", start=2**-8, searches=1),
    "pixels-linear": Setting("linear", 1024, 200, searches=1),
    "scatter-linear": Setting("scatter-linear", 1024, 200, searches=1),
    "tanh-cnn": Setting("tanh-cnn", 2048, 300, start=4.0),
    "tanh-cnn-adam": Setting("tanh-cnn", 2048, 300, optimizer="adam", start=2**-8),
    "transformer-adam": Setting("transformer", 512, 120, optimizer="adam", start=2**-8, searches=1),
}


@dataclass(frozen=True)
class Variant:
    """What is changed against DP-SGD: isotropic noise, flat clipping, the last weights.

    Attributes:
        prior: Settings of a prior, where that shapes noise or step.
        guidance: What shapes the noise otherwise.
        clipping: The clip rule.
        averaging: Which mean of the weights is tested.
    """

    prior: Mapping[str, Any] | None = None
    guidance: Callable[[], Guidance] = Isotropic
    clipping: str = "flat"
    averaging: str | None = None

    def shaped_by(self, network: nn.Module, inputs: Tensor | tuple[int, int, int], seed: int) -> Guidance:
        if self.prior is None:
            return self.guidance()
        return Prior(network, inputs, seed=seed, refresh_every=REFRESH, **self.prior)


VARIANTS = {
    "isotropic": Variant(),
    "pca": Variant(guidance=PCA),
    "prior": Variant(prior={}),
    "prior, step too": Variant(prior={"shapes": "both"}),
    "step alone": Variant(prior={"shapes": "step"}),
    "prior, inputs only": Variant(prior={"side": "right"}),
    "prior, a = 1/2": Variant(prior={"exponent": 0.5}),
    "history": Variant(guidance=History),
    "automatic clipping": Variant(clipping="automatic"),
    "late average": Variant(averaging="late"),
    "exponential average": Variant(averaging="ema"),
}
MAIN = tuple(VARIANTS)[:5]


class PatchTransformer(nn.Module):
    """Two layers of attention over the 16 patches of an image, of width 48; classified from their mean."""

    def __init__(self, side: int = 7, width: int = 48, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.side = side
        self.patches, self.positions = nn.Linear(side * side, width), nn.Embedding((28 // side) ** 2, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(F.unfold(x, self.side, stride=self.side).mT)
        h = h + self.positions(torch.arange(h.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)).mean(1))


@cache
def mnist() -> data.Data:
    return data.load("mnist")


@cache
def examples(model: str) -> tuple[Tensor, Tensor]:
    """Training and test inputs: images, or features where the model begins with fixed ones."""
    network, images = build(model, 0), (mnist().train.images.to(DEVICE), mnist().test.images.to(DEVICE))
    if isinstance(network, FeatureModel):
        with torch.no_grad():
            return network.features(images[0]), network.features(images[1])
    return images


def build(model: str, seed: int) -> nn.Module:
    if model == "transformer":
        torch.manual_seed(seed)
        return PatchTransformer().to(DEVICE)
    if model == "linear":
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).to(DEVICE)
    return models.build(model, (1, 28, 28), 10, seed=seed).to(DEVICE)


def public_inputs(network: nn.Module, seed: int) -> Tensor | tuple[int, int, int]:
    """What guidance looks at: the shape of images; for fixed features, those of pink noise."""
    if not isinstance(network, FeatureModel):
        return (1, 28, 28)
    with torch.no_grad():
        return network.features(PROCESSES["spectrum"](1024, (1, 28, 28), torch.Generator(DEVICE).manual_seed(seed)))


@cache
def sigma(epsilon: float, rate: float, steps: int) -> float:
    return calibrate_noise_multiplier(epsilon, DELTA, rate, steps)


def trained(setting: Setting, variant: str, epsilon: float, lr: float, seed: int, *, search: bool) -> dict[str, Any]:
    """One training; returns its accuracy, on held-out training images in the search, else on the test images."""
    began, whole = time.perf_counter(), build(setting.model, seed)
    network = whole.head if isinstance(whole, FeatureModel) else whole
    train, test = examples(setting.model)
    labels, answers = mnist().train.labels.to(DEVICE), mnist().test.labels.to(DEVICE)
    if search:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
        test, answers = train[order[:HELD_OUT]], labels[order[:HELD_OUT]]
        train, labels = train[order[HELD_OUT:]], labels[order[HELD_OUT:]]
    parameters, own = list(network.parameters()), f"{variant} {epsilon} {lr} {seed} {search}"
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr, momentum=0.9)
    if setting.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters, lr)
    rate, engine = setting.lot / len(train), PrivacyEngine()
    _, _, loader = engine.make_private(
        module=network,
        optimizer=optimizer,
        data_loader=TensorDataset(train, labels),
        noise_multiplier=sigma(epsilon, rate, setting.steps),
        max_grad_norm=setting.clip,
        guidance=VARIANTS[variant].shaped_by(network, public_inputs(whole, seed), seed),
        clipping=VARIANTS[variant].clipping,
        sample_rate=rate,
        expected_batch_size=setting.lot,
        physical_batch_size=256,
        seed=int.from_bytes(hashlib.blake2b(own.encode(), digest_size=7).digest()),  # no noise is used twice
    )
    averaging = VARIANTS[variant].averaging
    average = None if averaging is None else WeightAverage(network, averaging)
    for inputs, targets in forever(loader):
        F.cross_entropy(network(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.take()
        if engine.steps == setting.steps:
            break
    spent = engine.get_epsilon(DELTA, coarse=True)
    engine.detach()
    tested = network if average is None else average.mean
    with torch.no_grad():
        right = sum(
            int((tested.eval()(part).argmax(1) == answer).sum())
            for part, answer in zip(test.split(1000), answers.split(1000), strict=True)
        )
    return {
        "accuracy": round(100 * right / len(test), 2),
        "spent": round(spent, 4),
        "seconds": round(time.perf_counter() - began, 1),
    }


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class Log:
    """Finished trainings, one in each line of a file."""

    def __init__(self, name: str, until: float) -> None:
        self.path, self.setting, self.until = RESULTS / f"{name}.jsonl", SETTINGS[name], until
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.runs = {self._key(run): run for run in map(json.loads, lines)}

    @staticmethod
    def _key(run: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(run[name] for name in ("variant", "epsilon", "lr", "seed", "search"))

    def accuracy(self, variant: str, epsilon: float, lr: float, seed: int, *, search: bool) -> float:
        key = (variant, epsilon, lr, seed, search)
        if key not in self.runs:
            if time.monotonic() > self.until:
                raise TimeoutError
            about = {"variant": variant, "epsilon": epsilon, "lr": lr, "seed": seed, "search": search}
            self.runs[key] = {**about, **trained(self.setting, variant, epsilon, lr, seed, search=search)}
            with self.path.open("a") as file:
                file.write(json.dumps(self.runs[key]) + "\n")
            print(self.path.stem, self.runs[key], flush=True)
        found: float = self.runs[key]["accuracy"]
        return found

    def best_rate(self, variant: str, epsilon: float) -> float:
        """Climb from the setting's learning rate by factors of two; the best is never at the edge of what was tried."""
        found: dict[int, float] = {}

        def at(doublings: int) -> float:
            if doublings not in found:
                lr = self.setting.start * 2.0**doublings
                tries = [
                    self.accuracy(variant, epsilon, lr, seed, search=True)
                    for seed in range(100, 100 + self.setting.searches)
                ]
                found[doublings] = statistics.mean(tries)
            return found[doublings]

        best = 0
        while abs(best) < WIDEST:
            around = max((best - 1, best, best + 1), key=at)
            if around == best:
                break
            best = around
        return self.setting.start * 2.0**best


def run(names: list[str], variants: list[str], epsilons: list[float], seeds: int, minutes: float) -> None:
    until = time.monotonic() + 60 * minutes
    for name in names:
        log = Log(name, until)
        for epsilon in epsilons:
            for variant in variants:
                log.best_rate(variant, epsilon)
        for epsilon in epsilons:
            for seed in range(seeds):  # seed by seed, so that a part of the work is a fair comparison already
                for variant in variants:
                    log.accuracy(variant, epsilon, log.best_rate(variant, epsilon), seed, search=False)


def table() -> str:
    lines = []
    for name, setting in SETTINGS.items():
        log = Log(name, 0.0)
        finals = [run for run in log.runs.values() if not run["search"]]
        if not finals:
            continue
        lines += [
            f"## {name}: lot {setting.lot}, {setting.steps} steps, C {setting.clip:g}, {setting.optimizer}",
            "",
            "| ε | variant | learning rate | seeds | test accuracy | minus isotropic, by seed |",
            "|---|---|---|---|---|---|",
        ]
        for epsilon in sorted({run["epsilon"] for run in finals}):
            by = {
                variant: {run["seed"]: run for run in finals if (run["variant"], run["epsilon"]) == (variant, epsilon)}
                for variant in VARIANTS
            }
            for variant, runs in by.items():
                if not runs:
                    continue
                values, base = [run["accuracy"] for run in runs.values()], by["isotropic"]
                differences = [run["accuracy"] - base[seed]["accuracy"] for seed, run in runs.items() if seed in base]
                rate = next(iter(runs.values()))["lr"]
                against = "–" if variant == "isotropic" else spread(differences, "+.2f")
                lines.append(
                    f"| {epsilon:g} | {variant} | {rate:g} | {len(values)} | {spread(values, '.2f')} | {against} |"
                )
        lines.append("")
    return "\n".join(lines)


def spread(values: list[float], digits: str) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):{digits}} ± {deviation:.2f}" if values else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=list(SETTINGS))
    parser.add_argument("--variants", nargs="+", default=list(MAIN))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no training after that time")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        try:
            run(options.settings, options.variants, options.epsilons, options.seeds, options.minutes)
        except TimeoutError:
            print("time is up: give the command again to go on")
    (RESULTS / "table.md").write_text(table())
    print(table())


if __name__ == "__main__":
    main()
