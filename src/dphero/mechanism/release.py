"""The mechanism: the one place where noise is added, and the ledger is written.

    w_i = A⁻¹ g_i      clip to C      Σ w̄_i + σ C z      g̃ = A (…) / B

A is the geometry that guidance made from released things. Three modes share this code and differ in the
geometry in which norms are taken, the one that shapes the noise, and the event that is charged:

=============  ===============  ==============  =======================================
mode           norms            noise           charged
=============  ===============  ==============  =======================================
``ellipsoid``  ‖A⁻¹ g_i‖        σ C A z         DP-SGD(q, σ), exactly
``ball``       ‖g_i‖            σ C A z / s     DP-SGD(q, σ); s is A's smallest scale
``published``  ‖g_i‖            σ C A z         DP-SGD(q, σ s), adaptively; consent needed
=============  ===============  ==============  =======================================
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dphero.accounting import Budget, Event, Ledger, NoNoise
from dphero.geometry.geometry import Geometry, identity
from dphero.guidance import Block, Guidance, Prepares, Released
from dphero.mechanism.clipping import Clipping
from dphero.noise import NoiseSource, can_keep, overlap
from dphero.numerics.precision import full_precision

__all__ = ["Lot", "Mechanism", "Mode"]

logger = logging.getLogger(__name__)

Mode = Literal["ellipsoid", "ball", "published"]

_ROUNDING = 0.1
"""Of C: what one example may add in whitened space by changing how a sum is rounded, were all gradients alike."""
_MILD = 10.0
"""Conditions up to which a shape magnifies that little."""


class _UnevenError(ValueError):
    """A geometry in which the rounding of a sum would show."""


class Lot(Protocol):
    """What is released: see :class:`~dphero.mechanism.lot_sum.LotSum`."""

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """Clipped sums Σ_i w̄_i / B in parameter space; a missing name is a sum of zero, and gets noise."""

    @property
    def marks(self) -> Sequence[Tensor]:
        """Numbers, on the CPU, that tell this lot from others, known before its sums are."""

    @property
    def count(self) -> Tensor | None:
        """The count that an adaptive clip rule releases along, else ``None``."""


class Mechanism:
    """Turns the clipped sum of a lot into a private gradient, and charges for it.

    Formal guarantee: in modes ``ellipsoid`` and ``ball`` a release is the Gaussian mechanism with
    multiplier σ on a sum that one example moves by at most C in the whitened space, for *every*
    geometry that depends on earlier releases alone: colouring is post-processing.

    Args:
        mode: ``ellipsoid``, ``ball`` or ``published``.
        parameters: Name to parameter.
        templates: What guidance may know of each parameter besides its value.
        guidance: Makes geometries from released things.
        clipping: The clip rule; its ``norm`` is C.
        noise: Where noise comes from.
        noise_multiplier: σ.
        expected_lot: B, the public divisor.
        event: Returns the event that one release costs, given its effective multiplier.
        ledger: Charged at every release.
    """

    def __init__(
        self,
        mode: Mode,
        *,
        parameters: Mapping[str, nn.Parameter],
        templates: Mapping[str, Mapping[str, Any]],
        guidance: Guidance,
        clipping: Clipping,
        noise: NoiseSource,
        noise_multiplier: float,
        expected_lot: float,
        event: Callable[[float], Event],
        ledger: Ledger,
    ) -> None:
        self.mode, self.guidance, self.clipping, self.noise = mode, guidance, clipping, noise
        self.noise_multiplier, self.expected_lot = noise_multiplier, expected_lot
        self.ledger = ledger
        self.budget: Budget | None = None
        self.releases = 0
        self._parameters, self._templates, self._event = dict(parameters), templates, event
        self._identity = {name: identity(tuple(p.shape)) for name, p in parameters.items()}
        self._geometry: dict[str, Geometry] = dict(self._identity)
        self._wanted_by: tuple[Any, ...] = ()  # further normals, and the memory for them: see `_further`
        self._normals: tuple[list[Tensor], dict[str, Tensor]] = ([], {})
        self._last: dict[str, Tensor] | None = None
        self._next: dict[str, Geometry] | None = None  # made ahead of its time
        self._begun = False
        self._renewed_at = 0
        self.refresh()

    # -- geometry ---------------------------------------------------------------------------------------

    @property
    def norm_geometry(self) -> Mapping[str, Geometry]:
        """The geometry in which per-example norms are taken."""
        return self._geometry if self.mode == "ellipsoid" else self._identity

    @property
    def noise_geometry(self) -> Mapping[str, Geometry]:
        """The geometry that shapes the noise."""
        return self._geometry

    def refresh(self) -> None:
        """Ask guidance for the geometry of the coming releases, unless it has given it already.

        One that is too uneven is refused at the beginning; later on, that before it stays.
        """
        try:
            with full_precision():
                self._geometry, self._next = self._next or self._asked(), None
        except _UnevenError as error:
            if not self.releases:
                raise
            logger.warning("The shape of the noise stays as it was. Of the new one: %s", error)
        self._begun, self._renewed_at = False, self.releases

    def _asked(self) -> dict[str, Geometry]:
        found = self.guidance.geometry(self._released())
        unknown = found.keys() - self._parameters.keys()
        if unknown:
            raise ValueError(f"guidance returned a geometry for unknown parameters {sorted(unknown)}")
        geometry = {**self._identity, **found}
        if self.mode != "published" and any(shape.smallest == 0 for shape in geometry.values()):
            raise ValueError("guidance leaves directions without noise, which gives no privacy: give it a floor")
        if self.mode == "ellipsoid":
            self._require_digits(geometry)
        if self.mode == "ball":
            smallest = min(shape.smallest for shape in geometry.values())
            geometry = {name: shape.scaled(1 / smallest) for name, shape in geometry.items()}
        return geometry

    def _require_digits(self, geometry: Mapping[str, Geometry]) -> None:
        """Refuse a shape in which the rounding of a sum shows beside the noise.

        A sum is rounded relative to its size, which is that of its strongest direction, and by how much depends on
        every example. In the weakest direction of the noise that counts `condition` times as much.
        """
        for name, shape in geometry.items():
            condition, dtype = shape.largest / shape.smallest, _precise(self._parameters[name].dtype)
            if condition > _MILD and condition * torch.finfo(dtype).eps * self.expected_lot > _ROUNDING:
                raise _UnevenError(
                    f"the noise of {name!r} would be {condition:.3g} times stronger in some directions than in others. "
                    f"With lots of {self.expected_lot:g}, the rounding of {dtype} would show through where it is weak: "
                    "give guidance a floor or a smaller exponent, or train in float64 (module.double())"
                )

    def before_lot(self) -> None:
        """Refuse a lot that the budget does not cover; renew the geometry when its time has come.

        A geometry never changes within a lot: norms and noise see the same one.
        """
        age = self.releases - self._renewed_at
        if age >= self.guidance.refresh_every:
            self.refresh()
        elif age == self.guidance.refresh_every - 1 and isinstance(self.guidance, Prepares):
            with full_precision():
                self._begun = self.guidance.prepare(self._released())
        self.check_budget()

    def _ask_ahead(self) -> None:
        """Ask guidance within a release. What goes wrong must not spoil that: it will again, before the next lot."""
        self._begun = False
        try:
            self._next = self._asked()
        except Exception as error:
            logger.info("Guidance is asked again before the next lot, as it found no geometry ahead: %s", error)

    def _released(self) -> Released:
        blocks = tuple(
            Block(
                name=name,
                value=parameter,
                gradient=self._last[name] if self._last is not None else None,
                geometry=self._geometry[name],
                **self._templates[name],
            )
            for name, parameter in self._parameters.items()
        )
        return Released(
            step=self.releases,
            blocks=blocks,
            noise_scale=self._gradient_multiplier * self.clipping.norm / self.expected_lot,
        )

    # -- release ----------------------------------------------------------------------------------------

    def next_event(self) -> Event:
        """Return what the next release will cost."""
        multiplier = self.noise_multiplier
        if self.mode == "published":
            multiplier *= min(shape.smallest for shape in self._geometry.values())
            if multiplier == 0:  # some direction gets no noise at all
                return NoNoise()
        return self._event(multiplier)

    def check_budget(self) -> None:
        """Raise :class:`~dphero.BudgetExhausted` if the next release would exceed the budget."""
        if self.budget is not None:
            self.budget.check(self.ledger, self.next_event())

    @property
    def _gradient_multiplier(self) -> float:
        """σ of the gradient alone, smaller noise for it being spent on the count of an adaptive clip rule."""
        if self.clipping.count_noise is None:
            return self.noise_multiplier
        rest = self.noise_multiplier**-2 - (2 * self.clipping.count_noise) ** -2
        return rest**-0.5

    @torch.no_grad()
    def release(self, lot: Lot) -> dict[str, Tensor]:
        """Release one lot: charge the ledger, add noise.

        Args:
            lot: What to release. Its sums are used up: some become gradients themselves. On a GPU they are asked for
                when the noise is on its way, since they may have to be waited for.

        Returns:
            The private gradient of every parameter.
        """
        self.check_budget()
        self.ledger.record(self.next_event())
        scale = self._gradient_multiplier * self.clipping.norm / self.expected_lot
        normals, extra_normals = self._further()
        on_cpu = any(p.is_cpu for p in self._parameters.values())
        onto = self._becoming_gradients(lot.sums, extra_normals) if on_cpu else {}
        bound_to = self._sums_or_marks(lot, on_cpu)
        flat, others = self._room({name: p.shape for name, p in self._parameters.items() if name not in onto})
        gradients = {name: onto[name] if name in onto else others[name] for name in self._parameters}
        query = [] if self.clipping.count_noise is None else [torch.empty((), dtype=torch.float64, device="cpu")]
        rest = [*flat, *normals, *query]
        stds = [*(scale * self.noise_geometry[name].smallest for name in onto), *[scale] * len(rest)]
        try:
            with overlap(self._ask_ahead if self._begun else None):  # on a GPU: while the sums are on their way
                self.noise.fill([*onto.values(), *rest], stds, self.releases, [True] * len(onto), bound_to)
                for name, noise in gradients.items():
                    if name in extra_normals:
                        self.noise_geometry[name].shape_noise_(noise, extra_normals[name], prescaled=name in onto)
                    elif not self.noise_geometry[name].is_identity:
                        self.noise_geometry[name].colour_(noise)
        finally:  # whatever happened (an interrupt, say): this number will not be served again
            self.releases += 1
        sums = lot.sums
        named = [name for name in others if name in sums]
        if named:
            torch._foreach_add_([others[name] for name in named], [sums[name] for name in named])
        gradients = {name: noisy.to(self._parameters[name].dtype) for name, noisy in gradients.items()}
        if self.guidance.needs_gradients:
            self._last = gradients
            self.guidance.observe(self._released())
            self._last = None
        if self.clipping.count_noise is not None:  # last: the bound above was this release's
            assert lot.count is not None
            noise_on_count = self.clipping.count_noise * float(query[0]) / scale
            self.clipping.adapt(float(lot.count) + noise_on_count, self.expected_lot)
        return gradients

    @staticmethod
    def _sums_or_marks(lot: Lot, on_cpu: bool) -> list[Tensor]:
        """Return what the noise of a lot is bound to: its sums and count; on a GPU numbers that are known earlier."""
        if not on_cpu:
            return list(lot.marks)
        totals = lot.sums.values() if lot.count is None else [*lot.sums.values(), lot.count]
        return [total.cpu() for total in totals]

    def _further(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return memory for the further normals that some geometries shape their noise with: whole, and cut for each.

        It is kept for as long as the geometries are the same, and the parameters where and as they were.
        """
        kinds = {name: (_precise(p.dtype), p.device) for name, p in self._parameters.items()}
        if not self._wanted_by or self._wanted_by[0] is not self._geometry or self._wanted_by[1] != kinds:
            shapes = {name: self.noise_geometry[name].extra_normals(dtype) for name, (dtype, _) in kinds.items()}
            self._normals = self._room({name: shape for name, shape in shapes.items() if shape is not None})
            self._wanted_by = (self._geometry, kinds)
        return self._normals

    def _becoming_gradients(self, sums: Mapping[str, Tensor], extra_normals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums that noise can be added to in place.

        They own their memory, and to shape the noise then takes the sum along (``shape_noise_``) or does nothing.
        """
        memory = Counter(total.untyped_storage().data_ptr() for total in sums.values())
        found = {}
        for name, parameter in self._parameters.items():
            total = sums.get(name)
            along = name in extra_normals or self.noise_geometry[name].is_identity
            if total is None or not along or not can_keep(total):
                continue
            storage = total.untyped_storage()
            alone = storage.nbytes() == total.nbytes and memory[storage.data_ptr()] == 1
            if alone and total.dtype == _precise(parameter.dtype) and total.shape == parameter.shape:
                found[name] = total
        return found

    def _room(self, shapes: Mapping[str, Sequence[int]]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return long pieces of memory, one a device and type, and what is cut from them for each parameter named."""
        kinds: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name in shapes:
            parameter = self._parameters[name]
            kinds.setdefault((parameter.device, _precise(parameter.dtype)), []).append(name)
        long: list[Tensor] = []
        found: dict[str, Tensor] = {}
        for (device, dtype), names in kinds.items():
            sizes = [prod(shapes[name]) for name in names]
            flat = torch.empty(sum(sizes), device=device, dtype=dtype)
            long.append(flat)
            for name, part in zip(names, flat.split(sizes), strict=True):
                found[name] = part.view(tuple(shapes[name]))
        return long, {name: found[name] for name in shapes}

    # -- checkpoint -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs for the coming releases to be what they would have been."""
        return {
            "mode": self.mode,
            "releases": self.releases,
            "renewed_at": self._renewed_at,
            "noise_multiplier": self.noise_multiplier,
            "noise": self.noise.state_dict(),
            "clipping": self.clipping.state_dict(),
            "guidance": self.guidance.state_dict(),
            "geometry": _states(self._geometry),
            "next_geometry": None if self._next is None else _states(self._next),
            "ledger": self.ledger.to_json(),
        }

    def check_state(self, state: Mapping[str, Any], next_lot: int) -> None:
        """Refuse the state of another mechanism, and one whose parts contradict each other; nothing is changed.

        Raises:
            ValueError: If so.
        """
        if state["mode"] != self.mode:
            raise ValueError(f"the checkpoint was made with mechanism {state['mode']!r}, this engine has {self.mode!r}")
        if state["noise_multiplier"] != self.noise_multiplier:
            raise ValueError(
                f"the checkpoint was made with noise multiplier {state['noise_multiplier']}, this engine has "
                f"{self.noise_multiplier}; make the model private with the same value to resume"
            )
        releases, ledger = int(state["releases"]), Ledger.from_json(state["ledger"])
        noises = self.noise.read_last_release(state["noise"]) + 1
        counts = {"releases": releases, "next lot": next_lot, "noises": noises}
        if not releases == next_lot >= noises or not 0 <= int(state["renewed_at"]) <= releases:
            raise ValueError(f"the checkpoint contradicts itself, and cannot be trusted: {counts}")
        if ledger.steps < releases:
            raise ValueError(
                f"the checkpoint contradicts itself: {releases} releases were made, its ledger has {ledger.steps}"
            )

    def check_ledger(self) -> None:
        """Refuse a ledger in which the releases of this training cost something else than they do here.

        Raises:
            ValueError: If so.
        """
        for event in _latest(self.ledger, self.releases):
            if not self._may_be_ours(event):
                raise ValueError(
                    f"the checkpoint's ledger holds {event} for a release of this training, which costs "
                    f"{self._event(self.noise_multiplier)}: make the model private with the same arguments to resume"
                )

    def _may_be_ours(self, event: Event) -> bool:
        """Tell whether a release of this mechanism may have cost this."""
        if isinstance(event, NoNoise):
            return self.mode == "published"
        own = self._event(self.noise_multiplier)
        free = {"epoch"} if self.mode != "published" else {"noise_multiplier"}
        names = {field.name for field in fields(own)} - free
        return type(event) is type(own) and all(getattr(event, name) == getattr(own, name) for name in names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint that was checked; :meth:`load_noise` is the last step."""
        ledger = Ledger.from_json(state["ledger"])
        device = next(iter(self._parameters.values())).device  # checkpoints are read to the CPU
        wanted = [state["guidance"], state["geometry"], state.get("next_geometry")]  # older checkpoints have no such
        guidance, geometry, following = tree_map_only(Tensor, lambda tensor: tensor.to(device), wanted)
        self.clipping.load_state_dict(state["clipping"])
        self.guidance.load_state_dict(guidance)
        self.releases, self._renewed_at, self.ledger = int(state["releases"]), int(state["renewed_at"]), ledger
        self._geometry = self._from_states(geometry)
        self._next, self._begun = None if following is None else self._from_states(following), False

    def load_noise(self, state: Mapping[str, Any]) -> None:
        """Go on with the noise of a checkpoint: when nothing else can fail any more, since noise does not go back."""
        self.noise.load_state_dict(state["noise"])

    def _from_states(self, states: Mapping[str, Any]) -> dict[str, Geometry]:
        return {**self._identity, **{name: Geometry.from_state(state) for name, state in states.items()}}


def _latest(ledger: Ledger, count: int) -> list[Event]:
    """Return the events of the latest releases, equal ones that follow each other once."""
    found: list[Event] = []
    for event, times in reversed(list(ledger.runs())):
        if count <= 0:
            break
        found.append(event)
        count -= times
    return found


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Return the type that noise and sum are made and added in; a shorter one's grid would show the sum through it."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _states(geometry: Mapping[str, Geometry]) -> dict[str, Any]:
    return {name: shape.state() for name, shape in geometry.items() if not shape.is_identity}
