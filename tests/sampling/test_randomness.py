"""Random numbers while a batch is in the user's hands: nobody who knows the user's seed can predict them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from dphero.sampling.randomness import SecretGenerators, SeededWorker, secret
from tests.trainer import Training, data, network, same, training

Patch = pytest.MonkeyPatch


def seed_all(seed: int = 0) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def states() -> tuple[Any, ...]:
    kind, words, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), kind, words.tolist(), rest, random.getstate()


def torch_noise(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape)


def numpy_noise(x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.standard_normal(tuple(x.shape))).float()


def python_noise(x: Tensor) -> Tensor:
    return x + torch.tensor([random.gauss(0, 1) for _ in range(x.numel())]).view(x.shape)


NOISE: dict[str, Callable[[Tensor], Tensor]] = {"torch": torch_noise, "numpy": numpy_noise, "python": python_noise}


class Augmented(Dataset):
    """Examples to which each look adds noise."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = data()[index]
        return self.noise(x), y


class Noisy(nn.Module):
    """Adds noise in training mode, from torch's generator or one of its own."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.generator) if self.training else x


def everybody(**options: Any) -> Training:
    """Train on all examples at each step, in order, with almost no noise: what is released is the sum of gradients."""
    settings = {"sample_rate": 1.0, "expected_batch_size": 60, "dataset_size": None, "noise_multiplier": 1e-6}
    run = training(**{**settings, "guidance": "isotropic", "seed": None, **options})
    draw = run.loader.sampler.draw
    run.loader.sampler.draw = lambda lot: np.sort(draw(lot))  # type: ignore[method-assign]
    return run


def first_release(make: Callable[[], Training], change: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """What an attacker sees who knows the seed that the user begins his script with."""
    seed_all()
    run = make()
    seed_all()
    for x, y in run.loader:
        F.cross_entropy(run.module(change(x)), y).backward()
        break
    return torch.cat([gradient.flatten() for gradient in run.gradients().values()]) * 60


def movement(make: Callable[[], Training], **options: Any) -> float:
    """How far what is released moves, in units of the clip norm, from run to run with the same seed."""
    first, second = (first_release(make, **options) for _ in range(2))
    return float((first - second).norm())


@contextmanager
def without_the_guard(monkeypatch: Patch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(SecretGenerators, "_swap", lambda self, source: None)
        patch.setattr(SeededWorker, "__call__", lambda self, number: self._initialise and self._initialise(number))
        yield


def augmented(items: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = default_collate(items)
    return torch_noise(x), y


WAYS: dict[str, tuple[Callable[[], Training], dict[str, Any]]] = {
    "dropout": (lambda: everybody(module=network(0, nn.Dropout(0.5))), {}),
    "in the loop": (everybody, {"change": torch_noise}),
    "in the loop, numpy": (everybody, {"change": numpy_noise}),
    "in the loop, python": (everybody, {"change": python_noise}),
    "seeded in the loop": (
        lambda: everybody(module=network(0, nn.Dropout(0.5))),
        {"change": lambda x: (torch.manual_seed(0), x)[1]},
    ),
    "the collate function": (
        lambda: everybody(data_loader=DataLoader(data(), 60, collate_fn=augmented)),
        {},
    ),
    **{
        f"the data set, {name}": (lambda noise=noise: everybody(data_loader=DataLoader(Augmented(noise), 60)), {})
        for name, noise in NOISE.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_an_attacker_who_knows_the_seed_cannot_predict_random_numbers(name: str, monkeypatch: Patch) -> None:
    """Whoever knows everybody's masks also knows how one record more shifts them."""
    make, options = WAYS[name]
    assert movement(make, **options) > 0.5
    with without_the_guard(monkeypatch):
        assert movement(make, **options) < 1e-2


def seed_worker(number: int) -> None:
    """What many tutorials recommend, with a number that everybody knows."""
    seed_all(number)


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_a_worker_is_not_seeded_by_the_user(noise: Callable[[Tensor], Tensor], monkeypatch: Patch) -> None:
    def make() -> Training:
        source = DataLoader(Augmented(noise), 60, num_workers=1, worker_init_fn=seed_worker)
        return everybody(data_loader=source)

    assert movement(make) > 0.5
    with without_the_guard(monkeypatch):
        assert movement(make) < 1e-2


