"""FedFed's globally shared data set D^s: what each client gives to it, and what that costs.

=======================  ==============================================================================================
``generated``            images drawn from a generator that was trained with DP: post-processing, nothing further to pay
``distilled``            FedFed's idea, priced: x_p = x − q(x), clipped for each image, with noise of its own, twice,
                         and the label noised along; q trained with DP, jointly with a classifier of x_p, as FedFed
                         does; all of it charged
``distilled-published``  FedFed as published: x_p unclipped, one noise for a batch of images, labels in the clear, q
                         trained without privacy. ε = ∞; for study, with consent
=======================  ==============================================================================================

``distilled`` releases one vector for each record: (clip_R(x_p) / R, one-hot label), of length √2 at most, plus √2 σ z.
Records are dealt out at random, and in secret, to places one more than their public number, of which the first are
given; an empty one is released, too, as noise. Deal two neighbours out alike, and the record that one of them lacks
leaves its place empty there: one vector changes by at most √2. It is a Gaussian release of multiplier σ, made twice.
(In the order of the data, all that follow a record that is missing would be in other places.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from dphero.accounting import Gaussian, Ledger, NoNoise, PoissonGaussian, calibrate_noise_multiplier, price
from dphero.data import Data, Split
from dphero.federated.settings import Federation
from dphero.federated.sharing.distiller import COPIES, Distiller
from dphero.federated.sharing.generator import Generator
from dphero.federated.sharing.private_training import releases, rows_of, train
from dphero.methods.recipe import Recipe
from dphero.methods.trainers.base_trainer import key_of
from dphero.noise import FastNoise, SecureNoise

Network = TypeVar("Network", Distiller, Generator)

_SLOTS = 200  # images that a client gives, of each copy
_REACH = 1.0  # R: the longest x_p that is given in full, in units of pixels, which lie between -1 and 1
_BATCH = 64  # images that have one noise in common there


def share(
    data: Data, records: int, recipe: Recipe, federation: Federation, earlier: Ledger, seed: int | None
) -> tuple[Split, Ledger]:
    """Return what a client gives to the shared data set, and what that released.

    Args:
        data: Its private examples.
        records: Their public number.
        recipe: For ε (of which the federation's ``sharing_budget`` may be spent here) or σ.
        federation: Says how to share.
        earlier: What left the client before.
        seed: Makes it repeatable; ``None`` draws fresh randomness.
    """
    lot = min(recipe.lot, records)
    if federation.shared == "distilled-published":
        return _published(data, records, lot)
    rate, steps = lot / records, releases(records, lot)
    distilled = federation.shared == "distilled"
    training, giving = _noise_multipliers(recipe, federation, earlier, rate, steps, distilled)
    rows = rows_of(data.train, len(data.classes))
    settings: dict[str, Any] = {"records": records, "lot": lot, "noise_multiplier": training, "seed": seed}
    if distilled:
        places = _deal(len(rows), records, seed)  # refused before anything is spent
        distiller = _untrained(Distiller, data)
        released = train(distiller, rows, **settings)
        return _distilled(distiller, rows, places, records, giving, released, seed, data), released
    generator, labels = _untrained(Generator, data), torch.arange(_SLOTS) % len(data.classes)
    released = train(generator, rows, **settings)
    source = torch.Generator()
    source.seed() if seed is None else source.manual_seed(seed)  # of the images: nothing secret
    return _as_images(generator.draw(labels, source), labels, data), released


def _untrained(kind: type[Network], data: Data) -> Network:
    """Return a network with public initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(data.train.images[0].numel(), len(data.classes))


def _distilled(
    model: Distiller,
    rows: torch.Tensor,
    places: torch.Tensor,
    records: int,
    sigma: float,
    released: Ledger,
    seed: int | None,
    data: Data,
) -> Split:
    """Return two noisy copies of clipped x_p and labels, at their places; what they release goes to the ledger."""
    count = min(_SLOTS, records)
    rows, places = rows[places < count], places[places < count]
    sensitive = model.sensitive(rows)
    reach = _REACH * (1 - 1e-6)  # lengths are rounded
    sensitive *= (reach / sensitive.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)
    slots = torch.zeros(count, rows.shape[1], dtype=torch.float64)
    slots[places] = torch.cat([sensitive / _REACH, rows[:, model.size :]], 1).double()
    copies = []
    source = SecureNoise() if seed is None else FastNoise(seed ^ 0xFEDFED)
    for number in range(2):
        noisy = torch.empty_like(slots)
        released.record(Gaussian(sigma))
        source.fill([noisy], sigma * math.sqrt(2), number, bound_to=[slots])
        copies.append((slots + noisy).float())
    both = torch.cat(copies)
    return _as_images(_REACH * both[:, : model.size], both[:, model.size :].argmax(1), data)


def _deal(count: int, records: int, seed: int | None) -> torch.Tensor:
    """Return a place for each record, among one more than their public number.

    Raises:
        ValueError: If there are more than that.
    """
    if count > records + 1:
        raise ValueError(
            f"this client has {count} records, and declares {records}: those beyond have no place among what it "
            "shares, and which they are would follow from all others. Give a --dataset-size that is not too small"
        )
    random = np.random.Generator(np.random.Philox(key=key_of(seed, "places")))
    return torch.from_numpy(random.permutation(records + 1)[:count])


def _published(data: Data, records: int, lot: int) -> tuple[Split, Ledger]:
    """Give what FedFed's code gives."""
    rows = rows_of(data.train, len(data.classes))
    model = _untrained(Distiller, data)
    ledger = train(model, rows, records=records, lot=lot, noise_multiplier=None, seed=None)
    sensitive = model.sensitive(rows[:_SLOTS])
    copies = []
    for scale in COPIES:
        parts = [part + scale * torch.randn(part.shape[1]) for part in sensitive.split(_BATCH)]
        copies.append(torch.cat(parts))
    ledger.record(NoNoise())  # labels in the clear, and r(a) − r(b) without noise within a batch
    labels = data.train.labels[:_SLOTS].repeat(2)
    return _as_images(torch.cat(copies), labels, data), ledger


def _as_images(pixels: torch.Tensor, labels: torch.Tensor, data: Data) -> Split:
    return Split(pixels.reshape(len(pixels), *data.train.images.shape[1:]).float().contiguous(), labels)


def _noise_multipliers(
    recipe: Recipe, federation: Federation, earlier: Ledger, rate: float, steps: int, distilled: bool
) -> tuple[float, float]:
    """Return σ of the generator's training, and σ of what is given (if anything is given but its images)."""
    if recipe.epsilon is None:
        if recipe.noise_multiplier is None:
            raise ValueError(
                f"what clients give to the shared set (--shared {federation.shared}) gets noise: give --epsilon or "
                "--noise-multiplier, and a private --method"
            )
        return recipe.noise_multiplier, recipe.noise_multiplier
    budget = recipe.epsilon * federation.sharing_budget
    part = budget / 2 if distilled else budget
    training = calibrate_noise_multiplier(part, recipe.delta, rate, steps, recipe.accountant, besides=earlier)
    if not distilled:
        return training, training

    def cost(sigma: float) -> float:
        ledger = earlier.copy()
        ledger.record(PoissonGaussian(rate, training), steps)
        ledger.record(Gaussian(sigma), 2)
        return price(ledger, recipe.delta, recipe.accountant).epsilon

    return training, _smallest(cost, budget)


def _smallest(cost: Callable[[float], float], budget: float) -> float:
    """Return a noise multiplier that costs at most the budget, at most 1 % above the smallest."""
    high = 1.0
    while cost(high) > budget:
        high *= 2
    low = high / 2
    while cost(low) <= budget and low > 1e-3:
        high, low = low, low / 2
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= budget else (middle, high)
    return high
