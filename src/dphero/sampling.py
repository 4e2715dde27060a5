"""Lots: who takes part in each step.

A *lot* is one random draw of examples, and one release. It may reach the user in several *physical
batches* that fit in memory. Poisson lots include every example independently with probability q; the
draw costs O(lot), and a lot that happens to be empty is still a lot: the user gets one row that counts for
nothing, so that the loop runs and noise is released.

The sampling rate and the expected lot size are public numbers. Under add/remove neighbours the number of
records is not, so nothing here is derived from it unless the user declares it public.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from dphero.validation import positive, whole

__all__ = ["Lots", "PhysicalBatch", "PoissonSampler", "PrivateLoader", "Sampler", "ShuffleSampler"]


@dataclass(frozen=True)
class PhysicalBatch:
    """What the user holds: ``rows`` rows, of which the first ``real`` are examples, the rest padding."""

    lot: int
    rows: int
    real: int
    first: bool
    last: bool


class Lots:
    """Where training stands within a lot: the loader moves it on, the engine reads it.

    Attributes:
        next: Index of the lot that will be released next. A lot that was handed out but not released comes
            again when the loader is next iterated over: no lot can be skipped by looking at it.
        current: The physical batch in the user's hands; the last one stays here until another is delivered.
        captured: Whether the gradients of that batch have been taken.
    """

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, lot: int) -> None:
        """Stand before a lot, with nothing in the user's hands."""
        self.next, self.captured = lot, False
        self.current: PhysicalBatch | None = None

    def deliver(self, batch: PhysicalBatch) -> None:
        """Hand a physical batch to the user."""
        self.current, self.captured = batch, False

    @property
    def pending(self) -> PhysicalBatch | None:
        """The batch in the user's hands if its lot has not been released, else ``None``."""
        return self.current if self.current is not None and self.current.lot == self.next else None

    @property
    def in_parts(self) -> bool:
        """Whether gradients of some, not all, physical batches of a lot have been taken."""
        return self.pending is not None and (self.captured or not self.pending.first)

    def capture(self) -> PhysicalBatch:
        """Note that the gradients of the batch in hand are being taken: once, before the lot is released.

        Raises:
            RuntimeError: If they were taken before.
        """
        if self.pending is None or self.captured:
            raise RuntimeError(
                "this batch was back-propagated already: its examples would count twice. Add up the losses and call "
                "backward() once for each batch of the private loader."
            )
        self.captured = True
        return self.pending

    def require_captured(self) -> None:
        """Refuse to move on from a batch whose gradients were not taken.

        Raises:
            RuntimeError: If the batch in hand was not back-propagated.
        """
        if not self.captured:
            raise RuntimeError(
                f"a batch of lot {self.next} was handed out but not back-propagated. Every batch that is drawn must "
                "take part in a step, whatever its loss: skipping some by looking at the data is not private. Iterate "
                "over the loader anew to get this lot again. (To evaluate, iterate over an ordinary loader.)"
            )

    def release(self) -> None:
        """Move on to the next lot."""
        self.next += 1


