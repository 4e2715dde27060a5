"""One real release of the real engine, again and again, with a worst-case canary and without.

The engine is attached once and releases lot after lot; weights do not move, noise and lots are new each time. What an
attacker makes of a lot is the likelihood ratio of the claimed mechanism, "canary in" over "canary out": the best test
there is, if the claim is true. If it is not, the ratio sees the canary better than the claim allows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero.accounting import Ledger
from dphero.audit.canary import Aim, Plant, Port, plant
from dphero.audit.settings import Settings, small_model
from dphero.engine import PrivacyEngine
from dphero.geometry.geometry import Geometry
from dphero.guidance import Guidance, Released, resolve
from dphero.mechanism.lot_sum import LotSum
from dphero.mechanism.release import Mechanism

Neighbours = Literal["large", "small"]

_NEIGHBOURS: Mapping[Neighbours, tuple[float, ...]] = {
    "large": (-1.0,) * 8,
    "small": (-0.005, 0.0) * 4,
}
"""Gradients of the other examples in the lot, where it is not sampled, over the canary's, whose norm is 100 C.

All pull the other way: a divisor that counts them shows. *Small* ones, of C/2 and 0, are what a clip rule that looks at
the whole lot (at its mean norm, its largest, that of all together) turns into a leak: the canary changes the weight of
everybody.
"""
_WARM_UP = 30
"""Releases of nothing but noise from which guidance by released gradients makes a shape."""
_WARM_UP_SEED = 1 << 40
"""Of these: far from those of other engines in an audit, which must not have their noise."""


@dataclass(eq=False)
class EngineRelease:
    """Releases ``steps`` lots of a private engine and scores them; see :class:`dphero.audit.Release`.

    In every second lot of a release the canary, and its neighbours, pull the other way: noise that is used twice would
    cancel, and does not hide the canary.

    Args:
        settings: How the engine is made.
        model: Whose layers carry the canary.
        sample_rate: q of Poisson lots. At 1 the canary has neighbours that pull the other way.
        steps: Lots in one release; for shuffled lots, those of one epoch.
        seed: Decides noise and lots.
        aim: Where the canary enters the layers.
        neighbours: How large the gradients of the other examples are.
        direction: Draws a random direction of the canary; ``None`` for that in which the noise is weakest.
    """

    settings: Settings
    model: nn.Module = field(default_factory=small_model)
    sample_rate: float = 1.0
    steps: int = 1
    seed: int = 0
    aim: Aim = "weight"
    neighbours: Neighbours = "large"
    direction: int | None = None
    _sides: dict[bool, _Side] = field(default_factory=dict, init=False)
    _prepared: tuple[list[Plant], str | Guidance] | None = field(default=None, init=False)

    def __call__(self, canary_in: bool, seed: int, /) -> float:
        """Release once more; ``seed`` is not used, since the engine's own stream is what is audited."""
        if canary_in not in self._sides:
            self._sides[canary_in] = _Side(self, canary_in)
        return self._sides[canary_in].release()

    def prepared(self) -> tuple[list[Plant], str | Guidance]:
        """Return the canary and the guidance: the same for both worlds."""
        if self._prepared is None:
            self._prepared = _prepare(self.model, self.settings, self.aim, self.direction)
        return self._prepared

    def ledger(self) -> Ledger:
        """Return what the first release wrote into the engine's own ledger."""
        found = [side.first for side in self._sides.values() if side.first is not None]
        if not found:
            raise RuntimeError("nothing was released yet: there is nothing to claim")
        return found[0]

    @property
    def uncharged(self) -> int:
        """How many lots were released without an entry in the engine's ledger."""
        return sum(side.uncharged for side in self._sides.values())

    def weakest_scale(self) -> float:
        """Return s, the scale of the noise along the weakest of all directions."""
        side = self._sides.get(False) or _Side(self, False)
        self._sides[False] = side
        return min(shape.smallest for shape in side.mechanism.noise_geometry.values())


