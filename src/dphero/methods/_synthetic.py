"""Images that nobody took: random processes, and what a network can learn from them. No real image is involved."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from dphero.data import directory

__all__ = ["PROCESSES", "embed", "last_linear", "pretrain"]

logger = logging.getLogger(__name__)

_VERSION = 1  # of what pre-training does: kept weights of another version are not used
_LEAVES = 24
_EMBEDDING = 64


def _leaves(count: int, shape: tuple[int, int, int], random: Generator) -> Tensor:
    """Dead leaves: shapes of one colour each (diamonds, ellipses, boxes), of many sizes, fallen on one another."""
    channels, height, width = shape

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=random, device=random.device)

    y = torch.linspace(-1, 1, height, device=random.device).view(1, -1, 1)
    x = torch.linspace(-1, 1, width, device=random.device).view(1, 1, -1)
    images = (2 * uniform(count, channels, 1, 1) - 1).expand(count, *shape)
    for _ in range(_LEAVES):
        angle = math.pi * uniform(count, 1, 1)
        down, right = y - 2.4 * (uniform(count, 1, 1) - 0.5), x - 2.4 * (uniform(count, 1, 1) - 0.5)
        radius = 0.08 * uniform(count, 1, 1).clamp(min=0.006).rsqrt()  # many small ones, few large ones
        slim = radius * (0.15 + 0.85 * uniform(count, 1, 1))
        kind = (3 * uniform(count, 1, 1)).long()
        along = (down * angle.cos() + right * angle.sin()).abs() / radius
        across = (right * angle.cos() - down * angle.sin()).abs() / slim
        round_or_box = torch.where(kind == 1, along.square() + across.square(), torch.maximum(along, across))
        inside = (torch.where(kind == 0, along + across, round_or_box) < 1).unsqueeze(1)
        images = torch.where(inside, 2 * uniform(count, channels, 1, 1) - 1, images)
    return images


def _spectrum(count: int, shape: tuple[int, int, int], random: Generator) -> Tensor:
    """Noise whose power falls with frequency, by an exponent of each image's own; natural images have such spectra."""
    channels, height, width = shape
    white = torch.fft.rfft2(torch.randn((count, channels, height, width), generator=random, device=random.device))
    down = torch.fft.fftfreq(height, device=random.device).view(-1, 1)
    right = torch.fft.rfftfreq(width, device=random.device)
    frequency = (down.square() + right.square()).sqrt().clamp(min=1 / max(height, width))
    exponent = 0.5 + 1.5 * torch.rand((count, 1, 1, 1), generator=random, device=random.device)
    images = torch.fft.irfft2(white * frequency**-exponent, s=(height, width))
    spread, mean = torch.std_mean(images, dim=(1, 2, 3), keepdim=True)
    return torch.tanh((images - mean) / spread)


PROCESSES: dict[str, Callable[[int, tuple[int, int, int], Generator], Tensor]] = {
    "leaves": _leaves,
    "spectrum": _spectrum,
}
"""Random processes by name: how many images, of which shape, from which generator; pixels in [-1, 1]."""


def _view(images: Tensor, random: Generator) -> Tensor:
    """Return each image as it might be seen another time: turned, moved, magnified, brighter or darker."""
    count = len(images)

    def spread(width: float) -> Tensor:
        return width * (2 * torch.rand(count, generator=random, device=random.device) - 1)

    angle, size = spread(0.35), (0.8 + spread(0.2))
    rows = [size * angle.cos(), -size * angle.sin(), spread(0.25), size * angle.sin(), size * angle.cos(), spread(0.25)]
    grid = F.affine_grid(torch.stack(rows, 1).view(count, 2, 3), list(images.shape), align_corners=False)
    seen = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    seen = seen * (1 + spread(0.4)).view(-1, 1, 1, 1) + spread(0.3).view(-1, 1, 1, 1)
    return seen + 0.05 * torch.randn(seen.shape, generator=random, device=random.device)


def last_linear(module: nn.Module, example: Tensor) -> nn.Linear:
    """Return the linear layer that a network ends with.

    Raises:
        ValueError: If it does not end with one.
    """
    layers = [child for child in module.modules() if isinstance(child, nn.Linear)]
    if layers:
        with torch.no_grad(), _caught(layers[-1]) as caught:
            outputs = module(example)
        if caught and caught[-1].dim() == 2 and torch.equal(F.linear(caught[-1], *layers[-1].parameters()), outputs):
            return layers[-1]
    raise ValueError(f"the network ({type(module).__name__}) must end with a linear layer: its outputs are none's")


def embed(module: nn.Module, last: nn.Linear, images: Tensor) -> Tensor:
    """Return what goes into the network's last layer."""
    with _caught(last) as caught:
        module(images)
    return caught[-1]


@contextmanager
def _caught(layer: nn.Module) -> Iterator[list[Tensor]]:
    caught: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    try:
        yield caught
    finally:
        handle.remove()


def pretrain(
    module: nn.Module, last: nn.Linear, shape: tuple[int, int, int], process: str, steps: int, batch: int
) -> None:
    """Teach a network, all but its last layer, to know two views of one synthetic image among many.

    Alignment and uniformity (Wang and Isola 2020) of unit vectors z, a linear map of what goes into the last layer:
    the mean of ‖z₁ − z₂‖² over the views of an image, plus ln mean exp(−2 ‖z − z′‖²) over pairs of images.

    The result is a function of the first weights and of the arguments alone, so it is public; it is kept in the folder
    of the data sets and used again.
    """
    kept = directory() / "pretrained" / f"{_name(module, process, steps, batch)}.pt"
    if kept.exists():
        module.load_state_dict(torch.load(kept, map_location="cpu", weights_only=True))
        return
    _train(module, last, shape, process, steps, batch)
    _keep(kept, module.state_dict())


def _train(
    module: nn.Module, last: nn.Linear, shape: tuple[int, int, int], process: str, steps: int, batch: int
) -> float:
    """Take the steps; return the last loss."""
    device = last.weight.device
    random = Generator(device).manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        projection = nn.Linear(last.in_features, _EMBEDDING).to(device)
    body = [parameter for parameter in module.parameters() if all(parameter is not own for own in last.parameters())]
    optimizer = torch.optim.Adam([*body, *projection.parameters()], lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    module.train()
    for _ in range(steps):
        images = PROCESSES[process](batch, shape, random)
        both = torch.cat([_view(images, random), _view(images, random)])
        first, second = F.normalize(projection(embed(module, last, both))).chunk(2)
        spread = sum(torch.pdist(z).square().mul(-2).exp().mean().log() for z in (first, second)) / 2
        loss = (first - second).square().sum(1).mean() + spread
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    module.zero_grad(set_to_none=True)
    return loss.item()


def _name(module: nn.Module, *settings: Any) -> str:
    """A name for what pre-training makes of these weights."""
    digest = hashlib.sha256(repr((_VERSION, str(module), *settings)).encode())
    for name, value in module.state_dict().items():
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def _keep(path: Path, state: dict[str, Any]) -> None:
    """Write weights, whole or not at all; where that is not possible, they are learned again next time."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, partial)
        os.replace(partial, path)
    except OSError as error:
        logger.warning("pre-trained weights could not be kept in %s: %s", path.parent, error)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
