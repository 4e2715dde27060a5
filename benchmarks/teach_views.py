"""What the small network of `learned-views` could learn from synthetic images, before it sees private ones.

    python benchmarks/teach_views.py --out FILE [--steps 1500] [--batch 1024]
    python benchmarks/frontier_views.py cifar10 learned-views --autocast --taught FILE --pairs 3:0.5:300 1:0.25:300

It learns as the networks of `dp-randp` do: to know two views of one image, painted by a random network, among many. It
sees them through the fixed features of that model, and its own maps are averaged over all places. A GPU takes a minute
and a half. The file holds its weights, but for the last layer, in half precision. Nobody is in the images, so this
costs no privacy; trained from there it was worse than from random weights (docs/frontier.md).
"""

from __future__ import annotations

import argparse
import time
from io import BytesIO
from pathlib import Path

import torch
from torch import nn

from dphero import models
from dphero._files import write_atomically
from dphero.methods.trainers.pretraining import _Lesson
from dphero.models.features import FeatureModel

_SHAPE = (3, 32, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--process", default="network")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = models.build("learned-views", _SHAPE, 10)
    assert isinstance(model, FeatureModel)
    transform = model.get_submodule("features.0.transform.0")
    body = model.get_submodule("head.network")
    assert isinstance(body, nn.Sequential)
    taught = body[:-2]  # without the last layer
    width = taught[-1].num_channels
    student = nn.Sequential(transform, taught, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)).to(device)
    lesson, start = _Lesson(student, _SHAPE, options.process, options.steps, options.batch), time.perf_counter()
    for _ in lesson.run():
        if lesson.step in (1, 10) or lesson.step % 100 == 0:
            print(f"step {lesson.step}, {time.perf_counter() - start:.1f} s", flush=True)
    print(f"loss {lesson.loss:.4f}")
    weights = {name: value.half().cpu() for name, value in lesson.body[1].state_dict().items()}
    packed = BytesIO()
    torch.save(weights, packed)
    write_atomically(options.out, packed.getbuffer())


if __name__ == "__main__":
    main()