class _Side:
    """One of the two worlds: an engine on the data with the canary, or on those without."""

    def __init__(self, audited: EngineRelease, canary_in: bool) -> None:
        settings, steps = audited.settings, audited.steps
        self.settings = settings
        self.rate, self.steps = audited.sample_rate, steps
        self.shuffled = settings.sampling == "shuffle"
        model = settings.placed(audited.model)
        self.plants, guidance = audited.prepared()
        self.port = Port(model, self.plants)
        others = _NEIGHBOURS[audited.neighbours]
        rows = steps * 4 if self.shuffled else len(others)
        lot: dict[str, Any] = {"sample_rate": self.rate, "expected_batch_size": float(rows) * self.rate}
        if self.shuffled:
            lot = {"expected_batch_size": 4}
        pulling = self.rate == 1.0 and not self.shuffled
        self.neighbours = others if pulling else ()
        weights = list(others) if pulling else [0.0] * (rows - self.shuffled)
        if canary_in or self.shuffled:  # shuffled lots are about blanking a record out, not about leaving it away
            weights.append(float(canary_in))
        self.optimizer = torch.optim.SGD(self.port.parameters(), lr=0.0)
        self.engine, self.loader = settings.attach(
            self.port,
            self.optimizer,
            records(self.plants, weights),
            seed=2 * audited.seed + canary_in,
            guidance=copy.deepcopy(guidance),
            **lot,
        )
        self.first: Ledger | None = None
        self.uncharged = 0
        self._gradient = canary_gradient(self.port, self.plants, self.engine)
        self._clipping = self.mechanism.clipping.state_dict()
        self._batches: Iterator[Any] = iter(())
        self._known: tuple[Mapping[str, Geometry], float] | None = None

    @property
    def mechanism(self) -> Mechanism:
        """The engine's mechanism."""
        return self.engine._attached.mechanism

    def release(self) -> float:
        """Release the lots of one observation; return the log likelihood ratio of "canary in"."""
        self.mechanism.clipping.load_state_dict(self._clipping)
        before = self.engine.ledger.steps
        ratios = [self._lot(1.0 if step % 2 == 0 else -1.0) for step in range(self.steps)]
        self.uncharged += max(0, self.steps - (self.engine.ledger.steps - before))
        if self.first is None:
            self.first = self.engine.ledger.copy()
        if self.shuffled:  # the canary is in one of the lots, nobody knows which
            return float(torch.tensor(ratios, dtype=torch.float64).logsumexp(0)) - math.log(len(ratios))
        return sum(
            math.log1p(self.rate * math.expm1(min(ratio, 700.0))) if self.rate < 1 else ratio for ratio in ratios
        )

    def _lot(self, sign: float) -> float:
        """Release a lot; return ln N(y; μ, 1) / N(y; 0, 1), y being the release along the canary."""
        batch = self._next()
        self._aim()
        self.optimizer.zero_grad()
        with self.settings.precision():
            outputs = self.port(*batch[: len(self.plants)])
        loss: Any = 0.0
        for output, readout in zip(outputs, batch[len(self.plants) :], strict=True):
            loss = loss + (output * readout).sum()
        (loss * sign).backward()
        released = torch.cat([_gradient_of(parameter).flatten() for parameter in self.port.parameters()])
        along = sign * float(released.double() @ self._readout) - self._pull
        return self._mu * along - self._mu**2 / 2

    def _next(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.loader)
            batch = next(self._batches)
        return batch

    def _aim(self) -> None:
        """Where geometry or clip norm are new, find out anew what the canary adds and how best to see it.

        With g the canary's gradient, f its clip weights and A the geometry of the noise, the canary moves the release
        by f g / B, and the noise is σ C A z / B: the best read-out is A⁻² f g, and μ = ‖A⁻¹ f g‖ / (σ C).
        """
        mechanism = self.mechanism
        known = (mechanism.noise_geometry, mechanism.clipping.norm)
        if self._known is not None and self._known[0] is known[0] and self._known[1] == known[1]:
            return
        self._known = known
        unit = mechanism.gradient_multiplier * mechanism.clipping.norm
        moved = self._moved(1.0)
        self._mu = math.sqrt(sum(float(each.square().sum()) for each in moved.values()))
        pulls = {size: self._moved(size) for size in set(self.neighbours) if size}
        self._pull = sum(
            float((pulls[size][name] * each).sum()) / self._mu
            for size in self.neighbours
            if size
            for name, each in moved.items()
        )
        readout = [mechanism.noise_geometry[name].whiten(each).flatten() for name, each in moved.items()]
        self._readout = torch.cat(readout) * (mechanism.expected_lot / unit / self._mu)

    def _moved(self, size: float) -> dict[str, Tensor]:
        """Return A⁻¹ f g / (σ C) of an example with ``size`` times the canary's gradient."""
        mechanism = self.mechanism
        gradient = {name: g * size for name, g in self._gradient.items()}
        norms = {name: mechanism.norm_geometry[name].square_norm(g)[None] for name, g in gradient.items()}
        weights = mechanism.clipping.weights(norms)
        unit = mechanism.gradient_multiplier * mechanism.clipping.norm
        return {name: mechanism.noise_geometry[name].whiten(g * weights[name]) / unit for name, g in gradient.items()}


