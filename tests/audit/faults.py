"""Planted faults: ways in which private training has gone wrong, or could, to show that the audit sees them.

Each is a context manager that breaks the engine's real code inside its ``with`` block, and nowhere else. For tests and
benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dphero.accounting import Ledger
from dphero.audit import Settings
from dphero.geometry.diagonal import Diagonal
from dphero.geometry.geometry import Geometry
from dphero.guidance import PCA, History
from dphero.mechanism.clipping import Clipping, Flat
from dphero.mechanism.lot_sum import LotSum
from dphero.mechanism.release import Mechanism
from dphero.noise import FastNoise
from dphero.noise.source import Target
from dphero.run import Run
from dphero.sampling import PoissonSampler

__all__ = ["FAULTS", "Fault"]


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


def _changed_noise(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> AbstractContextManager[None]:
    """Change the noise of every release; the sums stay as they are."""

    def make(original: Any) -> Any:
        def release(self: Mechanism, lot: Any) -> dict[str, Tensor]:
            sums = {name: each.clone() for name, each in lot.sums.items()}
            found: dict[str, Tensor] = original(self, lot)
            noise = change({name: each - sums.get(name, 0.0) for name, each in found.items()})
            for name, each in found.items():
                each.copy_(noise[name] + sums.get(name, 0.0))
            return found

        return release

    return _replaced(Mechanism, "release", make)


def _weak_layer() -> AbstractContextManager[None]:
    """One layer (the second weight) gets 0.8 of its noise."""

    def change(noise: dict[str, Tensor]) -> dict[str, Tensor]:
        name = [each for each in noise if each.endswith("weight")][1]
        return {**noise, name: 0.8 * noise[name]}

    return _changed_noise(change)


def _shared_noise() -> AbstractContextManager[None]:
    """The second weight gets the noise of the first, as far as that goes."""

    def change(noise: dict[str, Tensor]) -> dict[str, Tensor]:
        first, second = [each for each in noise if each.endswith("weight")][:2]
        return {**noise, second: noise[first].flatten()[: noise[second].numel()].view_as(noise[second])}

    return _changed_noise(change)


def _bare_row() -> AbstractContextManager[None]:
    """One row of the first weight gets no noise."""

    def change(noise: dict[str, Tensor]) -> dict[str, Tensor]:
        name = next(each for each in noise if each.endswith("weight"))
        bare = noise[name].clone()
        bare[1] = 0.0
        return {**noise, name: bare}

    return _changed_noise(change)


def _drawn(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Change the standard normals that the noise is made of, before they are scaled, shaped and added."""

    def make(original: Any) -> Any:
        def draw(self: Any, targets: list[Target], release: int) -> None:
            fresh = [each._replace(tensor=torch.empty_like(each.tensor), std=1.0) for each in targets]
            original(self, fresh, release)
            for target, each in zip(targets, fresh, strict=True):
                target.tensor.copy_(change(each.tensor) * target.std)

        return draw

    return _replaced(FastNoise, "_draw", make)


def _uniform(normals: Tensor) -> Tensor:
    return (2 * torch.special.ndtr(normals) - 1) * math.sqrt(3)


def _cut(most: float) -> Callable[[], AbstractContextManager[None]]:
    """Normals beyond a bound are folded back within it."""
    return lambda: _drawn(lambda normals: torch.where(normals.abs() > most, normals.fmod(most), normals))


