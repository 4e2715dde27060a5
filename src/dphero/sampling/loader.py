"""The loader that hands lots to the user, in physical batches that fit in memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from dphero.numerics.transfer import to_device
from dphero.sampling.collate import CollateCheck, Part, PrivateCollate, rows_to_check, stack_examples
from dphero.sampling.lots import Lots, PhysicalBatch
from dphero.sampling.randomness import SeededWorker, secret
from dphero.sampling.samplers import Sampler

logger = logging.getLogger(__name__)


class PrivateLoader:
    """Iterates over an epoch of lots, in physical batches, with the user's own loading machinery.

    Args:
        source: The user's ``DataLoader`` (its dataset, workers, collate function and pinned memory are kept),
            or a dataset with ``__len__`` and ``__getitem__``.
        sampler: Draws the lots.
        lots: Where training stands; moved on as batches are handed out.
        before_lot: Called before a lot is drawn; raises to refuse it.
        before_batch: Called before each physical batch is handed out.
        handed_out: Called with each physical batch, just before the user gets it.
        expected_batch_size: The public expected lot size.
        physical_batch_size: The most rows handed out at a time; ``None`` for whole lots. Or what tells, whenever rows
            are about to be fetched, how many that is now.
        pad_to: Public lengths to which examples are padded.
    """

    def __init__(
        self,
        source: DataLoader[Any] | Dataset[Any],
        sampler: Sampler,
        lots: Lots,
        *,
        before_lot: Callable[[], None],
        before_batch: Callable[[], None] = lambda: None,
        handed_out: Callable[[Any], None] = lambda batch: None,
        expected_batch_size: float,
        physical_batch_size: int | Callable[[], int | None] | None,
        pad_to: Sequence[int] = (),
    ) -> None:
        self.source, self.sampler, self.lots = source, sampler, lots
        self.dataset = source.dataset if isinstance(source, DataLoader) else source
        self.batch_size = expected_batch_size
        self._most_rows = physical_batch_size
        self._before_lot, self._before_batch, self._handed_out = before_lot, before_batch, handed_out
        self._collate = source.collate_fn if isinstance(source, DataLoader) else default_collate
        # torch's own stacks examples, and refuses those of different shapes
        plain = self._collate is default_collate
        if plain and pad_to:
            raise ValueError(
                f"pad_to={pad_to} needs a loader whose collate_fn pads examples; torch's own stacks those of one shape"
            )
        self._private: Callable[[Any], list[Part]] = (
            stack_examples if plain else PrivateCollate(self._collate, self.dataset, pad_to)
        )
        self._check = CollateCheck()
        self._iterations = 0
        self._warned = False
        self._drawn: dict[tuple[int | None, int], np.ndarray] = {}  # lots drawn, not released: they come again

    @property
    def physical_batch_size(self) -> int | None:
        """The most rows handed out at a time; ``None`` for whole lots."""
        return self._most_rows() if callable(self._most_rows) else self._most_rows

    def __len__(self) -> int:
        """Return the number of lots in an epoch, 1/q rounded; with ``physical_batch_size`` there are more batches."""
        return self.sampler.lots_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the physical batches of the lots up to the end of the epoch."""
        self.lots.require_open()
        self._iterations += 1
        iteration = self._iterations
        start = self.lots.next
        stop = start + len(self) - start % len(self)
        queue: deque[PhysicalBatch] = deque()
        batches = self._fetch(self._chunks(range(start, stop), queue))
        try:
            for lot in range(start, stop):
                self._before_lot()
                parts: deque[tuple[PhysicalBatch, Any]] = deque()
                members = self._draw(lot)
                for number in count():
                    self.lots.generators.begin(secret(self.sampler.key, lot, number))
                    if not parts:
                        fetched, physical = next(batches), queue.popleft()
                        parts.extend(self._parts(physical, members[: physical.real], fetched))
                        members = members[physical.real :]
                    physical, batch = parts.popleft()
                    self._before_batch()
                    self.lots.deliver(physical)
                    self._handed_out(batch)
                    yield batch
                    self.lots.require_open()
                    if iteration != self._iterations:
                        raise RuntimeError("a newer iteration over the private loader has begun; finish that one")
                    self.lots.require_captured()
                    if physical.last:
                        break
        except GeneratorExit:  # somebody has enough, as trainers do that count batches
            if iteration == self._iterations:
                self._warn_if_in_parts()
            raise
        finally:
            if iteration == self._iterations:  # else it is a newer iteration that has a batch in hand
                self.lots.generators.end()

    def _warn_if_in_parts(self) -> None:
        """Say, once, that an iteration ended in the middle of a lot."""
        if not self.lots.in_parts or self._warned:
            return
        self._warned = True
        logger.warning(
            "The iteration over the private loader ended in the middle of lot %d. Nothing of it was released; it comes "
            "again, whole, in the next iteration. A lot comes in several batches (physical_batch_size=%s), while "
            "len(loader) counts lots, %d in an epoch: a trainer that stops after that many batches (Lightning, the "
            "Trainer of transformers) trains on fewer lots than it seems. engine.steps tells how many were released; "
            "give it more epochs, or leave physical_batch_size out.",
            self.lots.next,
            self.physical_batch_size,
            len(self),
        )

    def _parts(
        self, physical: PhysicalBatch, members: np.ndarray, fetched: list[Part]
    ) -> Iterator[tuple[PhysicalBatch, Any]]:
        """Yield what was fetched for a physical batch: one batch, or one for each public length."""
        for number, part in enumerate(fetched):
            rows, padding = part.rows or physical.rows, part.padding
            if part.rows is None:
                some = {place: int(members[place]) for place in rows_to_check(len(members))}
                padding = self._check.look(self._make_at_once, some, len(members), part.batch)
            handed = physical
            if len(fetched) > 1 or rows != physical.rows or padding is not None:
                handed = replace(
                    physical,
                    rows=rows,
                    real=min(physical.real, rows),
                    first=physical.first and number == 0,
                    last=physical.last and number == len(fetched) - 1,
                    padding=padding,
                )
            yield handed, part.batch if physical.real else tree_map(_blank, part.batch)

    def _make_at_once(self, members: list[int]) -> Any:
        """Make a batch as a data set does that makes whole batches."""
        return self._collate(self.dataset.__getitems__(members))  # type: ignore[attr-defined]

    def _chunks(self, lots: range, queue: deque[PhysicalBatch]) -> Iterator[np.ndarray]:
        """Yield the examples of each physical batch; for an empty lot the first one, which is then blanked out."""
        for lot in lots:
            members, first = self._draw(lot), True
            while first or len(members):
                size = self.physical_batch_size or max(1, len(members))
                part, members = members[:size], members[size:]
                queue.append(PhysicalBatch(lot, max(1, len(part)), len(part), first=first, last=not len(members)))
                first = False
                yield part if len(part) else np.zeros(1, dtype=np.int64)

    def _draw(self, lot: int) -> np.ndarray:
        name = (self.sampler.key, lot)
        if name not in self._drawn:
            self._drawn = {name: members for name, members in self._drawn.items() if name[1] >= self.lots.next}
            self._drawn[name] = self.sampler.draw(lot)
        return self._drawn[name]

    def _fetch(self, chunks: Iterator[np.ndarray]) -> Iterator[list[Part]]:
        source, dataset = self.source, self.dataset
        workers = source.num_workers if isinstance(source, DataLoader) else 0
        # of this very type: a subclass may make its examples in a way of its own
        if type(dataset) is TensorDataset and self._collate is default_collate and not workers:
            tensors = dataset.tensors
            for chunk in chunks:
                index = to_device(torch.from_numpy(chunk), tensors[0].device)
                yield [Part([_rows_of(tensor, index) for tensor in tensors], len(chunk), None)]
            return
        options: dict[str, Any] = {}
        if isinstance(source, DataLoader):
            names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
            options = {name: getattr(source, name) for name in names}
            if workers:
                options["prefetch_factor"] = source.prefetch_factor
                options["worker_init_fn"] = SeededWorker(
                    secret(self.sampler.key, self.lots.next), source.worker_init_fn
                )
        # A generator of its own: without one, each new iteration (a resumed epoch is one) would take a number from
        # torch's global generator, and what is drawn afterwards would no longer be that of the unbroken run.
        seed = int.from_bytes(secret(self.sampler.key, self.lots.next)[:7])
        generator = torch.Generator().manual_seed(seed)
        numbers: Any = (chunk.tolist() for chunk in chunks)
        yield from DataLoader(dataset, batch_sampler=numbers, collate_fn=self._private, generator=generator, **options)


def _rows_of(tensor: Tensor, index: Tensor) -> Tensor:
    """Return some rows of a tensor, as ``tensor[index]`` does: on a CPU that takes pictures ten times as long."""
    simple = tensor.is_cpu and index.is_cpu and tensor.is_contiguous()
    return tensor.index_select(0, index) if simple else tensor[index]


def _blank(value: Any) -> Any:
    """Blank features; labels, lengths and token numbers stay those of the first example, so that they are valid."""
    return torch.zeros_like(value) if isinstance(value, Tensor) and value.is_floating_point() else value