class _Frozen:
    """Guidance that keeps the geometry it was given."""

    refresh_every, needs_gradients = 10**9, False

    def __init__(self, geometry: Mapping[str, Geometry]) -> None:
        self._geometry = dict(geometry)

    def observe(self, released: Released) -> None:
        """Take no note."""

    def geometry(self, released: Released) -> dict[str, Geometry]:
        """Return the geometry as it was."""
        return dict(self._geometry)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is nothing to go on with."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up nothing."""


def _prepare(
    model: nn.Module, settings: Settings, aim: Aim, direction: int | None
) -> tuple[list[Plant], str | Guidance]:
    """Attach an engine for a moment, to see its geometry; return the worst canary for that, and the guidance to use.

    Where norms are plain, the canary must stay where the noise is weakest: guidance by released gradients is then given
    some releases of nothing but noise to look at, and frozen.
    """
    port, guidance = Port(settings.placed(model), []), resolve(copy.deepcopy(settings.guidance))
    engine, _ = replace(settings, clipping="flat", sampling="poisson", secure=False).attach(
        port,
        torch.optim.SGD(port.parameters(), lr=0.0),
        TensorDataset(torch.zeros(1, 1)),  # which nobody looks at
        seed=_WARM_UP_SEED,
        guidance=guidance,
        sample_rate=1.0,
        expected_batch_size=1.0,
    )
    mechanism, shaped = engine._attached.mechanism, settings.mechanism == "ellipsoid"
    if guidance.needs_gradients and not shaped:
        for _ in range(_WARM_UP):
            mechanism.release(LotSum(mechanism.clipping).finish(mechanism.expected_lot))
        mechanism.shape.refresh(mechanism.releases, mechanism.noise_scale)
    geometry = mechanism.noise_geometry
    engine.detach()
    plants = plant(
        port.model, geometry, clip_norm=settings.max_grad_norm, shaped=shaped, prefix="model.", aim=aim, seed=direction
    )
    frozen = guidance.needs_gradients and not shaped
    return plants, _Frozen(geometry) if frozen else settings.guidance


def records(plants: Sequence[Plant], weights: Sequence[float]) -> TensorDataset:
    """Return one record per weight: the canary's inputs, and its read-outs times that weight.

    No two records are alike, or the engine could not see that it may treat them apart: each has an input a little
    larger, and a read-out smaller by as much.
    """
    size = 1 + torch.arange(len(weights) - 1, -1, -1) / 100
    scale = torch.tensor(weights) / size
    inputs = [_times(size, each.inputs) for each in plants]
    return TensorDataset(*inputs, *(_times(scale, each.readout) for each in plants))


def _times(factors: Tensor, row: Tensor) -> Tensor:
    """Return one multiple of a row for each factor."""
    return row * factors.to(row).view(-1, *[1] * (row.dim() - 1))


def canary_gradient(port: Port, plants: Sequence[Plant], engine: PrivacyEngine) -> dict[str, Tensor]:
    """Return the canary's own gradient, by plain autograd and in float64: what the engine should see."""
    with engine.paused():
        outputs = port(*(each.inputs for each in plants))
        loss: Any = sum((output * each.readout).sum() for output, each in zip(outputs, plants, strict=True))
        names = dict(port.named_parameters())
        found = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
    return {
        name: (torch.zeros_like(parameter) if gradient is None else gradient).double()
        for (name, parameter), gradient in zip(names.items(), found, strict=True)
    }


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
