"""Fixed features that know of synthetic images: scaled or whitened by how they vary over them, or learned from them.

Nobody is in these images, leaves fallen on one another and coloured noise, so such features cost no privacy. They are
prior knowledge all the same: figures reached with them are not figures from nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from dphero.guidance.prior.processes import PROCESSES
from dphero.models.wide_resnet import wide_resnet

_IMAGES, _FEW_IMAGES = 1024, 256
_FLOOR = 0.03  # of the mean eigenvalue
_LEAST_SCALE = 0.05  # of the mean
_EXPONENT = 0.25
_GRID = 4
_WEIGHTS = Path(__file__).parent / "weights" / "wrn-16-4-network.bin"


def synthetic_images(shape: tuple[int, int, int], count: int = _IMAGES) -> Tensor:
    """Return images of two random processes, half of them each; always the same."""
    random = Generator().manual_seed(1)
    return torch.cat([PROCESSES[name](count // 2, shape, random) for name in ("leaves", "spectrum")])


class Mirrored(nn.Module):
    """The sum of what a transform makes of an image and of its mirror image: left and right are the same to it."""

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.transform(x) + self.transform(x.flip(-1))
        return out


class Whitened(nn.Module):
    """A transform's outputs x as (D + floor)^-a (x - m) / s, from their mean m, spread s and covariance V D Vᵀ.

    All three are those of the outputs for synthetic images, s of each number by itself; a = ¼ goes half of the way to
    outputs that are uncorrelated. Where a direction is not seen among synthetic images, D is 0.
    """

    mean: Tensor
    scale: Tensor
    vectors: Tensor
    gains: Tensor
    rest: Tensor

    def __init__(self, transform: nn.Module, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.transform = transform
        with torch.no_grad():
            seen = torch.cat([transform(part).flatten(1) for part in synthetic_images(shape).split(64)]).double()
        mean, scale = seen.mean(0), seen.std(0)
        scale = scale + _LEAST_SCALE * scale.mean()
        rows = (seen - mean) / scale / len(seen) ** 0.5
        values, left = torch.linalg.eigh(rows @ rows.T)
        kept = values > 1e-6 * values[-1]
        values, vectors = values[kept], rows.T @ left[:, kept] * values[kept].rsqrt()
        floor = _FLOOR * values.sum() / rows.shape[1]
        rest = floor**-_EXPONENT
        constants = {
            "mean": mean,
            "scale": scale,
            "vectors": vectors,
            "gains": (values + floor) ** -_EXPONENT - rest,
            "rest": rest,
        }
        for name, value in constants.items():
            self.register_buffer(name, value.float())

    def forward(self, x: Tensor) -> Tensor:
        flat = (self.transform(x).flatten(1) - self.mean) / self.scale
        return flat * self.rest + ((flat @ self.vectors) * self.gains) @ self.vectors.T


class PrincipalChannels(nn.Module):
    """The maps of a transform in the directions in which channels vary most over synthetic images, half whitened.

    At each place, (D + floor)^-¼ Vᵀ (x − m) / s from the channels' mean m, spread s and covariance V D Vᵀ over all
    places of these images; the first ``kept`` directions.
    """

    mean: Tensor
    matrix: Tensor

    def __init__(self, transform: nn.Module, shape: tuple[int, int, int], kept: int) -> None:
        super().__init__()
        self.transform = transform
        with torch.no_grad():
            images = synthetic_images(shape, _FEW_IMAGES)  # each has many places
            parts = [transform(part).movedim(1, -1).flatten(0, -2) for part in images.split(64)]
        seen = torch.cat(parts).double()
        mean, scale = seen.mean(0), seen.std(0)
        scale = scale + _LEAST_SCALE * scale.mean()
        values, vectors = torch.linalg.eigh(torch.cov(((seen - mean) / scale).T))
        values, vectors = values[-kept:].clamp(min=0), vectors[:, -kept:]
        matrix = (vectors * (values + _FLOOR * values.mean()) ** -_EXPONENT) / scale.unsqueeze(1)
        self.register_buffer("mean", mean.float())
        self.register_buffer("matrix", matrix.float())

    def forward(self, x: Tensor) -> Tensor:
        maps = self.transform(x)
        turned = (maps.flatten(2).mT - self.mean) @ self.matrix
        return turned.mT.unflatten(2, maps.shape[2:])


class Stages(nn.Module):
    """What two stages of a wide residual network see, at so many places each; it has learned from synthetic images.

    Its weights were learned by alignment and uniformity (see the method ``dp-randp``) from what random networks paint.
    """

    def __init__(self, places: tuple[int, int] = (_GRID, _GRID)) -> None:
        super().__init__()
        self.places = places
        layers = list(wide_resnet(3, 10).children())
        self.first, self.second = nn.Sequential(*layers[:5]), nn.Sequential(*layers[5:9])
        weights = torch.load(_WEIGHTS, map_location="cpu", weights_only=True)
        both = nn.Sequential(*self.first, *self.second)
        both.load_state_dict({name: value.float() for name, value in weights.items()})
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        coarse = self.first(x)
        seen = [F.relu(coarse), self.second(coarse)]
        return torch.cat([F.adaptive_avg_pool2d(each, self.places) for each in seen], 1)


class SideBySide(nn.Module):
    """The maps of several transforms, which have the same places."""

    def __init__(self, transforms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.transforms = nn.ModuleList(transforms)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([transform(x) for transform in self.transforms], 1)


class Joined(nn.Module):
    """Several transforms' outputs side by side, each brought to norm 1."""

    def __init__(self, transforms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.transforms = nn.ModuleList(transforms)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.normalize(transform(x).flatten(1)) for transform in self.transforms], 1)
