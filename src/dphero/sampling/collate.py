"""Collate functions: what a batch holds of an example must not depend on the other examples in it.

A collate function that standardises by the batch, or mixes examples up, lets one record change the rows of all others:
clipping then bounds nothing. So a few examples of the first batches, and of each batch of a new shape, are collated
among other neighbours, and their rows are compared. Padding to the longest example is another matter: the rows keep
their values, but their length follows from a neighbour. That is found here and told to the loader, which either pads
further, to a public length (:mod:`dphero.sampling.padding`), or lets the model be examined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from dphero.numerics.compare import nearly_equal
from dphero.numerics.generators import generators_restored, seed_generators
from dphero.sampling.batch_rows import BatchRows
from dphero.sampling.padding import PaddedAxis, Padding, pad_further, padded_axes

_FIRST = 3
"""How many batches are examined whatever their shape."""
_MOST_SHAPES = 4096
"""How many shapes are remembered."""
_SEARCHED = 1000
"""How many examples are looked at to see how a collate function pads."""

_EXAMPLES = 4
"""How many examples of a batch are collated among other neighbours."""
_ALONE = 12
"""How many are collated alone, to see how long they are themselves."""
_SEEDS = 6
"""What a random collate function is tried with: it may mix examples only now and then."""
_TOLERANCE = 1e-5
"""Of the largest entry: rounding may depend on the number of rows."""

Make = Callable[[list[Any]], Any]
"""Makes a batch of examples."""


class Part(NamedTuple):
    """A batch that was fetched, or the part of it that has one public length."""

    batch: Any  # what the collate function made
    rows: int | None  # the number of its examples; None if the data set made the batch at once
    padding: Padding | None  # how, if its length follows from the longest of its examples and this was looked at


class PrivateCollate:
    """A user's collate function, with an eye on what it does. It runs where he wants it to, in workers too.

    Args:
        collate: The function.
        dataset: Where its examples come from.
        pad_to: Public lengths: each example is padded to the smallest that is long enough, in a batch with others of
            the same one.
    """

    def __init__(self, collate: Make, dataset: Any, pad_to: Sequence[int] = ()) -> None:
        self._collate, self._dataset, self._pad_to = collate, dataset, sorted(pad_to)
        self._check = CollateCheck()
        self._learned: tuple[BatchRows, tuple[PaddedAxis, ...]] | None = None

    def __call__(self, members: Any) -> list[Part]:
        """Make a batch of examples, or several if there are several public lengths."""
        if not isinstance(members, list):  # a ready batch
            return [Part(self._collate(members), None, None)]
        if not self._pad_to:
            return [self._part(members)]
        rows, padded = self._learned = self._learned or self._learn(members)
        parts = []
        for length, those in self._by_length(members, rows, padded).items():
            part = self._part(those)
            parts.append(Part(pad_further(part.batch, rows, padded, length), part.rows, None))
        return parts

    def _part(self, members: list[Any]) -> Part:
        count = len(members)
        some = {place: copied(members[place]) for place in rows_to_check(count)}
        batch = self._collate(members)
        return Part(batch, count, self._check.look(self._collate, some, count, batch))

    def _learn(self, members: list[Any]) -> tuple[BatchRows, tuple[PaddedAxis, ...]]:
        """Find examples of different lengths, and see how the collate function pads them."""
        worker = get_worker_info()
        dataset: Any = self._dataset if worker is None else worker.dataset
        one = members[0]
        for number in range(-len(members), min(len(dataset), _SEARCHED)):
            with generators_restored():
                other = members[number] if number < 0 else dataset[number]
                look = CollateExamination(self._collate, {0: one, 1: other}, 2)
                padding = look.padding(self._collate([copied(one), copied(other)]))
            if padding is not None:
                return look.rows, padding.padded
        raise ValueError(
            f"pad_to={self._pad_to} was given, but no two of the first {_SEARCHED} examples differ in length, so that "
            "it cannot be seen how the collate function pads. Leave pad_to out if all examples have one length, or pad "
            "to a public length in the collate function itself."
        )

    def _by_length(self, members: list[Any], rows: BatchRows, padded: Sequence[PaddedAxis]) -> dict[int, list[Any]]:
        """Return the examples by the public length that each is padded to: that follows from its own length alone."""
        if len(self._pad_to) == 1:
            return {self._pad_to[0]: members}
        found: dict[int, list[Any]] = {}
        for member in members:
            with generators_restored():
                shapes = rows.shapes(self._collate([copied(member)]))
            own = max(shapes[filled.path][filled.axis] for filled in padded)
            length = next((length for length in self._pad_to if length >= own), self._pad_to[-1])
            found.setdefault(length, []).append(member)
        return dict(sorted(found.items()))


def stack_examples(members: Any) -> list[Part]:
    """Make a batch with torch's own collate function, which stacks examples and need not be watched."""
    return [Part(default_collate(members), len(members) if isinstance(members, list) else None, None)]


