"""Attacks on what happens between a record and the model's forward pass: random numbers, collate functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from _attack import Attack, Figures, refused
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from dphero import PrivacyEngine
from dphero.audit.bounds.statistics import separate
from dphero.data.files import folders
from dphero.data.files.pictures import grey_or_rgb
from dphero.sampling.collate import CollateCheck
from dphero.sampling.randomness import SecretGenerators

DELTA = 1e-5


def released_sum(model: nn.Module, data: Any, sigma: float, **options: Any) -> Tensor:
    """Return what one release of everybody publishes: the sum of clipped gradients (C = 1), with noise."""
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"sample_rate": 1.0, "expected_batch_size": 1, "max_grad_norm": 1.0, "guidance": "isotropic", **options}
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=data, noise_multiplier=sigma, **settings
    )
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        break
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    engine.detach()
    return found


def tell_apart(release: Callable[[bool, float], Tensor], sigma: float, pilots: int, trials: int) -> Figures:
    """Attack one release: project on how far the mean moves with the canary, and count how often that tells.

    Args:
        release: Returns a release with or without the canary, at a noise multiplier.
        sigma: The noise multiplier that is attacked.
        pilots: Releases almost without noise, from which the attacker learns the direction.
        trials: Releases on each side that he then tells apart.
    """
    means = [torch.stack([release(inside, 1e-6) for _ in range(pilots)]).mean(0) for inside in (True, False)]
    direction = means[0] - means[1]
    moved = float(direction.norm())
    sides = [
        np.array([float(release(inside, sigma) @ direction) / moved for _ in range(trials)]) for inside in (True, False)
    ]
    evidence = separate(*sides, delta=DELTA, confidence=0.95)
    fitted = float(sides[0].mean() - sides[1].mean()) / float(np.sqrt((sides[0].var() + sides[1].var()) / 2))
    return {
        "mean moves by (C)": moved,
        "claimed ε": gaussian_epsilon(1 / sigma),
        "audited ε": max(each.epsilon(DELTA) for each in evidence),
        "fitted ε": gaussian_epsilon(max(fitted, 1e-3)),
    }


def gaussian_epsilon(mu: float) -> float:
    """Return ε at δ of μ-Gaussian privacy: of one Gaussian release with μ = sensitivity over standard deviation."""
    from scipy.optimize import brentq
    from scipy.special import ndtr

    def excess(epsilon: float) -> float:
        return float(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)) - DELTA

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, 20 * mu + mu * mu))


# -- dropout under a seed that everybody knows ------------------------------------------------------------------------

DROPOUT_RECORDS, DROPOUT_SIGMA = 512, 4.0


def dropout_network() -> nn.Module:
    torch.manual_seed(0)  # as the first line of most scripts
    layers = [nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(64, 2))


def dropout_release(inside: bool, sigma: float) -> Tensor:
    records = DROPOUT_RECORDS + inside  # all alike: the order in which a lot comes is secret
    return released_sum(dropout_network(), TensorDataset(torch.ones(records, 8), torch.ones(records).long()), sigma)


@contextmanager
def known_random_numbers() -> Iterator[None]:
    """Let the forward pass draw from the user's generators."""
    with patch.object(SecretGenerators, "_swap", lambda self, source: None):
        yield


def attack_dropout() -> Figures:
    return tell_apart(dropout_release, DROPOUT_SIGMA, pilots=4, trials=100)


def attack_dropout_without_guard() -> Figures:
    with known_random_numbers():
        return attack_dropout()


# -- collate functions ------------------------------------------------------------------------------------------------

SHORT, LONG, SEQUENCES = 12, 120, 200


def pad_to_longest(items: list[Any]) -> tuple[Tensor, Tensor]:
    return pad_sequence([x for x, _ in items], batch_first=True), torch.tensor([y for _, y in items])


def standardise(items: list[Any]) -> tuple[Tensor, Tensor]:
    x = torch.stack([x[:SHORT] for x, _ in items])
    return (x - x.mean((0, 1))) / x.std((0, 1)), torch.tensor([y for _, y in items])


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class MeanPooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).tanh().mean(1))


