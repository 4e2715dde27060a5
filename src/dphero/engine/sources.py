"""Where randomness comes from: the noise of each release, and who is in each lot. With it, what a release costs."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

from torch.utils.data import DataLoader, Dataset

from dphero.accounting import Event, Ledger, PoissonGaussian, ShuffledGaussian
from dphero.engine.options import Options
from dphero.mechanism import published
from dphero.noise import FastNoise, NoiseSource, OwnNoise, SecureNoise
from dphero.sampling import Lots, PoissonSampler, Sampler, ShuffleSampler, dataset_of, public_lot, public_rate


@dataclass(frozen=True)
class LotPlan:
    """Who is in a lot, and what its release costs."""

    expected: float  # B, the expected size of a lot. Public
    sampler: Sampler  # draws the lots
    lots: Lots  # where training stands among them
    event: Callable[[float], Event]  # what a release costs, given its effective noise multiplier


def plan_lots(options: Options, source: DataLoader[Any] | Dataset[Any], key: int | None, ledger: Ledger) -> LotPlan:
    """Settle who is in a lot, from public numbers; ``key`` is that of the lots, ``ledger`` what was released before."""
    _, records = dataset_of(source)
    lots = Lots()
    if options.sampling == "poisson":
        rate, expected = public_rate(
            source,
            records,
            sample_rate=options.sample_rate,
            expected_batch_size=options.expected_batch_size,
            dataset_size=options.dataset_size,
        )
        event: Callable[[float], Event] = partial(PoissonGaussian, rate)
        if options.mechanism == "published":
            event = published.poisson_event(rate)
        return LotPlan(expected, PoissonSampler(records, rate, key), lots, event)
    expected = _fixed_lot(options, source)
    # a number that no epoch has had: a second permutation under an old one would be free of charge
    epoch = 1 + max((event.epoch for event in ledger.counts if isinstance(event, ShuffledGaussian)), default=-1)
    sampler = ShuffleSampler(records, int(expected), key, first_epoch=epoch)
    return LotPlan(expected, sampler, lots, lambda multiplier: ShuffledGaussian(multiplier, sampler.epoch(lots.next)))


def _fixed_lot(options: Options, source: DataLoader[Any] | Dataset[Any]) -> float:
    """Return the size of shuffled lots."""
    if options.sample_rate is not None:
        raise ValueError('sampling="shuffle" has no sample_rate: every example takes part once in an epoch')
    lot = public_lot(source, options.expected_batch_size)
    if lot is None or not float(lot).is_integer():
        raise ValueError(f"shuffled lots have a fixed whole size: give it as expected_batch_size=, got {lot}")
    return float(lot)


def noise_and_lot_key(options: Options, used_keys: Collection[str]) -> tuple[NoiseSource, int | None]:
    """Return the noise, and the key of the lots: secret, and another one than that of the noise.

    ``used_keys`` are hashes of keys of noise that may not be used again.
    """
    seed: Any = options.seed
    if options.noise is not None:
        if options.secure or seed is not None:
            raise ValueError("noise= brings its own randomness: it takes neither secure=True nor a seed")
        return OwnNoise(options.noise), None
    if options.secure and seed is not None:
        raise ValueError("secure=True draws from the operating system; it takes no seed")
    if options.secure:
        return SecureNoise(), None
    if seed is None:
        return FastNoise(), secrets.randbits(128)
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    noise = FastNoise(int(seed))
    if hashed_key(noise) & set(used_keys):
        raise ValueError(f"this engine has used seed {seed} already: the same noise would be added a second time")
    return noise, int.from_bytes(hashlib.blake2b(f"lots {int(seed)}".encode(), digest_size=16).digest())


def hashed_key(noise: NoiseSource) -> set[str]:
    """Return a hash by which the key of a noise source is known again; none if its key is never repeated."""
    key = noise.state_dict().get("key")
    return set() if key is None else {hashlib.blake2b(f"used {key}".encode(), digest_size=16).hexdigest()}
