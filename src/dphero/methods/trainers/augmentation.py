"""Several views of each private image, whose gradients are averaged before the example is clipped."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

_PADDING = 4
"""Pixels by which an image of 32 is moved at most; smaller ones by as many of theirs."""


class OnViews(nn.Module):
    """A network that is given several views of each example, (examples, views, ...): one output for each view.

    With a loss that is a mean over examples and views, an example's gradient is the mean over its views: it is clipped
    as one, so an example moves the released sum by the clip norm, however many views there are.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x.flatten(0, 1))
        return out.unflatten(0, x.shape[:2])


def random_views(images: Tensor, views: int, augmentation: str) -> Tensor:
    """Return (examples, views, channels, height, width): each image as many times, moved and mirrored at random.

    Numbers are drawn from torch's own generator, on the images' device, which the private loader seeds with a secret
    for each batch. Nothing is mixed between images.
    """
    moved, mirrored = AUGMENTATIONS[augmentation]
    count, (channels, height, width) = len(images) * views, images.shape[1:]
    many = images.unsqueeze(1).expand(-1, views, -1, -1, -1).flatten(0, 1)
    device = images.device
    down, right = torch.arange(height, device=device), torch.arange(width, device=device)
    rows, columns = down.expand(count, -1), right.expand(count, -1)
    if mirrored:
        turn = torch.rand(count, 1, device=device) < 0.5
        columns = torch.where(turn, columns.flip(1), columns)
    if moved:
        most = (_padding(height), _padding(width))
        steps = [torch.randint(-most[axis], most[axis] + 1, (count, 1), device=device) for axis in range(2)]
        rows, columns = _reflected(rows + steps[0], height), _reflected(columns + steps[1], width)
    flat = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).view(count, 1, height * width)
    seen = many.flatten(2).gather(2, flat.expand(-1, channels, -1))
    return seen.view(len(images), views, channels, height, width)


def _padding(size: int) -> int:
    return max(1, _PADDING * size // 32)


def _reflected(places: Tensor, size: int) -> Tensor:
    """Return which pixel is seen beyond an edge: that as far inside of it."""
    inside = places.abs()
    return torch.where(inside >= size, 2 * (size - 1) - inside, inside)


AUGMENTATIONS: Mapping[str, tuple[bool, bool]] = {
    "crop": (True, False),
    "crop-flip": (True, True),
    "flip": (False, True),
}
"""By name: whether images are moved by some pixels, and whether they are mirrored."""
