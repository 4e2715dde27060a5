"""Views of an image: moved and mirrored as told, one gradient for each example, one prediction for each image."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero.gradients import convolution
from dphero.guidance import PCA
from dphero.models import build, require_rowwise
from dphero.models.features import FeatureModel
from dphero.models.views import MeanOverViews, Views
from tests.oracle.micro_batches import check, guided


def test_views_are_moved_and_mirrored() -> None:
    image = torch.arange(64.0).view(1, 1, 8, 8)
    plain = Views(nn.Identity(), mirrored=False)(image)[0]
    both = Views(nn.Identity(), mirrored=True)(image)[0]
    assert plain.shape == both.shape == (8, 1, 8, 8) and plain.dtype == torch.float16
    assert torch.equal(plain[0].float(), image[0]) and torch.equal(both[4].float(), image[0].flip(-1))
    assert torch.equal(plain[5, 0, 3:], image[0, 0, :-3].half()), "moved down by three rows"
    assert torch.equal(plain[5, 0, :3], image[0, 0, 1:4].flip(0).half()), "beyond the edge, what lies inside of it"
    assert len({tuple(each.flatten().tolist()) for each in (*plain, *both[1:])}) == 8 + 4, "four are in both"


def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y)


@pytest.mark.parametrize("shaped", [False, True])
def test_an_example_has_one_gradient_however_many_views_it_has(shaped: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3)
    )
    module = MeanOverViews(network)
    batch = (torch.randn(5, 3, 2, 4, 4), torch.randint(3, (5,)))
    check(module, batch, loss, guided(module, PCA()) if shaped else None)


def test_no_view_has_a_gradient_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[int] = []
    instantiate = convolution.Convolution.instantiate

    def noted(piece: convolution.Convolution) -> Tensor:
        formed.append(len(piece.x))
        return instantiate(piece)

    monkeypatch.setattr(convolution.Convolution, "instantiate", noted)
    test_an_example_has_one_gradient_however_many_views_it_has(False)
    assert all(rows <= 5 for rows in formed)


@pytest.mark.parametrize(("name", "channels"), [("scatter-views", 1), ("scatter-views", 3), ("learned-views", 3)])
def test_features_are_those_of_one_image_alone(name: str, channels: int) -> None:
    model, images = build(name, (channels, 8, 8), 3), torch.rand(6, channels, 8, 8)
    assert isinstance(model, FeatureModel)
    require_rowwise(model.features, images, name)
    assert model(images).shape == (6, 3) and model.features(images).shape[:2] == (6, 8)
