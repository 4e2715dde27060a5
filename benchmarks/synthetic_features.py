"""What dp-randp's features are worth before fine-tuning: linear classifiers on them, without and with privacy.

    python benchmarks/synthetic_features.py [--data cifar10] [--epsilon 1] [--json FILE]

The network is the one that `dphero train --data DATA --method dp-randp` begins with: what it learned from synthetic
images is taken from the folder of the data sets, or learned first (minutes on a GPU, days on a CPU). The data must be
there: `dphero data get cifar10`. Private classifiers are DP-SGD's, with lots of 4096 and 240 steps; their learning rate
is the best of three, by the test images.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero import PrivacyEngine
from dphero.experiments import resolve
from dphero.experiments.runs.preparation import prepare
from dphero.methods import make
from dphero.methods.trainers.head import headless

_LOT, _STEPS = 4096, 240


@torch.no_grad()
def embedded(body: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([body(part) for part in images.split(100)])  # more would leave a CPU's cache


def accuracy(linear: nn.Linear, features: Tensor, labels: Tensor) -> float:
    return round(100 * (linear(features).argmax(1) == labels).float().mean().item(), 2)


def classifier(width: int, classes: int, device: torch.device) -> nn.Linear:
    linear = nn.Linear(width, classes).to(device)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return linear


def without_privacy(features: Tensor, labels: Tensor, classes: int) -> nn.Linear:
    linear = classifier(features.shape[1], classes, features.device)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(linear(features), labels) + 1e-6 * linear.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return linear


def with_privacy(features: Tensor, labels: Tensor, classes: int, epsilon: float, lr: float) -> nn.Linear:
    """DP-SGD; the mean of the last 60 steps' weights is returned."""
    linear = classifier(features.shape[1], classes, features.device)
    mean = torch.optim.swa_utils.AveragedModel(linear)
    optimizer = torch.optim.SGD(linear.parameters(), lr=lr)
    engine = PrivacyEngine()
    _, _, loader = engine.make_private_with_epsilon(
        module=linear,
        optimizer=optimizer,
        data_loader=TensorDataset(features, labels),
        target_epsilon=epsilon,
        target_delta=1e-5,
        steps=_STEPS,
        max_grad_norm=1.0,
        guidance="isotropic",
        sample_rate=_LOT / len(features),
        expected_batch_size=_LOT,
        seed=0,
    )
    while engine.steps < _STEPS:
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(linear(inputs), targets).backward()
            optimizer.step()
            if engine.steps > _STEPS - 60:
                mean.update_parameters(linear)
            if engine.steps == _STEPS:
                break
    engine.detach()
    released: nn.Linear = mean.module
    return released


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    recipe = resolve({"data": options.data, "method": "dp-randp", "epsilon": options.epsilon, "seed": 0})
    task, data = prepare(recipe)
    trainer = make("dp-randp", recipe.options).start(task)
    for _ in trainer.prepare():
        pass
    body, head = headless(task.module.eval()), trainer.head  # type: ignore[attr-defined]
    train, test = embedded(body, task.images), embedded(body, data.test.images.to(task.device))
    labels, answers = task.train.tensors[1], data.test.labels.to(task.device)
    size = train.norm(dim=1).median()
    kinds = {"as they are": (train / size, test / size), "whitened": (head.whitened(train), head.whitened(test))}
    report: dict[str, Any] = {"data": options.data, "recipe": dict(recipe.options), "epsilon": options.epsilon}
    linear = without_privacy(kinds["whitened"][0], labels, task.classes)
    report["without privacy"] = accuracy(linear, kinds["whitened"][1], answers)
    print(json.dumps(report), flush=True)
    for kind, (inputs, further) in kinds.items():
        found = {}
        for lr in (8.0, 15.0, 30.0):
            linear = with_privacy(inputs, labels, task.classes, options.epsilon, lr)
            found[lr] = accuracy(linear, further, answers)
        report[f"with privacy, features {kind}"] = {"accuracy": max(found.values()), "by learning rate": found}
        print(kind, found, flush=True)
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
