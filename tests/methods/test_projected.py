"""Projected DP-SGD: the projection is one, it is post-processing, and nothing private decides it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from dphero.accounting import BudgetExhausted
from dphero.methods import Trainer, make
from dphero.methods.on_engine.projected import leading_directions
from tests.methods.image_task import digits, finish, make_task, resumes_exactly, start, take

SMALL = {"examples": 20, "directions": 8, "refresh_every": 3}


def test_leading_directions_are_the_singular_vectors() -> None:
    gradients = torch.randn(12, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -3, 12)[:, None]
    found = leading_directions(gradients, 5)
    expected = torch.linalg.svd(gradients, full_matrices=False).Vh[:5]
    assert found.shape == (5, 300)
    assert torch.allclose(found @ found.mT, torch.eye(5), atol=1e-5)
    assert torch.allclose(found.mT @ found, expected.mT @ expected, atol=1e-4)


@pytest.mark.parametrize("rank", [0, 2])
def test_directions_that_are_not_there_are_left_out(rank: int) -> None:
    basis = torch.randn(rank, 50, generator=torch.Generator().manual_seed(1))
    gradients = torch.randn(10, rank, generator=torch.Generator().manual_seed(2)) @ basis
    found = leading_directions(gradients, 5)
    assert found.shape == (rank, 50) and found.isfinite().all()


def test_the_gradient_is_the_projection_of_what_dp_sgd_releases() -> None:
    projected, plain = (
        take(start(m, noise_multiplier=1.0, options=o), 1) for m, o in (("projected", SMALL), ("dp-sgd", {}))
    )
    release, used = (
        torch.cat([p.grad.flatten() for p in trainer.module.parameters()]) for trainer in (plain, projected)
    )
    span = projected.directions
    assert span.shape[0] == 8
    assert torch.allclose(used, span.mT @ (span @ release), atol=1e-6)
    assert used.norm() < 0.5 * release.norm()  # most was noise outside
    assert projected.ledger == plain.ledger


def test_directions_are_those_of_the_public_gradients_at_these_weights() -> None:
    trainer = start("projected", noise_multiplier=1.0, options=SMALL)
    weights = {name: value.detach().clone() for name, value in trainer.module.named_parameters()}
    trainer.advance()
    trainer.close()
    trainer.module.load_state_dict(weights)
    rows = []
    for image, label in zip(trainer.inputs, trainer.labels, strict=True):
        trainer.module.zero_grad()
        torch.nn.functional.cross_entropy(trainer.module(image[None]), label[None]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in trainer.module.parameters()]))
    expected, found = leading_directions(torch.stack(rows), 8), trainer.directions
    assert torch.allclose(found.mT @ found, expected.mT @ expected, atol=1e-4)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 10))


def test_networks_with_dropout_are_trained_and_resumed(tmp_path: Path) -> None:
    def begin() -> Trainer:
        task, generator = make_task("projected", noise_multiplier=1.0), torch.Generator().manual_seed(0)
        model = dropping()
        for parameter in model.parameters():
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
        torch.manual_seed(3)
        return make("projected", SMALL).start(replace(task, model=model, module=model))

    trainer = take(begin(), 1)
    found = trainer.directions
    trainer._find(0, trainer._weights_then)
    assert trainer.module.training and torch.equal(trainer.directions, found)  # chance has no part in it
    trainer.save(tmp_path / "checkpoint.pt", {})
    take(trainer, 3)
    resumed = begin()
    resumed.load(tmp_path / "checkpoint.pt")
    assert torch.equal(take(resumed, 3).module[1].weight, trainer.module[1].weight)


def test_directions_that_cannot_be_found_cost_nothing() -> None:
    class Odd(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + float(x.detach().sum())

    task, model = make_task("projected", noise_multiplier=1.0), Odd(nn.Flatten(), nn.Linear(64, 10))
    trainer = make("projected", SMALL).start(replace(task, model=model, module=model))
    with pytest.raises(RuntimeError):
        trainer.advance()
    assert not trainer.ledger.steps


def test_public_examples_do_not_depend_on_private_ones() -> None:
    task = make_task("projected", noise_multiplier=1.0)
    method = make("projected", SMALL)
    before = method.public_examples(task)
    task.images.zero_()
    task.train.tensors[1].zero_()
    assert all(map(torch.equal, before, method.public_examples(task)))


def test_trains_and_looks_again_now_and_then() -> None:
    options = {"examples": 150, "directions": 100, "refresh_every": 3}
    trainer = start("projected", noise_multiplier=1.0, epochs=4, options=options)
    take(trainer, 2)
    first = trainer.directions
    take(trainer, 1)
    assert trainer.directions is first
    take(trainer, 1)
    assert trainer.directions is not first and trainer.found_at == 3
    assert finish(trainer) > 0.3  # synthetic images span but a part of what digits need


def test_meets_a_target() -> None:
    trainer = start("projected", epsilon=5.0, epochs=1, options=SMALL)
    take(trainer, trainer.steps)
    assert 4.9 < trainer.price(1e-4).epsilon <= 5.0
    with pytest.raises(BudgetExhausted):
        take(trainer, 2)


@pytest.mark.parametrize("before", [0, 2, 3])
def test_resumes_exactly(before: int, tmp_path: Path) -> None:
    resumes_exactly(lambda: start("projected", noise_multiplier=1.0, options=SMALL), tmp_path, before, 3)


def test_features_are_those_of_public_images() -> None:
    trainer = take(start("projected", noise_multiplier=1.0, model="scatter-linear", options=SMALL), 1)
    assert trainer.inputs.shape == (20, 81, 2, 2)


def test_a_public_data_set_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task("projected", noise_multiplier=1.0)
    monkeypatch.setattr("dphero.data.load", lambda name: digits())
    task = type(task)(
        task.recipe.with_(data="others"), task.train, task.model, task.module, torch.zeros(3, 1, 12, 12), 10
    )
    images, labels = make("projected", {**SMALL, "public": "digits"}).public_examples(task)
    assert images.shape == (20, 1, 12, 12) and labels.unique().numel() > 3
    grown = replace(task, images=torch.zeros(3, 3, 12, 12))
    with pytest.raises(ValueError, match="channels must agree"):
        make("projected", {**SMALL, "public": "digits"}).public_examples(grown)


def test_private_data_is_not_public() -> None:
    with pytest.raises(ValueError, match="is the private data itself"):
        start("projected", noise_multiplier=1.0, options={"public": "digits"})


def test_private_data_is_not_public_by_another_way_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task("projected", noise_multiplier=1.0)
    monkeypatch.setattr("dphero.data.load", lambda name: digits())
    monkeypatch.chdir(tmp_path)
    for name in ("mine.npz", "theirs.npz"):
        (tmp_path / name).touch()
    (tmp_path / "link.npz").symlink_to("mine.npz")
    private = replace(task, recipe=task.recipe.with_(data=str(tmp_path / "mine.npz")))
    for public in ("mine.npz", "./mine.npz", "link.npz", str(tmp_path / "mine.npz")):
        with pytest.raises(ValueError, match="is the private data itself"):
            make("projected", {**SMALL, "public": public}).public_examples(private)
    assert len(make("projected", {**SMALL, "public": "theirs.npz"}).public_examples(private)[0]) == 20


@pytest.mark.parametrize("options", [{"examples": 0}, {"directions": 300}, {"refresh_every": 0}, {"pubic": "leaves"}])
def test_bad_options(options: dict) -> None:
    with pytest.raises(ValueError, match=r"examples|directions|refresh_every|pubic"):
        make("projected", options)
