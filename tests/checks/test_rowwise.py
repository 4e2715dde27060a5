"""Fixed features of private examples: each example's own, and nothing of it is kept."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dphero import data
from dphero.experiments.defaults import resolve
from dphero.experiments.runs.preparation import prepare
from dphero.models import FeatureModel, build, require_rowwise

WIDTH = 6


class Own(nn.Module):
    """A transform of one line."""

    def __init__(self, line: Callable[["Own", Tensor], Tensor]) -> None:
        super().__init__()
        self.line = line
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.line(self, x)


def remembering(module: Own, x: Tensor) -> Tensor:
    module.seen.lerp_(x.mean(0), 0.1)
    return x


def rows(count: int = 40) -> Tensor:
    return torch.rand(count, WIDTH, generator=torch.Generator().manual_seed(0))


MIXING = {
    "the mean": lambda _, x: x - x.mean(0),
    "a little of the mean": lambda _, x: x + 1e-3 * x.mean(0),
    "the first row": lambda _, x: x - x[:1],
    "the row before": lambda _, x: x + x.roll(1, 0),
    "all rows before": lambda _, x: x.cumsum(0),
    "in large batches": lambda _, x: x - x.mean(0) if len(x) > 20 else x,
    "the largest of all": lambda _, x: x / x.max(),
    "ranks": lambda _, x: x.argsort(0).argsort(0),
    "the size of the batch": lambda _, x: x * len(x),
    "order": lambda _, x: x.sort(0).values,
    "who is not a number": lambda _, x: x + 0 * x.nan_to_num(0.0).sum() / (~x.isnan()).all(),
}


@pytest.mark.parametrize("line", MIXING.values(), ids=MIXING)
def test_transforms_that_mix_examples_are_refused(line: Callable[[Own, Tensor], Tensor]) -> None:
    given = rows()
    given[7] = math.nan
    with pytest.raises(ValueError, match="the transform mixes examples: what it gives for one depends on the others"):
        require_rowwise(Own(line), given if line is MIXING["who is not a number"] else rows(), "the transform")


@pytest.mark.parametrize("given", [rows(1), torch.zeros(30, WIDTH), torch.ones(1, WIDTH), torch.ones(3, WIDTH).long()])
def test_mixing_shows_where_all_examples_are_alike(given: Tensor) -> None:
    with pytest.raises(ValueError, match="mixes examples"):
        require_rowwise(Own(lambda _, x: x - x.float().mean(0)), given, "the transform")


def test_statistics_of_the_data_are_not_kept() -> None:
    module = Own(remembering)
    with pytest.raises(ValueError, match=r"the transform must be fixed, .* writes into buffer 'seen'"):
        require_rowwise(module, rows(), "the transform")
    assert not module.seen.any()  # and what was tried has left no trace


def test_a_batch_norm_in_evaluation_mode_has_public_statistics_and_another_has_not() -> None:
    norm = nn.BatchNorm1d(WIDTH).eval()
    require_rowwise(norm, rows(), "the norm")
    with pytest.raises(ValueError, match="mixes examples"):
        require_rowwise(nn.BatchNorm1d(WIDTH, track_running_stats=False).eval(), rows(), "the norm")
    with pytest.raises(ValueError, match="writes into"):
        require_rowwise(norm.train(), rows(), "the norm")


def test_one_row_for_each_example_is_wanted() -> None:
    with pytest.raises(ValueError, match="one row per example"):
        require_rowwise(Own(lambda _, x: x.sum(0, keepdim=True)), rows(), "the transform")


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 16)])
def test_built_in_features_pass_whatever_the_images_are(shape: tuple[int, int, int]) -> None:
    images = torch.rand(40, *shape)
    images[0], images[1, 0, 0, 0], images[2, 0, 0, 0], images[3] = 0, math.nan, math.inf, 1e30
    for given in (images, images[:1], torch.zeros(300, *shape), images[4:] * 1e-20):
        require_rowwise(build("scatter-linear", shape, 10).features, given, "scattering")


def test_random_generators_are_left_as_they_are() -> None:
    module = nn.Dropout(0.5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    require_rowwise(module.eval(), rows(), "the transform")
    require_rowwise(Own(lambda _, x: x * (1 + 0 * torch.rand(()))), rows(), "the transform")
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    assert torch.equal(before[0], after[0]) and before[1] == after[1] and (before[2] == after[2]).all()


# -- models whose features are fixed --------------------------------------------------------------------------


def with_batch_norm(shape: tuple[int, ...], classes: int) -> FeatureModel:
    body = nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(2))
    body.append(nn.Flatten()).requires_grad_(False)
    return FeatureModel(body, nn.Sequential(nn.Dropout(0.1), nn.Linear(16, classes)))


def with_batch_statistics(shape: tuple[int, ...], classes: int) -> FeatureModel:
    body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, affine=False, track_running_stats=False))
    return FeatureModel(body, nn.Linear(64, classes))


def recipe(model: str):
    settings = {"method": "dp-sgd", "epsilon": 1.0, "seed": 1, "model": f"tests.checks.test_rowwise:{model}"}
    return resolve({"data": "digits", **settings})


def test_features_stay_in_evaluation_mode() -> None:
    model = with_batch_norm((1, 8, 8), 10)
    for mode in (True, False, True):
        model.train(mode)
        assert model.training == model.head[0].training == mode
        assert not any(child.training for child in model.features.modules())


def test_a_backbone_with_batch_norm_learns_nothing_of_private_images() -> None:
    found = data.load("digits")
    task, _ = prepare(recipe("with_batch_norm"), found)
    norm = task.model.features[1]
    assert not norm.running_mean.any() and (norm.running_var == 1).all() and norm.num_batches_tracked == 0
    with torch.no_grad():
        alone = task.model.features(found.train.images[5:6])
    assert torch.allclose(task.train.tensors[0][5:6], alone, atol=1e-6)


def test_features_that_mix_examples_are_refused_before_anything_is_released() -> None:
    with pytest.raises(ValueError, match="with_batch_statistics' computes as features mixes examples"):
        prepare(recipe("with_batch_statistics"))