class CollateCheck:
    """Decides which batches of a collate function are examined: the first ones, and each with new shapes."""

    def __init__(self) -> None:
        self._rows: BatchRows | None = None
        self._known: set[tuple[Any, ...]] = set()
        self._looks = 0

    def look(self, collate: Make, some: Mapping[int, Any], count: int, batch: Any) -> Padding | None:
        """Examine a batch if need be; return how it was padded if that was looked at.

        Args:
            collate: Makes batches.
            some: Examples of this one, by their places in it (:func:`rows_to_check`).
            count: How many it has.
            batch: What was made of them.
        """
        if count < 2:
            return None
        shapes = None if self._rows is None else tuple(self._rows.shapes(batch).items())
        if self._looks >= _FIRST and shapes in self._known:
            return None
        self._looks += 1
        examination = CollateExamination(collate, some, count)
        self._rows = examination.rows
        if len(self._known) < _MOST_SHAPES:
            self._known.add(tuple(self._rows.shapes(batch).items()))
        return examination.padding(batch)


class CollateExamination:
    """Looks at one batch of a collate function.

    Args:
        collate: The function. It may change what it is given: it gets copies.
        some: Examples of one batch, by their places in it; two or more.
        count: How many the batch has.

    Attributes:
        rows: Where its batches carry their examples.
        random: Whether it draws random numbers.

    Raises:
        ValueError: If an example's row depends on the other examples.
    """

    def __init__(self, collate: Make, some: Mapping[int, Any], count: int) -> None:
        self._collate, self._some, self._count = collate, some, count
        members = [some[place] for place in _spread(count, _EXAMPLES)]
        with generators_restored() as self._before:
            self.rows = BatchRows(self._make(members[:1] * 2), self._make(members[:1] * 3))
            self._make(members)
            self.random = not self._before.is_current
            for seed in range(_SEEDS) if self.random else [None]:
                self._compare(members, seed)

    def _make(self, members: list[Any], seed: int | None = None) -> Any:
        """Make a batch, with the same random numbers at each call."""
        self._before.restore()
        if seed is not None:
            seed_generators(seed)
        return self._collate([copied(member) for member in members])

    def _compare(self, some: list[Any], seed: int | None) -> None:
        """Exchange one example after the other, or leave it out, and look at the rows of those that stay."""
        batch = self._make(some, seed)
        shapes, rows = self.rows.shapes(batch), self.rows.rows(batch, len(some))
        for place in range(len(some)):
            others = some[:place] + some[place + 1 :]
            exchanged = [*some[:place], some[place - 1], *some[place + 1 :]]
            tries = [exchanged] if self.random else [exchanged, others]  # fewer rows, other random numbers
            for members in tries:
                other = self._make(members, seed)
                if self.rows.shapes(other) != shapes:
                    continue  # another length, which is looked at elsewhere
                if len(members) == len(some):
                    self._require_same_common(batch, other)
                # rows may come in another order, by length for example
                left = self.rows.rows(other, len(members))
                known = sum(_take(left, row) for row in rows)
                if known < len(others):
                    raise ValueError(_MIXED)

    def _require_same_common(self, batch: Any, other: Any) -> None:
        for (path, first), (_, second) in zip(self.rows.common(batch), self.rows.common(other), strict=True):
            if not _same(first, second):
                raise ValueError(
                    f"the collate function returns a value for the whole batch, at {list(path)}, that follows from its "
                    "examples: one record would change what is computed for all others. Return it for each example, or "
                    "leave it out."
                )

    def padding(self, batch: Any) -> Padding | None:
        """Return how a batch is padded; ``None`` if each of the examples looked at is as long as the batch.

        Raises:
            ValueError: If a shorter example is not simply filled up.
        """
        padded: dict[PaddedAxis, None] = {}
        lengths: dict[int, dict[int, int]] = {}
        shapes = self.rows.shapes(batch)
        with generators_restored() as self._before:
            for place in _spread(self._count, _ALONE):
                alone = self._make([self._some[place]])
                if self.rows.shapes(alone) == shapes:
                    continue
                found, row = self._filled(batch, alone, place)
                padded.update(dict.fromkeys(found))
                lengths[row] = {}
                for filled in found:
                    size, own = shapes[filled.path][filled.axis], self.rows.shapes(alone)[filled.path][filled.axis]
                    lengths[row][size] = max(own, lengths[row].get(size, 0))
        return Padding(tuple(padded), lengths) if padded else None

    def _filled(self, batch: Any, alone: Any, place: int) -> tuple[list[PaddedAxis], int]:
        """Return how an example was filled up in a batch, and which row of it is its own."""
        (own,) = self.rows.rows(alone, 1)
        rows = self.rows.rows(batch, self._count)
        paths = [leaf.path for leaf in self.rows.leaves(alone) if leaf.axis is not None]
        tensors = [value for value in own if isinstance(value, Tensor)]
        for row in (place, *(number for number in range(len(rows)) if number != place)):
            theirs = [value for value in rows[row] if isinstance(value, Tensor)]
            padded = [
                padded_axes(path, mine, whole, exact=not self.random)
                for path, mine, whole in zip(paths, tensors, theirs, strict=True)
            ]
            if all(filled is not None for filled in padded):
                return [filled for found in padded if found is not None for filled in found], row
        raise ValueError(_MIXED)


