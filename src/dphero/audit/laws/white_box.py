"""A look inside: many real releases, and for each the noise that was added, who was in the lot, and the geometry.

The auditor made the data, so the sum in every release is known: no record (blank lots) or one direction in each
parameter. What is left of a release besides that is noise. An onlooker follows with a guidance of its own that is fed
with nothing but what was released: if the engine's geometry is another, it has seen something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero.audit.canary import Plant, Port, plant
from dphero.audit.engine_release import canary_gradient, records
from dphero.audit.laws.checks import Check
from dphero.audit.laws.independent_price import price_check
from dphero.audit.laws.lots_law import poisson_checks, shuffle_checks
from dphero.audit.laws.noise_law import NoiseRecord, grid_check, last_bits_check, noise_checks
from dphero.audit.settings import Settings
from dphero.geometry.geometry import Geometry
from dphero.mechanism.release import Mechanism

_RECORDS, _RATE = 64, 0.25
_PLAIN = 64
"""Releases of an engine without a shape."""
_ALIKE = 1e-3
"""Relative: up to which two geometries that were made from the same things differ by rounding."""


def look_inside(
    settings: Settings,
    model: nn.Module,
    *,
    releases: int,
    delta: float,
    seed: int,
    report: Callable[[int], None] = lambda done: None,
) -> list[Check]:
    """Release many lots, and check noise, lots, geometry, ledger and price.

    Args:
        settings: How the engine is made.
        model: Whose layers the data enter.
        releases: How many.
        delta: δ of the price.
        seed: Makes it repeatable.
        report: Called with the number of releases done, now and then.
    """
    watched = _Watched(settings, model, seed)
    for number in range(releases):
        watched.release(loaded=number % 2 == 1)
        if number % 64 == 63 or number == releases - 1:
            report(number + 1)
    members = np.array(watched.members)
    if settings.sampling == "poisson":
        lots = poisson_checks(members, _RATE)
    else:
        lots = shuffle_checks(members, len(watched.loader))
    charged = watched.engine.ledger.steps
    return [
        *noise_checks(watched.noise, coarse=watched.coarse),
        *_digits(watched, model, seed),
        *lots,
        Check.exactly(
            "geometry",
            f"up to {watched.apart:.1g} from what follows from the releases alone",
            sound=watched.apart <= _ALIKE,
        ),
        Check.exactly("ledger", f"{charged} of {releases} releases are on it", sound=charged >= releases),
        price_check(watched.engine.ledger, delta, watched.engine.price(delta).epsilon),
    ]


def _digits(watched: _Watched, model: nn.Module, seed: int) -> list[Check]:
    """Check that the noise has all its digits: as it was released, and as it was drawn.

    Shaping mixes the numbers that are drawn, and hides a grid that they lie on. So an engine without a shape makes some
    releases as well.
    """
    if watched.coarse:
        return []
    plain = _Watched(replace(watched.settings, mechanism="ellipsoid", guidance="isotropic"), model, seed + 1)
    for _ in range(_PLAIN):
        plain.release(loaded=False)
    return [
        last_bits_check(watched.rounded + plain.rounded, watched.numbers + plain.numbers),
        grid_check(plain.noise.kept, "noise: digits as drawn"),
    ]


class _Watched:
    """An engine whose every release is looked into."""

    def __init__(self, settings: Settings, model: nn.Module, seed: int) -> None:
        self.settings = settings
        placed = settings.placed(model)
        self.plants = self._plants(placed)
        self.port = Port(placed, self.plants)
        planted = records(self.plants, [1.0] * _RECORDS)
        numbers = torch.arange(_RECORDS, device=settings.device)
        shuffled = settings.sampling == "shuffle"
        self.expected = _RATE * _RECORDS
        lot: dict[str, Any] = {} if shuffled else {"sample_rate": _RATE}
        self.optimizer = torch.optim.SGD(self.port.parameters(), lr=0.0)
        self.engine, self.loader = settings.attach(
            self.port,
            self.optimizer,
            TensorDataset(*planted.tensors, numbers),
            seed=seed,
            expected_batch_size=int(self.expected) if shuffled else self.expected,
            **lot,
        )
        self.parameters = dict(self.port.named_parameters())
        self.coarse = any(each.dtype.itemsize < 4 for each in self.parameters.values())
        self.onlooker = _Onlooker(self.mechanism)
        shapes = {name: Geometry(tuple(each.shape)) for name, each in self.parameters.items()}
        self.noise = NoiseRecord({name: (shape.rows, shape.columns) for name, shape in shapes.items()}, seed)
        self.members: list[NDArray[np.bool_]] = []
        self.apart = 0.0
        self.rounded = self.numbers = 0  # released numbers of blank lots, and those of them that end in eight zeros
        self._gradient = canary_gradient(self.port, self.plants, self.engine)
        self._fresh = torch.Generator().manual_seed(seed)
        self._batches: Iterator[Any] = iter(())

    @property
    def mechanism(self) -> Mechanism:
        """The engine's mechanism."""
        return self.engine._attached.mechanism

    def _plants(self, model: nn.Module) -> list[Plant]:
        shapes = {f"model.{name}": Geometry(tuple(each.shape)) for name, each in model.named_parameters()}
        return plant(model, shapes, clip_norm=self.settings.max_grad_norm, shaped=True, prefix="model.")

    def release(self, *, loaded: bool) -> None:
        """Release one lot: of the canary's gradient for each member, or of nothing."""
        self.onlooker.before_lot()
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.loader)
            batch = next(self._batches)
        self._compare()
        physical = self.engine._attached.lots.pending
        present = np.zeros(_RECORDS, dtype=bool)
        if physical is not None and physical.real:
            present[batch[-1].cpu().numpy()[: physical.real]] = True
        self.members.append(present)
        unit = self._unit()
        self.optimizer.zero_grad()
        with self.settings.precision():
            outputs = self.port(*batch[: len(self.plants)])
        loss: Any = 0.0
        for output, readout in zip(outputs, batch[len(self.plants) : -1], strict=True):
            loss = loss + (output * readout).sum()
        (loss * float(loaded)).backward()
        released = {name: _released(each).clone() for name, each in self.parameters.items()}
        self.noise.add({name: self._noise(name, each, unit, loaded) for name, each in released.items()})
        if not loaded and not self.coarse:
            for each in released.values():
                bits = each.view(torch.int32 if each.dtype == torch.float32 else torch.int64)
                self.rounded += int(((bits & 0xFF) == 0).sum())
                self.numbers += each.numel()
        self._compare()
        self.onlooker.follow(released)

    def _unit(self) -> float:
        """Return σ C / B, by what is charged; an adaptive bound is public, and so is what it leaves of σ."""
        clip_norm, multiplier = self.settings.max_grad_norm, self.settings.noise_multiplier
        if self.settings.clipping == "adaptive":
            clip_norm, multiplier = self.mechanism.clipping.norm, self.mechanism.gradient_multiplier
        return multiplier * clip_norm / self.expected

    def _compare(self) -> None:
        """Note how far the engine's geometry is from that which follows from the releases."""
        self.apart = max(self.apart, _distance(self.mechanism.noise_geometry, self.onlooker.geometry))

    def _noise(self, name: str, released: Tensor, unit: float, loaded: bool) -> NDArray[np.float64]:
        """Return what is left of a parameter's release besides the sum, whitened and over its scale.

        The sum of a loaded lot lies along the gradient that all records have: what is released in that direction is
        replaced by a number of the auditor's.
        """
        shape = self.onlooker.geometry[name]
        whitened = shape.whiten(released.double()) / unit
        along = shape.whiten(self._gradient[name])
        length = torch.linalg.vector_norm(along)
        if loaded and length > 0:
            along = along / length
            own = torch.randn((), generator=self._fresh, dtype=torch.float64)
            whitened = whitened + (own.to(along.device) - (whitened * along).sum()) * along
        return _matrix(whitened).cpu().numpy()


