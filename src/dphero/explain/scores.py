"""How much two heat maps agree, and how much a heat map has to do with what the network decides.

``spearman``      rank correlation of two maps over all positions: 1 the same order, 0 unrelated
``top_overlap``   of the hottest fifth of the positions, how many are shared: |A ∩ B| / |A ∪ B|; 0.11 by chance
``faithfulness``  insertion minus deletion: how much more probable the class is where the hottest positions are sharp
                  and the rest is blurred than the other way round; 0 for an order that means nothing

All three are per image, ``nan`` where a map is the same everywhere: it has no order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOP_SHARE = 0.2
"""The share of positions that count as hottest."""
_SHARES = 10  # steps from nothing to all in insertion and deletion
_BLUR = 11  # pixels of the window that blurs, at most a third of the image


def is_empty(maps: Tensor) -> Tensor:
    """Return which maps are the same everywhere."""
    flat = maps.flatten(1)
    return flat.amax(1) == flat.amin(1)


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Return the rank correlation of each pair of maps; equal values share their mean rank."""
    ranks = [_ranks(maps.flatten(1)) for maps in (first, second)]
    a, b = (each - each.mean(1, keepdim=True) for each in ranks)
    found = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
    return torch.where(is_empty(first) | is_empty(second), torch.nan, found)


def top_overlap(first: Tensor, second: Tensor, share: float = TOP_SHARE) -> Tensor:
    """Return the intersection over union of the hottest positions of each pair of maps; cold positions never count."""
    a, b = _hottest(first, share), _hottest(second, share)
    found = (a & b).sum(1) / (a | b).sum(1)
    return torch.where(is_empty(first) | is_empty(second), torch.nan, found.double())


def same_class(first: Tensor, second: Tensor) -> Tensor:
    """Return 1 for each image that two networks give the same class, else 0."""
    return (first == second).double()


@torch.no_grad()
def faithfulness(model: nn.Module, images: Tensor, targets: Tensor, maps: Tensor) -> Tensor:
    """Return insertion minus deletion for each image.

    Both begin and end at the same two images, the sharp one and the blurred one, so that an order of positions that
    has nothing to do with the network scores 0 on average.

    Args:
        model: The network, in evaluation mode.
        images: N×C×H×W.
        targets: The class that each map explains.
        maps: N×H×W.
    """
    blurred = blur(images)
    order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    place = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
    total = torch.zeros(len(images), dtype=torch.float64)
    for step in range(1, _SHARES):
        hottest = (place < step * order.shape[1] / _SHARES).view(-1, 1, *images.shape[2:])
        inserted, deleted = torch.where(hottest, images, blurred), torch.where(hottest, blurred, images)
        total += (_probability(model, inserted, targets) - _probability(model, deleted, targets)).double()
    return torch.where(is_empty(maps), torch.nan, total / (_SHARES - 1))


def blur(images: Tensor) -> Tensor:
    """Return the images without their details: a moving average, twice, over a window of a third of the image."""
    window = min(_BLUR, max(3, min(images.shape[2:]) // 3 // 2 * 2 + 1))
    found = images
    for _ in range(2):
        padded = F.pad(found, (window // 2,) * 4, mode="replicate")
        found = F.avg_pool2d(padded, window, stride=1)
    return found


def _probability(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    return model(images).softmax(1).gather(1, targets.view(-1, 1)).squeeze(1)


def _ranks(flat: Tensor) -> Tensor:
    """Return the mean rank of each value within its row, in float64."""
    found = []
    for row in flat.double():
        _, where, counts = row.unique(sorted=True, return_inverse=True, return_counts=True)
        last = counts.cumsum(0).double()
        found.append((last - (counts.double() - 1) / 2)[where])
    return torch.stack(found)


def _hottest(maps: Tensor, share: float) -> Tensor:
    flat = maps.flatten(1)
    count = max(1, round(share * flat.shape[1]))
    threshold = flat.topk(count, dim=1).values[:, -1:]
    return (flat >= threshold) & (flat > flat.amin(1, keepdim=True))
