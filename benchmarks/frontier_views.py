"""The search for the settings of `scatter-views` and `learned-views`: one training for each, on held-out images.

    python benchmarks/frontier_views.py cifar10 learned-views --epsilon 8 --lr 0.5 1 --steps 500 [--json FILE]
    python benchmarks/frontier_views.py cifar10 scatter-views --autocast --pairs 8:0.25:1250 3:0.5:300 3:0.25:600

The last 5,000 training images are for validation, and no test image is looked at. Features are computed once. With
`--loss each` the loss is the mean of the views' losses, and not that of their mean output. What was found:
benchmarks/results/frontier/search-views.jsonl. The search is not charged.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero import PrivacyEngine, models
from dphero import data as datasets
from dphero.accounting import calibrate_noise_multiplier
from dphero.experiments.runs.evaluation import features
from dphero.methods.trainers.averaging import WeightAverage
from dphero.models.features import FeatureModel
from dphero.models.views import MeanOverViews

_HELD_OUT, _DELTA, _CHUNK = 5000, 1e-5, 500


class EachView(nn.Module):
    """A network's output for every view."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.flatten(0, 1).float()).unflatten(0, x.shape[:2])


@torch.no_grad()
def accuracy(head: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    found = torch.cat([head(part).argmax(1) for part in inputs.split(_CHUNK)])
    return round(100 * (found == labels).float().mean().item(), 2)


def trained(name: str, x: Tensor, y: Tensor, setting: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Train on all but the held-out images, and return how many of these are classified rightly."""
    start, kept = time.perf_counter(), len(x) - _HELD_OUT
    model = models.build(name, options.shape, options.classes, seed=0)
    assert isinstance(model, FeatureModel) and isinstance(model.head, MeanOverViews)
    head = model.head.to(x.device)
    if options.taught:
        weights = torch.load(options.taught, map_location=x.device, weights_only=True)
        head.network.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
    module: nn.Module = head if setting["loss"] == "mean" else EachView(head.network)
    averages = {kind: WeightAverage(head, kind) for kind in ("ema", "late")}
    optimizer = torch.optim.SGD(module.parameters(), lr=setting["lr"], momentum=0.9)
    rate, engine = setting["lot"] / kept, PrivacyEngine()
    _, _, loader = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=TensorDataset(x[:kept], y[:kept]),
        noise_multiplier=calibrate_noise_multiplier(setting["epsilon"], _DELTA, rate, setting["steps"]),
        max_grad_norm=1.0,
        sample_rate=rate,
        expected_batch_size=setting["lot"],
        dataset_size="public",
        guidance="isotropic",
        seed=0,
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for inputs, labels in itertools.islice(batches, setting["steps"]):
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=options.autocast):
            out = module(inputs)
        if setting["loss"] == "each":
            out, labels = out.flatten(0, 1), labels.repeat_interleave(out.shape[1])
        F.cross_entropy(out.float(), labels).backward()
        optimizer.step()
        for average in averages.values():
            average.take()
    engine.detach()
    found = {"last": head, **{kind: average.mean for kind, average in averages.items()}}
    result = {kind: accuracy(each.eval(), x[kept:], y[kept:]) for kind, each in found.items()}
    return {**setting, **result, "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("model", choices=["scatter-views", "learned-views"])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[8.0])
    parser.add_argument("--lr", type=float, nargs="+", default=[0.5])
    parser.add_argument("--steps", type=int, nargs="+", default=[500])
    parser.add_argument("--lot", type=int, nargs="+", default=[4096])
    parser.add_argument("--loss", nargs="+", default=["mean"], choices=["mean", "each"])
    parser.add_argument("--autocast", action="store_true", help="in bfloat16")
    parser.add_argument("--taught", type=Path, help="first weights of the small network, by teach_views.py")
    parser.add_argument("--pairs", nargs="+", metavar="EPSILON:LR:STEPS", help="these, and not all combinations")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no training after that time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = datasets.load(options.data)
    images, y = data.train.images.to(device), data.train.labels.to(device)
    options.shape, options.classes = tuple(images.shape[1:]), len(data.classes)
    model = models.build(options.model, options.shape, options.classes).to(device)
    assert isinstance(model, FeatureModel)
    x = features(model, images)
    names = ("epsilon", "lr", "steps", "lot", "loss")
    combinations = itertools.product(*(getattr(options, name) for name in names))
    if options.pairs:
        given = [each.split(":") for each in options.pairs]
        combinations = ((float(e), float(lr), int(t), options.lot[0], options.loss[0]) for e, lr, t in given)
    for values in combinations:
        if time.monotonic() - began > options.seconds:
            break
        setting = dict(zip(names, values, strict=True))
        line = {"data": options.data, "model": options.model, **trained(options.model, x, y, setting, options)}
        line |= {"taught": options.taught.name} if options.taught else {}
        line |= {"autocast": True} if options.autocast else {}
        print(json.dumps(line), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