class _Onlooker:
    """Makes geometries from released things alone, at the times at which the mechanism does.

    It has a copy of the engine's guidance, to which nothing but released gradients is shown.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self._mechanism, self._shape = mechanism, mechanism.shape.independent_copy()
        self._step, self._noise_scale = mechanism.releases, mechanism.noise_scale

    @property
    def geometry(self) -> Mapping[str, Geometry]:
        """The geometry of the coming release's noise."""
        return self._shape.noise

    def before_lot(self) -> None:
        """Renew the geometry when its time has come."""
        self._noise_scale = self._mechanism.noise_scale  # public, as an adaptive bound is
        self._shape.before_lot(self._step, self._noise_scale)

    def follow(self, released: Mapping[str, Tensor]) -> None:
        """Take note of one release."""
        self._step += 1
        self._shape.after_release(self._step, self._noise_scale, released)


def _distance(ours: Mapping[str, Geometry], theirs: Mapping[str, Geometry]) -> float:
    """Return how far two geometries are apart: that of a fixed vector, whitened by both, relative to its length."""
    largest = 0.0
    for name, shape in ours.items():
        if shape is theirs[name]:
            continue
        fixed = torch.cos(torch.arange(shape.rows * shape.columns, dtype=torch.float64)).reshape(shape.shape)
        here, there = shape.to("cpu").whiten(fixed), theirs[name].to("cpu").whiten(fixed)
        largest = max(largest, float((here - there).norm() / there.norm()))
    return largest


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1)


def _released(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach()
