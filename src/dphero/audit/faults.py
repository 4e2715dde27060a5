"""Planted faults: ways in which private training has gone wrong elsewhere, to show that the audit sees them.

Each is a context manager that breaks the engine inside its ``with`` block, and nowhere else. For tests and benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dphero.accounting import Ledger
from dphero.clipping import Clipping, Flat
from dphero.lot_sum import LotSum
from dphero.mechanism import Mechanism
from dphero.noise import FastNoise
from dphero.noise.source import Target
from dphero.run import Run
from dphero.sampling import PoissonSampler

__all__ = ["FAULTS"]


@contextmanager
def _replaced(owner: type, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a method by what ``make`` returns for the original."""
    original = owner.__dict__[name]
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _half_noise() -> AbstractContextManager[None]:
    """The noise has half the standard deviation that is charged for."""

    def make(original: Any) -> Any:
        def draw(self: Any, targets: list[Target], release: int) -> None:
            original(self, [target._replace(std=target.std / 2) for target in targets], release)

        return draw

    return _replaced(FastNoise, "_draw", make)


class _Leaky:
    """A clip rule that leaves the last weight as it is."""

    def __init__(self, rule: Clipping) -> None:
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def weights(self, square_norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the rule's weights, but for one parameter."""
        found = dict(self._rule.weights(square_norms))
        name = [each for each in found if each.endswith("weight")][-1]
        return {**found, name: torch.ones_like(found[name])}


def _unclipped_layer() -> AbstractContextManager[None]:
    """The gradients of one parameter (the last weight) are summed without their clip weights."""

    def make(original: Any) -> Any:
        def add(self: Any, *arguments: Any) -> None:
            rule = self._clipping
            self._clipping = _Leaky(rule)
            try:
                original(self, *arguments)
            finally:
                self._clipping = rule

        return add

    return _replaced(LotSum, "add", make)


def _noise_used_twice() -> AbstractContextManager[None]:
    """Every second release gets the noise of the one before it."""

    def make(original: Any) -> Any:
        return lambda self, targets, release: original(self, targets, release - release % 2)

    return _replaced(FastNoise, "_draw", make)


def _shuffled_lots() -> AbstractContextManager[None]:
    """Lots are the parts of a shuffled epoch, and priced as Poisson lots."""

    def make(original: Any) -> Any:
        def draw(self: PoissonSampler, lot: int) -> np.ndarray:
            epoch, place = divmod(lot, self.lots_per_epoch)
            order = np.random.Generator(np.random.Philox(key=self.key, counter=[0, 0, epoch, 0])).permutation(self.size)
            return np.array_split(order, self.lots_per_epoch)[place]

        return draw

    return _replaced(PoissonSampler, "draw", make)


def _divided_by_the_drawn_lot() -> AbstractContextManager[None]:
    """Sum and noise are divided by the number of examples that were drawn, instead of the public one."""

    def make(original: Any) -> Any:
        def consume(self: Run, gradients: Any) -> None:
            public, batch = self.mechanism.expected_lot, self.lots.pending
            assert batch is not None
            self.mechanism.expected_lot = float(max(batch.real, 1))
            try:
                original(self, gradients)
            finally:
                self.mechanism.expected_lot = public

        return consume

    return _replaced(Run, "_consume", make)


def _biases_without_noise() -> AbstractContextManager[None]:
    """The biases are released as they are."""

    def make(original: Any) -> Any:
        def release(self: Mechanism, lot: Any) -> dict[str, Tensor]:
            bare = {name: each.clone() for name, each in lot.sums.items() if name.endswith("bias")}
            return {name: bare.get(name, each) for name, each in original(self, lot).items()}

        return release

    return _replaced(Mechanism, "release", make)


def _norms_without_the_biases() -> AbstractContextManager[None]:
    """Examples are clipped by the norm of their weights' gradients alone."""

    def make(original: Any) -> Any:
        def weights(self: Flat, square_norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            counted = {name: each for name, each in square_norms.items() if not name.endswith("bias")}
            return dict.fromkeys(square_norms, next(iter(original(self, counted).values())))

        return weights

    return _replaced(Flat, "weights", make)


def _lots_off_the_ledger() -> AbstractContextManager[None]:
    """From the fifth release on, nothing is charged."""

    def make(original: Any) -> Any:
        def release(self: Mechanism, lot: Any) -> dict[str, Tensor]:
            ledger = self.ledger
            if self.releases >= 4:
                self.ledger = Ledger()
            try:
                found: dict[str, Tensor] = original(self, lot)
            finally:
                self.ledger = ledger
            return found

        return release

    return _replaced(Mechanism, "release", make)


FAULTS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "none": nullcontext,
    "half the noise": _half_noise,
    "one layer not clipped": _unclipped_layer,
    "biases without noise": _biases_without_noise,
    "norms without the biases": _norms_without_the_biases,
    "noise used twice": _noise_used_twice,
    "shuffled lots at the Poisson price": _shuffled_lots,
    "divided by the drawn lot": _divided_by_the_drawn_lot,
    "lots left off the ledger": _lots_off_the_ledger,
}
"""By what is wrong; ``none`` for the sound engine. (The published recipe is no fault of the engine, but its own.)"""
