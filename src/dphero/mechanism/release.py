"""The mechanism: the one place where noise is added, and the ledger is written.

    w_i = A⁻¹ g_i      clip to C      Σ w̄_i + σ C z      g̃ = A (…) / B

A is the geometry that guidance made from released things (:mod:`dphero.mechanism.noise_shape`). How it is used, and
what a release then costs, is up to the mode (:mod:`dphero.mechanism.modes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dphero.accounting import Budget, Event, Ledger
from dphero.geometry.geometry import Geometry, colour_all_
from dphero.guidance import Guidance
from dphero.mechanism.clipped_sum import ClippedSum
from dphero.mechanism.clipping import Clipping
from dphero.mechanism.modes import Ball, Ellipsoid, Mode
from dphero.mechanism.noise_shape import NoiseShape
from dphero.mechanism.published import Published
from dphero.noise import NoiseSource
from dphero.numerics.one_piece import room_for
from dphero.numerics.transfer import Fetched, mark

Colour = Callable[[Mapping[str, Geometry], Mapping[str, Tensor]], None]
_COUNT = "the count of the clip rule"  # a name that no parameter has
_FIRST = 32
"""So many releases on a GPU have noise that is bound to their sums: while a learning rate is zero, weights may be."""
_RULES = {rule.name: rule for rule in (Ellipsoid, Ball, Published)}


@runtime_checkable
class RoomyColour(Protocol):
    """Replaces noise by A times it, by name, and best where that was drawn in room of its own."""

    def __call__(self, geometry: Mapping[str, Geometry], noise: Mapping[str, Tensor]) -> None:
        """Colour noise where it lies."""

    def room(self, geometry: Mapping[str, Geometry], parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Return room for the noise of the next release, of this geometry, if there is any for parameters like these.

        It is lent: noise of later releases is drawn there too. So what is handed over has to lie elsewhere.
        """