def test_a_generator_of_the_model_is_secret_too(monkeypatch: Patch) -> None:
    def make() -> Training:
        return everybody(module=network(0, Noisy(torch.Generator().manual_seed(0))))

    assert movement(make) > 0.5
    with without_the_guard(monkeypatch):
        assert movement(make) < 1e-2


def test_secure_runs_draw_fresh_numbers() -> None:
    assert movement(lambda: everybody(module=network(0, nn.Dropout(0.5)), secure=True)) > 0.5


def test_a_seed_of_the_engine_makes_them_repeatable() -> None:
    def make() -> Training:
        return everybody(module=network(0, nn.Dropout(0.5)), seed=5)

    assert movement(make) == 0
    seed_all(1)
    run, other = make(), first_release(make)
    assert same(run.steps(1)[0], run.gradients())
    assert torch.equal(torch.cat([gradient.flatten() for gradient in run.gradients().values()]) * 60, other)


def test_the_users_generators_are_left_as_they_were() -> None:
    run = everybody(
        module=network(0, nn.Dropout(0.5)), data_loader=DataLoader(Augmented(python_noise), 60), sample_rate=0.5,
    )  # fmt: skip
    seed_all(3)
    before = states()
    run.steps(3)  # two epochs, the second broken off
    assert states() == before
    next(iter(run.loader))
    assert states() == before
    for x, y in run.loader:
        assert states() != before
        F.cross_entropy(run.module(x), y).backward()
        assert states() == before  # the gradients are taken
        break
    with pytest.raises(ZeroDivisionError):
        for _ in run.loader:
            raise ZeroDivisionError
    run.steps(1)  # a newer iteration goes on from where the user stood
    assert states() == before


def test_an_iterator_that_is_left_behind_does_not_undo_a_later_seed() -> None:
    run = everybody()
    left = iter(run.loader)
    next(left)
    seed_all(11)
    before = states()
    del left
    assert states() == before
    run.steps(1)
    assert states() == before


def test_a_run_is_resumed_in_the_middle_of_an_epoch_of_augmentation(tmp_path: Path) -> None:
    """Bit by bit, also if it was saved while a batch was in hand."""

    def make() -> Training:
        source = DataLoader(Augmented(lambda x: numpy_noise(torch_noise(python_noise(x)))), 12)
        return training(module=network(0, nn.Dropout(0.3)), data_loader=source, physical_batch_size=5)

    def go_on(run: Training, lots: int) -> list[dict[str, Tensor]]:
        return run.steps(lots, lambda out, y: F.cross_entropy(out + 0.1 * torch.randn(out.shape), y))

    seed_all(1)
    run = make()
    go_on(run, 2)
    batch = next(iter(run.loader))
    assert len(batch) == 2
    run.engine.save(tmp_path / "run.pt")
    expected, after = go_on(run, 4), states()
    seed_all(2)
    resumed = make()
    resumed.engine.load(tmp_path / "run.pt")
    assert all(map(same, go_on(resumed, 4), expected))
    assert states() == after


def test_all_of_the_state_is_secret_not_the_32_bits_that_torch_takes_of_a_seed() -> None:
    generators = SecretGenerators()
    generators.begin(secret(1, 2, 3))
    try:
        drawn = torch.rand(1000)
        again = torch.rand(1000, generator=torch.Generator().manual_seed(torch.initial_seed()))
        assert not torch.equal(drawn, again)
        assert abs(float(drawn.mean()) - 0.5) < 0.05 and len(drawn.unique()) > 990
    finally:
        generators.end()
    generators.begin(secret(1, 2, 4))
    try:
        assert not torch.equal(drawn, torch.rand(1000))
    finally:
        generators.end()
    assert secret(1, 2, 3) == secret(1, 2, 3) != secret(2, 2, 3)
    assert secret(None, 2, 3) != secret(None, 2, 3)