_MIXED = (
    "what the collate function makes of an example depends on the other examples of the batch (batch statistics, "
    "mixup, resizing to the largest?): one record would change the rows of all others, and clipping would bound "
    "nothing. Do it for each example by itself, with public statistics, in the data set or the collate function."
)


def _take(rows: list[list[Any]], wanted: list[Any]) -> bool:
    """Take a row out of a list of them; tell whether it was there."""
    for number, row in enumerate(rows):
        if all(_same(first, second) for first, second in zip(row, wanted, strict=True)):
            del rows[number]
            return True
    return False


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return nearly_equal(first, second, _TOLERANCE)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


def rows_to_check(count: int) -> set[int]:
    """Return the places of the examples that an examination of a batch needs."""
    return {*_spread(count, _EXAMPLES), *_spread(count, _ALONE)}


def copied(value: Any) -> Any:
    """Return an example in containers of its own: some collate functions take labels out of them, or pad in place."""
    if type(value) is dict:
        return {name: copied(each) for name, each in value.items()}
    if type(value) is tuple:
        return tuple(copied(each) for each in value)
    if type(value) is list:
        nested = bool(value) and isinstance(value[0], dict | list | tuple)
        return [copied(each) for each in value] if nested else value.copy()
    return value


def _spread(count: int, most: int) -> list[int]:
    """Return up to ``most`` numbers below ``count``, evenly spread."""
    return list(range(count)) if count <= most else [place * (count - 1) // (most - 1) for place in range(most)]
