"""Lots: who takes part in each step.

A *lot* is one random draw of examples, and one release. It may reach the user in several *physical
batches* that fit in memory. Poisson lots include every example independently with probability q; the
draw costs O(lot), and a lot that happens to be empty is still a lot: the user gets one row of zeros that
counts for nothing, so that the loop runs and noise is released.

The sampling rate and the expected lot size are public numbers. Under add/remove neighbours the number of
records is not, so nothing here is derived from it unless the user declares it public.
"""

from __future__ import annotations

import copy
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

__all__ = ["Lots", "PhysicalBatch", "PoissonSampler", "PrivateLoader", "Sampler", "ShuffleSampler"]


@dataclass(frozen=True)
class PhysicalBatch:
    """What the user holds: ``rows`` rows, of which the first ``real`` are examples, the rest padding."""

    lot: int
    rows: int
    real: int
    last: bool


class Lots:
    """Where training stands within a lot: the loader moves it on, the engine reads it.

    Attributes:
        next: Index of the lot that will be drawn next.
        current: The physical batch in the user's hands.
        delivered: Examples of the current lot handed out so far.
        captured: Rows of the current lot whose gradients have been taken.
        released: Whether the current lot has been released.
    """

    def __init__(self) -> None:
        self.next = 0
        self.current: PhysicalBatch | None = None
        self.delivered = 0
        self.captured = 0
        self.released = True

    def deliver(self, batch: PhysicalBatch, *, first: bool) -> None:
        """Hand a physical batch to the user."""
        if first:
            self.next = batch.lot + 1
            self.delivered = self.captured = 0
            self.released = False
        self.delivered += batch.rows
        self.current = batch

    @property
    def index(self) -> int:
        """Index of the lot under way, or of the next one between two lots."""
        return self.next if self.released or self.current is None else self.current.lot

    def abandon(self) -> None:
        """Forget an unfinished lot: nothing of it was released."""
        self.current, self.released = None, True


class Sampler(Protocol):
    """Draws lots by their index, so that a resumed run draws what the unbroken one would have drawn."""

    lots_per_epoch: int
    key: int | None

    def draw(self, lot: int) -> np.ndarray:
        """Return the indices of the examples of a lot."""


class PoissonSampler:
    """Every example enters each lot independently with probability ``sample_rate``.

    The number of members is binomial and, given that number, every set of members is equally likely.

    Args:
        size: Number of records.
        sample_rate: q.
        key: Secret 128-bit key; lots are a function of (key, index). ``None`` draws every lot from fresh
            randomness of the operating system.
    """

    def __init__(self, size: int, sample_rate: float, key: int | None) -> None:
        self.size, self.sample_rate = size, sample_rate
        self.key: int | None = key
        self.lots_per_epoch = max(1, round(1 / sample_rate))

    def draw(self, lot: int) -> np.ndarray:
        """Return the indices of the examples of a lot, in O(lot)."""
        random = _random(self.key, lot)
        return _distinct(random, self.size, int(random.binomial(self.size, self.sample_rate)))