class Sampler(Protocol):
    """Draws lots by their index, so that a resumed run draws what the unbroken one would have drawn."""

    lots_per_epoch: int
    key: int | None

    def draw(self, lot: int) -> np.ndarray:
        """Return the indices of the examples of a lot."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: all settings and the key."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: If it was saved by a sampler with other settings; nothing is changed then.
        """


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

    def state_dict(self) -> dict[str, Any]:
        """Return the rate and the key; the number of records is private and left out."""
        return {"sampling": "poisson", "sample_rate": self.sample_rate, "key": _to_text(self.key)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the key of a sampler with the same rate."""
        _require_same(state, self.state_dict())
        self.key = _from_text(state["key"])


class ShuffleSampler:
    """Each epoch, a random permutation is cut in lots of fixed size: no amplification by sampling.

    Args:
        size: Number of records.
        lot_size: Examples in a lot; the last one of an epoch may be smaller.
        key: Secret 128-bit key; ``None`` draws one from the operating system. It is always saved: an epoch that
            is resumed must go on with the same permutation, or an example could take part in it twice.
        first_epoch: The number of the first epoch, larger than those that were charged before.
    """

    def __init__(self, size: int, lot_size: int, key: int | None, first_epoch: int = 0) -> None:
        self.size, self.lot_size, self.first_epoch = size, lot_size, first_epoch
        self.key: int | None = secrets.randbits(128) if key is None else key
        self.lots_per_epoch = -(-size // lot_size)
        self._epoch: tuple[int, np.ndarray] | None = None

    def draw(self, lot: int) -> np.ndarray:
        """Return the indices of the examples of a lot."""
        epoch, place = divmod(lot, self.lots_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, _random(self.key, epoch).permutation(self.size))
        return self._epoch[1][place * self.lot_size : (place + 1) * self.lot_size]

    def epoch(self, lot: int) -> int:
        """Return the number of the epoch that a lot belongs to."""
        return self.first_epoch + lot // self.lots_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes (public under the relation that shuffling is priced for) and the key."""
        sizes = {"sampling": "shuffle", "size": self.size, "lot_size": self.lot_size}
        return {**sizes, "key": _to_text(self.key), "first_epoch": self.first_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the key of a sampler with the same sizes."""
        _require_same(state, self.state_dict())
        self.key, self.first_epoch, self._epoch = int(state["key"]), int(state["first_epoch"]), None


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
        self._drawn: dict[tuple[int | None, int], np.ndarray] = {}  # lots drawn, not released: they come again

    def __len__(self) -> int:
        """Return the number of lots in an epoch, 1/q rounded."""
        return self.sampler.lots_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the physical batches of the lots up to the end of the epoch."""
        self._iterations += 1
        iteration = self._iterations
        start = self.lots.next
        stop = start + len(self) - start % len(self)
        queue: deque[PhysicalBatch] = deque()
        batches = self._fetch(self._chunks(range(start, stop), queue))
        for _ in range(start, stop):
            self._before_lot()
            last = False
            while not last:
                batch = next(batches)
                physical = queue.popleft()
                self.lots.deliver(physical)
                yield batch
                if iteration != self._iterations:
                    raise RuntimeError("a newer iteration over the private loader has begun; finish that one")
                self.lots.require_captured()
                last = physical.last

    def _chunks(self, lots: range, queue: deque[PhysicalBatch]) -> Iterator[np.ndarray]:
        for lot in lots:
            members = self._draw(lot)
            size = self.physical_batch_size or max(1, len(members))
            cuts = range(0, max(1, len(members)), size)
            for cut in cuts:
                part = members[cut : cut + size]
                queue.append(PhysicalBatch(lot, max(1, len(part)), len(part), first=cut == 0, last=cut == cuts[-1]))
                yield part

    def _draw(self, lot: int) -> np.ndarray:
        self._drawn = {name: members for name, members in self._drawn.items() if name[1] >= self.lots.next}
        name = (self.sampler.key, lot)
        if name not in self._drawn:
            self._drawn[name] = self.sampler.draw(lot)
        return self._drawn[name]

    def _fetch(self, chunks: Iterator[np.ndarray]) -> Iterator[Any]:
        source, dataset = self.source, self.dataset
        workers = source.num_workers if isinstance(source, DataLoader) else 0
        if isinstance(dataset, TensorDataset) and self._collate is default_collate and not workers:
            tensors = dataset.tensors
            for chunk in chunks:
                index = torch.from_numpy(chunk).to(tensors[0].device)
                yield [tensor[index] if len(chunk) else _blank(tensor[:1]) for tensor in tensors]
            return
        options: dict[str, Any] = {}
        if isinstance(source, DataLoader):
            names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
            options = {name: getattr(source, name) for name in names}
            if workers:
                options["prefetch_factor"] = source.prefetch_factor
        # A generator of its own: without one, each new iteration (a resumed epoch is one) would take a number
        # from torch's global generator, and dropout would no longer be that of the unbroken run.
        seed = int(_random(self.sampler.key, self.lots.next, purpose=1).integers(1 << 63))
        generator = torch.Generator().manual_seed(seed)
        collate = partial(_collate_or_blank, dataset, self._collate)
        numbers: Any = (chunk.tolist() for chunk in chunks)
        yield from DataLoader(dataset, batch_sampler=numbers, collate_fn=collate, generator=generator, **options)


def _collate_or_blank(dataset: Dataset[Any], collate: Callable[[list[Any]], Any], examples: list[Any]) -> Any:
    return collate(examples) if examples else tree_map(_blank, collate([dataset[0]]))


def _blank(value: Any) -> Any:
    """Blank features; labels, lengths and token numbers stay those of the first example, so that they are valid."""
    return torch.zeros_like(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def dataset_of(source: DataLoader[Any] | Dataset[Any]) -> tuple[Dataset[Any], int]:
    """Return the dataset behind a source, and its length (private: not to be published).

    Raises:
        ValueError: If the source cannot be sampled by index, is empty, or chooses examples by itself.
    """
    dataset = source.dataset if isinstance(source, DataLoader) else source
    indexable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not indexable:
        raise ValueError(
            f"private training draws examples by index: {type(dataset).__name__} must have __len__ and __getitem__ "
            "(an iterable dataset or a loader without a length cannot be sampled)"
        )
    if isinstance(source, DataLoader):
        _require_plain_loader(source)
    try:
        size = len(cast(Sized, dataset))
    except (TypeError, NotImplementedError) as error:
        raise ValueError(f"private training needs the length of {type(dataset).__name__}: {error}") from error
    if size == 0:
        raise ValueError("the dataset is empty: there is nothing to train on")
    return dataset, size


def _require_plain_loader(loader: DataLoader[Any]) -> None:
    if loader.batch_sampler is None:
        raise ValueError("a DataLoader with batch_size=None does not form batches; give it a batch_size")
    sampler, records = loader.sampler, len(cast(Sized, loader.dataset))
    known = type(loader.batch_sampler) is BatchSampler and type(sampler) in (RandomSampler, SequentialSampler)
    if isinstance(sampler, RandomSampler):
        known = known and not sampler.replacement and sampler.num_samples in (0, records)
    if not known:
        raise ValueError(
            f"the DataLoader chooses its examples in its own way ({type(loader.batch_sampler).__name__}, "
            f"{type(sampler).__name__}), which private lots would ignore. Give a DataLoader without sampler or "
            "batch_sampler; to leave examples out, wrap the dataset in torch.utils.data.Subset."
        )


def public_lot(source: DataLoader[Any] | Dataset[Any], expected_batch_size: float | None) -> float | None:
    """Return B as the user wrote it down: the argument, else the loader's ``batch_size``, else ``None``."""
    if expected_batch_size is None:
        return source.batch_size if isinstance(source, DataLoader) else None
    return positive("expected_batch_size", expected_batch_size)


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
        ValueError: If q or B is missing or impossible, or if the numbers contradict each other.
    """
    lot = public_lot(source, expected_batch_size)
    records = size if dataset_size == "public" else dataset_size
    if records is not None:
        records = whole('dataset_size (if not "public")', records)
    if sample_rate is not None and not 0 < positive("sample_rate", sample_rate) <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
    if sample_rate is not None and expected_batch_size is not None and records is not None:
        assert lot is not None
        if not math.isclose(sample_rate * records, lot, rel_tol=0.01):
            raise ValueError(
                f"sample_rate={sample_rate}, expected_batch_size={expected_batch_size} and {records} records "
                "contradict each other (B = q N); give two of the three"
            )
    if lot is None and sample_rate is not None and records is not None:
        lot = sample_rate * records
    if sample_rate is None and lot is not None and records is not None:
        sample_rate = lot / records
        if sample_rate > 1:
            raise ValueError(
                f"a batch size of {lot:g} is more than the {records} records: sample_rate would be {sample_rate:g}, "
                "and must be in (0, 1]"
            )
    if sample_rate is None or lot is None:
        raise ValueError(
            "the sampling rate q and the expected batch size B are public numbers, and the number of records is not "
            "unless you say so. Give sample_rate= and expected_batch_size= (or a loader with a batch_size), or "
            'dataset_size=N (a public figure), or dataset_size="public" to declare len(dataset) public.'
        )
    return float(sample_rate), float(lot)


def _random(key: int | None, number: int, purpose: int = 0) -> np.random.Generator:
    """Return the generator of one lot (or epoch): the counter's upper words name it, the lowest counts draws."""
    if key is None:
        return np.random.Generator(np.random.PCG64(secrets.randbits(256)))
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, number, purpose]))


def _distinct(random: np.random.Generator, size: int, count: int) -> np.ndarray:
    """Return a uniformly random set of ``count`` of ``range(size)``: the first distinct values of a stream."""
    if count > size // 2:
        return random.permutation(size)[:count]
    stream = np.empty(0, dtype=np.int64)
    while True:
        stream = np.concatenate([stream, random.integers(size, size=count // 2 + 8 if len(stream) else count + 8)])
        _, first = np.unique(stream, return_index=True)
        if len(first) >= count:
            return stream[np.sort(first)[:count]]


def _to_text(key: int | None) -> str | None:
    return None if key is None else str(key)


def _from_text(text: str | None) -> int | None:
    return None if text is None else int(text)


def _require_same(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise unless a saved sampler has our settings, and a key where we have one."""
    for name in ours.keys() | saved.keys():
        theirs, here = saved.get(name), ours.get(name)
        if (theirs is None) != (here is None) or (name not in ("key", "first_epoch") and theirs != here):
            what = "secure=" if name == "key" else f"{name}: saved {theirs!r}, here {here!r}"
            raise ValueError(
                f"the checkpoint and this engine disagree on {what}; call make_private with the same arguments to "
                "resume"
            )
