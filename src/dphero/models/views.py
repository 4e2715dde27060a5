"""Several views of an image, moved and mirrored in fixed ways: one network sees each, and its mean output counts.

A private step learns from all views of an example at once: its gradient, which is clipped as one, is less the accident
of where something stands. Prediction takes the same mean. The views are fixed, so a transform sees them once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MOVES = ((0, 0), (2, -3), (-3, -1), (-1, 2), (1, 1), (3, 0), (0, 3), (-2, -2))
"""By how many rows and columns; the first four differ modulo 4, the step of scattering, as far as they can."""
_FARTHEST = 3


class Views(nn.Module):
    """What a transform makes of some views of each image, of shape ``(n, views, …)``, in half precision.

    Args:
        transform: Of images.
        mirrored: Whether half of the views are mirror images; writing is not mirrored.
    """

    def __init__(self, transform: nn.Module, *, mirrored: bool) -> None:
        super().__init__()
        self.transform, self.mirrored = transform, mirrored

    def forward(self, x: Tensor) -> Tensor:
        moves = _MOVES[: len(_MOVES) // 2] if self.mirrored else _MOVES
        seen = [
            self.transform(view)
            for image in ((x, x.flip(-1)) if self.mirrored else (x,))
            for view in _moved(image, moves)
        ]
        return torch.stack([each.half() for each in seen], 1)


class MeanOverViews(nn.Module):
    """A network's mean output over the views of each example, given as ``(n, views, …)``."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x.flatten(0, 1).float())
        return out.unflatten(0, x.shape[:2]).mean(1)


def _moved(images: Tensor, moves: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return images moved by some pixels; beyond an edge one sees what lies inside of it."""
    height, width = images.shape[2:]
    wide = F.pad(images, [_FARTHEST] * 4, mode="reflect")
    return [
        wide[:, :, _FARTHEST - down : _FARTHEST - down + height, _FARTHEST - right : _FARTHEST - right + width]
        for down, right in moves
    ]