class ShuffleSampler:
    """Each epoch, a random permutation is cut in lots of fixed size: no amplification by sampling."""

    def __init__(self, size: int, lot_size: int, key: int | None) -> None:
        self.size, self.lot_size = size, lot_size
        self.key: int | None = secrets.randbits(128) if key is None else key
        self.lots_per_epoch = -(-size // lot_size)
        self._epoch: tuple[int, np.ndarray] | None = None

    def draw(self, lot: int) -> np.ndarray:
        """Return the indices of the examples of a lot."""
        epoch, place = divmod(lot, self.lots_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, _random(self.key, epoch).permutation(self.size))
        return self._epoch[1][place * self.lot_size : (place + 1) * self.lot_size]


class PrivateLoader:
    """Iterates over an epoch of lots, in physical batches, with the user's own loading machinery.

    Args:
        source: The user's ``DataLoader`` (its dataset, workers, collate function and pinned memory are kept),
            or a dataset with ``__len__`` and ``__getitem__``.
        sampler: Draws the lots.
        lots: Where training stands; moved on as batches are handed out.
        before_lot: Called before a lot is drawn; raises to refuse it.
        expected_batch_size: The public expected lot size.
        physical_batch_size: The most rows handed out at a time; ``None`` for whole lots.
    """

    def __init__(
        self,
        source: DataLoader[Any] | Dataset[Any],
        sampler: Sampler,
        lots: Lots,
        *,
        before_lot: Callable[[], None],
        expected_batch_size: float,
        physical_batch_size: int | None,
    ) -> None:
        self.source, self.sampler, self.lots = source, sampler, lots
        self.dataset = source.dataset if isinstance(source, DataLoader) else source
        self.batch_size = expected_batch_size
        self.physical_batch_size = physical_batch_size
        self._before_lot = before_lot
        self._collate = source.collate_fn if isinstance(source, DataLoader) else default_collate
        self._iterations = 0

    def __len__(self) -> int:
        """Return the number of lots in an epoch, 1/q rounded."""
        return self.sampler.lots_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the physical batches of the lots up to the end of the epoch."""
        self._iterations += 1
        iteration = self._iterations
        self.lots.abandon()
        start = self.lots.next
        count = len(self) - start % len(self)
        queue: deque[PhysicalBatch] = deque()
        batches = self._fetch(self._chunks(start, count, queue))
        for _ in range(count):
            self._require_newest(iteration)
            self._before_lot()
            first = True
            while True:
                batch = next(batches)
                physical = queue.popleft()
                self._require_newest(iteration)
                self.lots.deliver(physical, first=first)
                first = False
                yield batch
                if physical.last:
                    break

    def _require_newest(self, iteration: int) -> None:
        if iteration != self._iterations:
            raise RuntimeError("a newer iteration over the private loader has begun; finish that one")

    def _chunks(self, start: int, count: int, queue: deque[PhysicalBatch]) -> Iterator[list[int]]:
        for lot in range(start, start + count):
            members = self.sampler.draw(lot)
            size = self.physical_batch_size or max(1, len(members))
            cuts = range(0, max(1, len(members)), size)
            for first in cuts:
                part = members[first : first + size]
                queue.append(PhysicalBatch(lot, max(1, len(part)), len(part), first == cuts[-1]))
                yield part.tolist()

    def _fetch(self, chunks: Iterator[list[int]]) -> Iterator[Any]:
        source, dataset = self.source, self.dataset
        workers = source.num_workers if isinstance(source, DataLoader) else 0
        if isinstance(dataset, TensorDataset) and self._collate is default_collate and not workers:
            tensors = dataset.tensors
            for chunk in chunks:
                index = torch.tensor(chunk, dtype=torch.long, device=tensors[0].device)
                yield [tensor[index] if chunk else torch.zeros_like(tensor[:1]) for tensor in tensors]
            return
        options: dict[str, Any] = {}
        if isinstance(source, DataLoader):
            names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
            options = {name: getattr(source, name) for name in names}
            options["generator"] = copy.copy(source.generator)
            if workers:
                options["prefetch_factor"] = source.prefetch_factor
        collate = partial(_collate_or_empty, dataset, self._collate)
        yield from DataLoader(dataset, batch_sampler=chunks, collate_fn=collate, **options)  # type: ignore[arg-type]


def _collate_or_empty(dataset: Dataset[Any], collate: Callable[[list[Any]], Any], examples: list[Any]) -> Any:
    if examples:
        return collate(examples)
    row = collate([dataset[0]])
    return tree_map(lambda value: torch.zeros_like(value) if isinstance(value, Tensor) else value, row)


def dataset_of(source: DataLoader[Any] | Dataset[Any]) -> tuple[Dataset[Any], int]:
    """Return the dataset behind a source, and its length (private: not to be published).

    Raises:
        ValueError: If the source cannot be sampled by index, or is empty.
    """
    dataset = source.dataset if isinstance(source, DataLoader) else source
    indexable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not indexable:
        raise ValueError(
            f"private training draws examples by index: {type(dataset).__name__} must have __len__ and __getitem__ "
            "(an iterable dataset or a loader without a length cannot be sampled)"
        )
    if isinstance(source, DataLoader) and source.batch_size is None and source.batch_sampler is None:
        raise ValueError("a DataLoader with batch_size=None does not form batches; give it a batch_size")
    size = len(cast(Sized, dataset))
    if size == 0:
        raise ValueError("the dataset is empty")
    return dataset, size


def public_rate(
    source: DataLoader[Any] | Dataset[Any],
    size: int,
    *,
    sample_rate: float | None,
    expected_batch_size: float | None,
    dataset_size: int | Literal["public"] | None,
) -> tuple[float, float]:
    """Return (q, B) from public numbers only.

    Args:
        source: The user's loader or dataset.
        size: Its number of records; used only where ``dataset_size="public"`` declares it public.
        sample_rate: q, if given.
        expected_batch_size: B, if given; else the loader's ``batch_size``, which its author wrote down.
        dataset_size: A public number of records, or ``"public"``.

    Raises:
        ValueError: If q or B is missing or impossible.
    """
    lot = expected_batch_size
    if lot is None and isinstance(source, DataLoader):
        lot = source.batch_size
    records = size if dataset_size == "public" else dataset_size
    if isinstance(records, str):
        raise ValueError(f'dataset_size must be a number or "public", got {records!r}')
    if sample_rate is None and lot is not None and records is not None:
        sample_rate = lot / records
    if lot is None and sample_rate is not None and records is not None:
        lot = sample_rate * records
    if sample_rate is None or lot is None:
        raise ValueError(
            "the sampling rate q and the expected batch size B are public numbers, and the number of records is not "
            "unless you say so. Give sample_rate= and expected_batch_size= (or a loader with a batch_size), or "
            'dataset_size=N (a public figure), or dataset_size="public" to declare len(dataset) public.'
        )
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
    if not lot > 0:
        raise ValueError(f"expected_batch_size must be positive, got {lot}")
    return float(sample_rate), float(lot)


def _random(key: int | None, counter: int) -> np.random.Generator:
    if key is None:
        return np.random.Generator(np.random.PCG64(secrets.randbits(256)))
    # the counter's upper words number the lots; the lowest counts draws within one
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, counter, 0]))


def _distinct(random: np.random.Generator, size: int, count: int) -> np.ndarray:
    """Return a uniformly random set of ``count`` of ``range(size)``: the first distinct values of a stream."""
    if count > size // 2:
        return random.permutation(size)[:count]
    stream = np.empty(0, dtype=np.int64)
    while True:
        stream = np.concatenate([stream, random.integers(size, size=count - len(stream) // 2 + 8)])
        _, first = np.unique(stream, return_index=True)
        if len(first) >= count:
            return stream[np.sort(first)[:count]]