class _Room(NamedTuple):
    """Where the noise of a release is drawn; if it is lent, a later release will be drawn there too."""

    places: dict[str, Tensor]
    lent: bool


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
        colour: Replaces noise by A times it, by name; it may lend the room for it.
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
        colour: Colour | RoomyColour = colour_all_,
    ) -> None:
        self.mode, self.rule, self.clipping, self.noise = mode, _RULES[mode](), clipping, noise
        self.noise_multiplier, self.expected_lot = noise_multiplier, expected_lot
        self.ledger = ledger
        self.budget: Budget | None = None
        self.releases = 0
        self._room: _Room | None = None  # see `make_room`
        self._parameters, self._event, self._colour = dict(parameters), event, colour
        self.shape = NoiseShape(
            self.rule,
            guidance,
            parameters=self._parameters,
            templates=templates,
            expected_lot=expected_lot,
            noise_scale=self.noise_scale,
        )

    # -- before a lot -------------------------------------------------------------------------------------

    @property
    def guidance(self) -> Guidance:
        """What chooses the shape of the noise."""
        return self.shape.guidance

    @property
    def norm_geometry(self) -> Mapping[str, Geometry]:
        """The geometry in which per-example norms are taken."""
        return self.shape.norms

    @property
    def noise_geometry(self) -> Mapping[str, Geometry]:
        """The geometry that shapes the noise."""
        return self.shape.noise

    @property
    def gradient_multiplier(self) -> float:
        """σ of the gradient alone: larger where an adaptive clip rule spends a part of the budget on its count."""
        if self.clipping.count_noise is None:
            return self.noise_multiplier
        rest = self.noise_multiplier**-2 - (2 * self.clipping.count_noise) ** -2
        return rest**-0.5

    @property
    def noise_scale(self) -> float:
        """σ C / B: the noise of the next release is that times A z."""
        return self.gradient_multiplier * self.clipping.norm / self.expected_lot

    def before_lot(self) -> None:
        """Renew the geometry when its time has come; refuse a lot that the budget does not cover."""
        self._room = None  # if a lot failed: parameters may be elsewhere by now
        self.shape.before_lot(self.releases, self.noise_scale)
        self.check_budget()

    def make_room(self) -> None:
        """Take memory for the noise of the lot under way, before its norms are known.

        Python has time until a GPU has computed them; from then on the GPU waits for Python. Not for a batch whose
        gradients take memory that they give back once they are summed.
        """
        self._room = self._new_room()

    def _new_room(self) -> _Room:
        if isinstance(self._colour, RoomyColour):
            room = self._colour.room(self.noise_geometry, self._parameters)
            if room is not None:
                return _Room(dict(room), lent=True)
        own = room_for(self._parameters.values())
        return _Room(dict(zip(self._parameters, own, strict=True)), lent=False)

    def next_event(self) -> Event:
        """Return what the next release will cost."""
        return self.rule.event(self._event, self.noise_multiplier, self.noise_geometry)

    def check_budget(self) -> None:
        """Raise :class:`~dphero.BudgetExhausted` if the next release would exceed the budget."""
        if self.budget is not None:
            self.budget.check(self.ledger, self.next_event())

    # -- release ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def release(self, lot: ClippedSum) -> dict[str, Tensor]:
        """Release one lot: charge the ledger, add noise.

        Args:
            lot: The clipped sum of the lot; it can be released only once.

        Returns:
            The private gradient of every parameter.
        """
        scale, counts = self.noise_scale, self.clipping.count_noise is not None
        self.check_budget()
        lot.spend(bound=self.clipping.norm, geometry=self.norm_geometry, divisor=self.expected_lot)
        self.ledger.record(self.next_event())
        try:
            noise, for_count, lent = self._draw(scale, lot, counts)
            self._colour(self.noise_geometry, noise)
        finally:  # whatever happened (an interrupt, say): this number will not be served again
            self.releases += 1
        gradients = self._add(noise, lot.sums, lent=lent)
        self.shape.after_release(self.releases, scale, gradients)
        if for_count is not None:  # last: the bound above was this release's
            self._adapt(lot, for_count / scale)
        return gradients

    def _draw(self, scale: float, lot: ClippedSum, counts: bool) -> tuple[dict[str, Tensor], Tensor | None, bool]:
        """Draw N(0, scale²) for every parameter, and one number more for the count of an adaptive clip rule.

        In single precision at least: the grid of a shorter format would show the sum through the noise. Returned last
        is whether the noise lies in memory that is lent.
        """
        (targets, lent), self._room = self._room or self._new_room(), None
        if counts:
            targets[_COUNT] = torch.zeros((), dtype=torch.float64, device="cpu")
        self.noise.fill(targets, scale, self.releases, bound_to=self._bound_to(lot))
        for_count = targets.pop(_COUNT, None)
        return targets, for_count, lent

    def _bound_to(self, lot: ClippedSum) -> list[Tensor]:
        """Return what the noise of a lot is bound to: its shape, and the lot's sums, count and norms.

        Else two runs with one seed, whose first lots are the same, would have one noise of two shapes, and the sum
        could be solved for. On a GPU the sums are left out, as the norms are known earlier; but for the first releases:
        where a layer begins with zeros, norms do not depend on the labels. There the sums' rows are seen along a line.
        """
        marks = [torch.frombuffer(bytearray(self.shape.digest), dtype=torch.uint8), *lot.marks]
        if self.releases >= _FIRST and not any(parameter.is_cpu for parameter in self._parameters.values()):
            return marks
        sums = [mark(total) for total in lot.sums.values()]
        return [*marks, *Fetched([*sums, *(() if lot.count is None else (lot.count,))]).arrived()]

    def _add(self, noise: dict[str, Tensor], sums: Mapping[str, Tensor], *, lent: bool) -> dict[str, Tensor]:
        """Add the clipped sums to the noise; round once, to each parameter's own type.

        This is done where the noise lies, unless that is lent: what is handed over is never written over.
        """
        drawn = [noise[name] for name in sums]
        if lent:
            added = torch._foreach_add(drawn, list(sums.values())) if sums else []
            own = dict(zip(sums, added, strict=True))
            noise = {name: own[name] if name in own else z.clone() for name, z in noise.items()}
        elif sums:
            torch._foreach_add_(drawn, list(sums.values()))
        return {name: z.to(self._parameters[name].dtype) for name, z in noise.items()}

    def _adapt(self, lot: ClippedSum, normal: Tensor) -> None:
        """Release the count under its own noise; the clip rule moves its bound by it."""
        assert lot.count is not None and self.clipping.count_noise is not None
        self.clipping.adapt(float(lot.count) + self.clipping.count_noise * float(normal), self.expected_lot)

    # -- checkpoint ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs for the coming releases to be what they would have been."""
        return {
            "mode": self.mode,
            "releases": self.releases,
            "noise_multiplier": self.noise_multiplier,
            "noise": self.noise.state_dict(),
            "clipping": self.clipping.state_dict(),
            "ledger": self.ledger.to_json(),
            **self.shape.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any], next_lot: int) -> None:
        """Raise ``ValueError`` for the state of another mechanism, and for one that contradicts itself."""
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint that was checked; :meth:`load_noise` is the last step."""
        ledger, device = Ledger.from_json(state["ledger"]), next(iter(self._parameters.values())).device
        self.clipping.load_state_dict(state["clipping"])
        self.shape.load_state_dict(state, device)
        self.releases, self.ledger = int(state["releases"]), ledger

    def check_ledger(self) -> None:
        """Raise ``ValueError`` if the ledger says that releases of this training cost something else than they do."""
        own, left = self._event(self.noise_multiplier), self.releases  # what the full σ in every direction costs
        for event, times in reversed(list(self.ledger.runs())):
            if left <= 0:
                break
            left -= times
            if not self.rule.may_have_cost(event, own):
                raise ValueError(
                    f"the checkpoint's ledger holds {event} for a release of this training, which costs {own}: make "
                    "the model private with the same arguments to resume"
                )

    def load_noise(self, state: Mapping[str, Any]) -> None:
        """Go on with the noise of a checkpoint: when nothing else can fail any more, since noise does not go back."""
        self.noise.load_state_dict(state["noise"])