def _reused(lag: int) -> Callable[[], AbstractContextManager[None]]:
    """The noise of each release is used once more, ``lag`` releases later."""

    def make(original: Any) -> Any:
        return lambda self, targets, release: original(self, targets, release - lag * (release // lag % 2))

    return lambda: _replaced(FastNoise, "_draw", make)


def _clipped_by(norm: Callable[[Tensor], Tensor]) -> Callable[[], AbstractContextManager[None]]:
    """All examples of a lot get one clip weight, by a norm of the whole lot."""

    def make(original: Any) -> Any:
        def weights(self: Flat, square_norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            squares = torch.stack(list(square_norms.values())).sum(0)
            weight = (self.norm / norm(squares.sqrt()).clamp(min=1e-30)).clamp(max=1.0)
            return dict.fromkeys(square_norms, weight.expand(len(squares)))

        return weights

    return lambda: _replaced(Flat, "weights", make)


def _geometry_from_raw_sums() -> AbstractContextManager[None]:
    """Guidance by past gradients sees the sums before noise was added."""

    def make(original: Any) -> Any:
        def release(self: Mechanism, lot: Any) -> dict[str, Tensor]:
            sums = {name: each.clone() for name, each in lot.sums.items()}
            observe = self.guidance.observe

            def see(released: Any) -> None:
                raw = [replace(each, gradient=sums.get(each.name, each.gradient * 0)) for each in released.blocks]
                observe(replace(released, blocks=tuple(raw)))

            self.guidance.observe = see  # type: ignore[method-assign]
            try:
                found: dict[str, Tensor] = original(self, lot)
            finally:
                self.guidance.observe = observe  # type: ignore[method-assign]
            return found

        return release

    return _replaced(Mechanism, "release", make)


def _geometry_from_the_lot() -> AbstractContextManager[None]:
    """The noise of a release is twice as strong along rows where the sum of its own lot is above its mean."""

    def make(original: Any) -> Any:
        def release(self: Mechanism, lot: Any) -> dict[str, Tensor]:
            shapes = dict(self.noise_geometry)
            for name, each in lot.sums.items():
                rows = each.reshape(len(each), -1).norm(dim=1)
                scales = torch.where(rows > rows.mean(), 2.0, 1.0).double()
                if float(rows.max()) > 0 and each.dim() > 1:
                    shapes[name] = Geometry(tuple(each.shape), left=Diagonal(scales / scales.norm() * len(rows) ** 0.5))
            with _replaced(Mechanism, "noise_geometry", lambda _: shapes):
                found: dict[str, Tensor] = original(self, lot)
            return found

        return release

    return _replaced(Mechanism, "release", make)


def _sampled_more() -> AbstractContextManager[None]:
    """Lots are drawn at 1.2 times the rate that is charged."""

    def make(original: Any) -> Any:
        def draw(self: PoissonSampler, lot: int) -> np.ndarray:
            charged = self.sample_rate
            self.sample_rate = min(1.0, 1.2 * charged)
            try:
                found: np.ndarray = original(self, lot)
            finally:
                self.sample_rate = charged
            return found

        return draw

    return _replaced(PoissonSampler, "draw", make)


def _fixed_size() -> AbstractContextManager[None]:
    """Every lot has the expected size, and is priced as a Poisson lot."""

    def make(original: Any) -> Any:
        def draw(self: PoissonSampler, lot: int) -> np.ndarray:
            random = np.random.Generator(np.random.Philox(key=self.key, counter=[0, 0, lot, 0]))
            return random.permutation(self.size)[: round(self.size * self.sample_rate)]

        return draw

    return _replaced(PoissonSampler, "draw", make)


@contextmanager
def _priced_at(factor: float) -> Iterator[None]:
    """Every accountant prices at a larger δ than it says."""
    from dphero.accounting import accountants

    before = accountants.ACCOUNTANTS

    def wrong(answer: Any) -> Any:
        return lambda query: answer(replace(query, delta=min(factor * query.delta, 0.5)))

    accountants.ACCOUNTANTS = {name: wrong(answer) for name, answer in before.items()}  # type: ignore[misc]
    try:
        yield
    finally:
        accountants.ACCOUNTANTS = before  # type: ignore[misc]


@dataclass(frozen=True)
class Fault:
    """What is wrong.

    Attributes:
        plant: Breaks the engine inside its ``with`` block.
        settings: Of the engine that is audited: the default ones, unless the fault sits elsewhere.
    """

    plant: Callable[[], AbstractContextManager[None]]
    settings: Settings = Settings()  # noqa: RUF009 (frozen)

    def __call__(self) -> AbstractContextManager[None]:
        return self.plant()


FAULTS: Mapping[str, Fault] = {
    "none": Fault(nullcontext),
    "half the noise": Fault(_half_noise),
    "0.8 of the noise in one layer": Fault(_weak_layer),
    "one noise for two layers": Fault(_shared_noise),
    "no noise in one row": Fault(_bare_row),
    "biases without noise": Fault(_biases_without_noise),
    "noise used twice": Fault(_noise_used_twice),
    "noise used again 2 releases later": Fault(_reused(2)),
    "noise used again 5 releases later": Fault(_reused(5)),
    "uniform noise": Fault(lambda: _drawn(_uniform)),
    "tails cut at 2 deviations": Fault(_cut(2.0)),
    "tails cut at 3 deviations": Fault(_cut(3.0)),
    "noise in float16": Fault(lambda: _drawn(lambda normals: normals.half().to(normals.dtype))),
    "one layer not clipped": Fault(_unclipped_layer),
    "norms without the biases": Fault(_norms_without_the_biases),
    "clipping by the lot's mean norm": Fault(_clipped_by(lambda norms: norms.mean())),
    "clipping by the whole lot's norm": Fault(_clipped_by(lambda norms: norms.square().sum().sqrt())),
    "clipping by the lot's largest norm": Fault(_clipped_by(lambda norms: norms.max())),
    "geometry from raw sums": Fault(_geometry_from_raw_sums, Settings(guidance=History(refresh_every=5))),
    "geometry from the lot in hand": Fault(_geometry_from_the_lot),
    "shuffled lots at the Poisson price": Fault(_shuffled_lots),
    "lots at 1.2 times the rate": Fault(_sampled_more),
    "lots of a fixed size": Fault(_fixed_size),
    "divided by the drawn lot": Fault(_divided_by_the_drawn_lot),
    "lots left off the ledger": Fault(_lots_off_the_ledger),
    "priced at 10 δ": Fault(lambda: _priced_at(10.0)),
    "published at its claimed ε": Fault(
        nullcontext, Settings("published", PCA(exponent=1.0, floor=0.0), noise_multiplier=2.0)
    ),
}
"""By what is wrong; ``none`` for the sound engine."""