def collate_release(
    model: type[nn.Module], collate: Callable[[list[Any]], Any], inside: bool, sigma: float, **options: Any
) -> Tensor:
    """Release the sum over sequences, among them one that is ten times as long, and large, or not."""
    generator = torch.Generator().manual_seed(1)
    items = [(torch.randn(SHORT, 4, generator=generator), i % 2) for i in range(SEQUENCES)]
    items += [(100 * torch.ones(LONG, 4), 1)] * inside
    torch.manual_seed(0)
    loader = DataLoader(items, batch_size=SEQUENCES, collate_fn=collate)  # type: ignore[arg-type]
    return released_sum(model(), loader, sigma, **options)


@contextmanager
def unwatched_collate() -> Iterator[None]:
    """Let collate functions do what they like."""
    with patch.object(CollateCheck, "look", lambda *arguments: None):
        yield


def attack_collate(model: type[nn.Module], collate: Callable[[list[Any]], Any]) -> Figures:
    with unwatched_collate():
        return tell_apart(partial(collate_release, model, collate), 1.0, pilots=1, trials=60)


def refused_collate(model: type[nn.Module], collate: Callable[[list[Any]], Any], **options: Any) -> Figures:
    return refused(lambda: collate_release(model, collate, True, 1.0, **options))


def padded_last_state() -> Figures:
    """Without a public length refused; with one, one record moves the sum by C at most."""
    with_it = collate_release(LastState, pad_to_longest, True, 1e-6, pad_to=LONG)
    without = collate_release(LastState, padded_by_hand, False, 1e-6)
    moved = float((with_it - without).norm())
    return {**refused_collate(LastState, pad_to_longest), "with pad_to, sum moves by (C)": moved}


def padded_by_hand(items: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = pad_to_longest(items)
    return F.pad(x, (0, 0, 0, LONG - x.shape[1])), y


# -- colours -----------------------------------------------------------------------------------------------------------


def folder_shapes() -> Figures:
    """Return the shapes of images in a folder of grey ones, without and with a coloured one."""
    from PIL import Image

    from dphero.data import load

    shapes = []
    with TemporaryDirectory() as folder:
        for place in ("train/a", "train/b", "test/a", "test/b"):
            (Path(folder) / place).mkdir(parents=True)
            Image.new("L", (4, 4)).save(Path(folder) / place / "0.png")
        for number in range(2):
            shapes.append(str(tuple(load(folder).train.images.shape[1:])))
            Image.new("RGB", (4, 4), (255, 0, 0)).save(Path(folder) / "train" / "a" / f"{number + 1}.png")
    return {"without the coloured image": shapes[0], "with it": shapes[1]}


def folder_shapes_from_data() -> Figures:
    """The same, where the number of colours is read off the images."""

    def grey_if_all_are(paths: list[Path], mode: str) -> Any:
        grey = all(grey_or_rgb(path).mode == "L" for path in paths)
        return pixels(paths, "L" if grey else "RGB")

    pixels = folders._pixels
    with patch.object(folders, "_pixels", grey_if_all_are):
        return folder_shapes()


ATTACKS = [
    Attack(
        "one coloured image among grey ones",
        "trains on a folder of grey images and publishes the network; one coloured image is added",
        folder_shapes_from_data,
        folder_shapes,
    ),
    Attack(
        "padding to the longest, last state",
        "a collate function pads 200 sequences of length 12 to the longest of the batch; one of length 120 is added; "
        "LSTM, last state",
        lambda: attack_collate(LastState, pad_to_longest),
        padded_last_state,
    ),
    Attack(
        "padding to the longest, mean",
        "the same, mean over positions",
        lambda: attack_collate(MeanPooling, pad_to_longest),
        lambda: refused_collate(MeanPooling, pad_to_longest),
    ),
    Attack(
        "standardising in the collate function",
        "a collate function subtracts the mean of the batch and divides by its standard deviation; one large record",
        lambda: attack_collate(MeanPooling, standardise),
        lambda: refused_collate(MeanPooling, standardise),
    ),
    Attack(
        "dropout under a known seed",
        "torch.manual_seed(0) at the top of a script that trains a network with dropout (512 records, one release)",
        attack_dropout_without_guard,
        attack_dropout,
    ),
]
