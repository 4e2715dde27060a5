"""Several views of an image are clipped as one example; a mean of the weights is released, saved and resumed."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dphero.methods.trainers.augmentation import AUGMENTATIONS, random_views
from dphero.methods.trainers.averaging import WeightAverage
from tests.methods.image_task import make_task, resumes_exactly, start, take, weights

VIEWS = {"views": 3, "augment": "crop-flip", "lot": 60, "noise_multiplier": 1e-12, "clip": 0.02, "momentum": 0.0}


def test_an_example_with_views_is_clipped_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd, one example at a time: the mean over its views, clipped once."""
    trainer, seen = start("dp-sgd", **VIEWS), []
    loss = trainer.loss
    monkeypatch.setattr(trainer, "loss", lambda x, y: seen.append((x.clone(), y.clone())) or loss(x, y))
    before = [parameter.detach().clone() for parameter in trainer.task.model.parameters()]
    take(trainer, 1)
    released = [parameter.grad.clone() for parameter in trainer.task.model.parameters()]
    trainer.close()
    with torch.no_grad():
        for parameter, value in zip(trainer.task.model.parameters(), before, strict=True):
            parameter.copy_(value)
    total, moved = [torch.zeros_like(value) for value in before], False
    for inputs, labels in seen:
        assert inputs.shape[1] == 3
        moved |= not torch.equal(inputs[:, 0], inputs[:, 1])
        for views, label in zip(inputs, labels, strict=True):
            value = F.cross_entropy(trainer.task.model(views), label.expand(3))
            gradients = torch.autograd.grad(value, list(trainer.task.model.parameters()))
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            for one, gradient in zip(total, gradients, strict=True):
                one += gradient * min(1.0, 0.02 / norm)
    assert moved
    for one, gradient in zip(total, released, strict=True):
        assert torch.allclose(gradient, one / 60, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("augmentation", sorted(AUGMENTATIONS))
def test_views_are_parts_of_their_own_image(augmentation: str) -> None:
    images = torch.arange(5.0).view(5, 1, 1, 1) + torch.rand(5, 3, 8, 8) / 2
    views = random_views(images, 4, augmentation)
    assert views.shape == (5, 4, 3, 8, 8)
    assert torch.equal(views.floor(), images.floor()[:, None].expand_as(views))
    assert random_views(images[:0], 4, augmentation).shape == (0, 4, 3, 8, 8)


def test_views_of_a_flip_are_the_image_and_its_mirror_image() -> None:
    images = torch.rand(6, 1, 8, 8)
    views = random_views(images, 20, "flip")
    same = (views == images[:, None]).flatten(2).all(2)
    mirrored = (views == images.flip(3)[:, None]).flatten(2).all(2)
    assert (same ^ mirrored).all() and same.any() and mirrored.any()


@pytest.mark.parametrize("settings", [{"averaging": "ema"}, {"averaging": "late", "views": 2}])
def test_resumed_runs_are_those_that_were_not_stopped(settings: dict, tmp_path: Path) -> None:
    resumes_exactly(lambda: start("dp-sgd", lot=200, noise_multiplier=1.0, **settings), tmp_path, 3, 2)


def test_the_mean_of_the_weights_is_what_is_released() -> None:
    trainer = take(start("dp-sgd", lot=200, noise_multiplier=1.0, averaging="ema"), 1)
    first = weights(trainer)
    last = torch.cat([value.detach().double().flatten() for value in trainer.task.model.state_dict().values()])
    assert not torch.equal(first, last)
    assert torch.equal(weights(take(start("dp-sgd", lot=200, noise_multiplier=1.0), 1)), last)


def test_an_exponential_mean_warms_up() -> None:
    network = torch.nn.Linear(1, 1, bias=False)
    average, expected = WeightAverage(network, "ema"), network.weight.item()
    for t in range(1, 30):
        with torch.no_grad():
            network.weight.fill_(t)
        average.take()
        decay = (1 + t) / (10 + t)
        expected = decay * expected + (1 - decay) * t
    assert average.mean.weight.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", ["sgd", "dp-ged", "ipa-rf", "projected"])
@pytest.mark.parametrize("settings", [{"views": 2}, {"averaging": "ema"}])
def test_methods_without_a_place_for_it_refuse(method: str, settings: dict) -> None:
    privacy = {} if method == "sgd" else {"epsilon": 3.0}
    with pytest.raises(ValueError, match="knows nothing of"):
        start(method, **privacy, **settings)


def test_fixed_features_and_guidance_by_synthetic_images_take_no_views() -> None:
    with pytest.raises(ValueError, match="computed once"):
        start("feature-dp", epsilon=3.0, views=2)
    with pytest.raises(ValueError, match="several views"):
        start("dp-sgd", epsilon=3.0, views=2, guidance="prior")
    with pytest.raises(ValueError, match="views K"):
        make_task("dp-sgd", epsilon=3.0, augment="flip")
