"""Scores against values that were computed in another way."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn

from dphero.explain import heatmaps, scores


def test_spearman_is_scipys_ties_included() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(0, 6, (5, 4, 4), generator=generator).float() for _ in range(2))
    found = scores.spearman(first, second)
    for number in range(5):
        expected = stats.spearmanr(first[number].flatten(), second[number].flatten()).statistic
        assert found[number].item() == pytest.approx(expected, abs=1e-12)


def test_a_map_without_order_has_no_score() -> None:
    flat, some = torch.zeros(1, 4, 4), torch.rand(1, 4, 4)
    assert scores.spearman(flat, some).isnan().all()
    assert scores.top_overlap(flat, some).isnan().all()
    assert scores.faithfulness(nn.Flatten(), torch.rand(1, 1, 4, 4), torch.tensor([0]), flat).isnan().all()


def test_overlap_by_hand() -> None:
    first, second = torch.zeros(1, 5, 4), torch.zeros(1, 5, 4)
    first[0, 0] = torch.tensor([4.0, 3, 2, 1])  # a fifth of 20 is 4
    second[0, 0, 2:] = 1.0
    second[0, 1, :2] = 1.0
    assert scores.top_overlap(first, second).item() == pytest.approx(2 / 6)
    assert scores.top_overlap(first, first).item() == 1
    second[0, 1, :2] = 0  # cold positions never count, though only two are left
    assert scores.top_overlap(first, second).item() == pytest.approx(2 / 4)


def test_overlap_of_unrelated_maps_is_that_of_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.rand(200, 32, 32, generator=generator) for _ in range(2))
    assert scores.top_overlap(first, second).mean().item() == pytest.approx(0.2 / (2 - 0.2), abs=0.005)


class Corner(nn.Module):
    """Class 1 is probable where the upper left corner is bright, brighter than a blurred one."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        corner = images[:, 0, :4, :4].mean((1, 2)) - 0.6
        return torch.stack([-5 * corner, 5 * corner], 1)


def test_faithful_maps_score_high_and_wrong_ones_low() -> None:
    images = -torch.ones(1, 1, 12, 12)
    images[:, :, :4, :4] = 1.0
    heat = torch.rand(1, 12, 12, generator=torch.Generator().manual_seed(0))
    heat[:, :4, :4] += 1
    target = torch.tensor([1])
    right = scores.faithfulness(Corner(), images, target, heat).item()
    wrong = scores.faithfulness(Corner(), images, target, heat.max() - heat).item()
    assert right > 0.5 and wrong < -0.5
    assert right == pytest.approx(-wrong, abs=0.15)


def test_an_order_that_means_nothing_scores_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(300, 1, 12, 12, generator=generator) * 2 - 1
    heat = torch.rand(300, 12, 12, generator=generator)
    found = scores.faithfulness(Corner(), images, torch.ones(300, dtype=torch.int64), heat)
    assert abs(found.mean().item()) < 4 * found.std().item() / math.sqrt(300)


def test_grad_cam_by_hand() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 4))
    images = torch.randn(2, 1, 6, 6)
    assert heatmaps.explained_layer(model, images[0]) == "1"
    found = heatmaps.grad_cam(model, "1", images, [2, 0])
    maps = model[1](model[0](images)).detach()
    for number, target in enumerate((2, 0)):
        weight = model[3].weight[target].view(3, 36).mean(1)  # of a linear layer, the gradient is its weight
        by_hand = (weight.view(3, 1, 1) * maps[number]).sum(0).relu()
        torch.testing.assert_close(found[number], by_hand.detach())


def test_a_network_without_convolutions_is_refused() -> None:
    with pytest.raises(ValueError, match="no convolution"):
        heatmaps.explained_layer(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.zeros(1, 2, 2))


def test_a_layer_that_does_not_fit_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(48, 2))
    with pytest.raises(ValueError, match="no layer '7': it has 0, 1, 2"):
        heatmaps.explained_layer(model, torch.zeros(1, 6, 6), "7")
    with pytest.raises(ValueError, match="'2' has no feature maps"):
        heatmaps.explained_layer(model, torch.zeros(1, 6, 6), "2")
