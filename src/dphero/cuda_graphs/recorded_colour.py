"""The colouring of noise, recorded once and replayed: on a GPU, starting its many small products takes longest."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dphero.cuda_graphs.live_geometry import LiveGeometry
from dphero.cuda_graphs.pool import Pool
from dphero.geometry.geometry import Geometry, colour_all_
from dphero.numerics.one_piece import fits, room_for, whole_of

logger = logging.getLogger(__name__)

_DEVICES = ("cuda",)
_FIRST = 3
"""So many times without a recording: libraries do then what they do at first use."""
_TOLERANCE = 1e-4
"""Relative difference allowed between what is made of some numbers from a copy of a geometry, and by that itself."""


class RecordedColour:
    """Colours the noise of one release after another, in geometries of one form.

    A geometry is copied to places of its own, which a recording can read. The same operations do it from there before
    there is a recording, so that a resumed run, which begins without one, has the same noise to the bit. They are
    compared with the geometry itself before they are trusted; where they cannot be, noise is coloured as usual. Once
    there is a recording, its places are lent as room for noise, which then is copied neither there nor back.
    """

    def __init__(self) -> None:
        self._made: _Recording | None = None
        self._followed: Mapping[str, Geometry] | None = None
        self._given_up = False

    def room(self, geometry: Mapping[str, Geometry], parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Return the places of a recording that is trusted, where noise is coloured without being copied.

        There are none for a geometry of another form, or for parameters that were moved or cast since.
        """
        if self._made is None or not self._made.is_recorded or not _may_be_recorded(parameters.values()):
            return None
        try:
            self._follow(geometry)
        except (RuntimeError, ValueError) as error:
            self._give_up(error)
        if self._made is not None and not fits(self._made.places.values(), parameters.values()):
            self._made = self._followed = None
        return None if self._made is None else self._made.places

    def __call__(self, geometry: Mapping[str, Geometry], noise: Mapping[str, Tensor]) -> None:
        """Replace each z by A z, in place."""
        if not self._given_up and _may_be_recorded(noise.values()):
            lent = self._made is not None and self._made.holds(noise)
            try:
                self._follow(geometry)
                if geometry is not self._followed:
                    shaped = _shaped(geometry)
                    self._made = _Recording(shaped, noise) if shaped else None
                    self._followed = geometry
                if self._made is not None:
                    self._made.run(noise)
                return
            except (RuntimeError, ValueError) as error:
                if lent:  # and coloured in part, who knows
                    raise
                self._give_up(error)  # nothing was coloured
        colour_all_(geometry, noise)

    def _follow(self, geometry: Mapping[str, Geometry]) -> None:
        """Take over the values of this geometry; forget what was made for one of another form: its memory is needed."""
        if geometry is self._followed or self._made is None:
            return
        shaped = _shaped(geometry)
        if shaped and self._made.live.follow(shaped):
            self._followed = geometry
        else:
            self._made = self._followed = None

    def _give_up(self, error: Exception) -> None:
        self._made, self._given_up = None, True
        logger.info("Noise is coloured without a recording: %s", str(error).partition("\n")[0])


class _Recording:
    """What colours tensors in places of its own: by one operation after another at first, then by a recording.

    Attributes:
        live: The geometry, as it is followed.
        places: Room for all noise, also for what is not coloured.
        is_recorded: Whether there is a recording, and it was compared.
    """

    def __init__(self, geometry: Mapping[str, Geometry], noise: Mapping[str, Tensor]) -> None:
        self._device = next(iter(noise.values())).device
        self.live = LiveGeometry(geometry, self._device)
        # They lie as noise does, what is not coloured among them: then one copy does.
        self.places = dict(zip(noise, room_for(noise.values()), strict=True))
        self._whole = whole_of([*self.places.values()])
        self._runs, self._replay, self.is_recorded = 0, self._one_after_another, False
        self._require_replayed(noise, geometry)

    def holds(self, noise: Mapping[str, Tensor]) -> bool:
        """Tell whether noise was drawn in the places themselves."""
        return all(noise[name] is place for name, place in self.places.items())

    def run(self, noise: Mapping[str, Tensor]) -> None:
        """Replace each z by A z; where that fails, z is as it was, unless it was drawn in the places themselves."""
        if self.holds(noise):
            self._replay()
            return
        self._runs += 1
        if self._runs > _FIRST and not self.is_recorded:
            self._record(noise)
        theirs, ours = self._pieces(noise)
        torch._foreach_copy_(ours, theirs)
        self._replay()
        torch._foreach_copy_(theirs, ours)

    def _record(self, noise: Mapping[str, Tensor]) -> None:
        self._pool = Pool(self._device)
        self._replay, _ = self._pool.record(self._one_after_another)
        self._require_replayed(noise, self.live.live)
        self.is_recorded = True

    def _one_after_another(self) -> None:
        colour_all_(self.live.live, self.places)

    def _pieces(self, noise: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return noise and its places: in one piece, if all of it lies so."""
        theirs = [noise[name] for name in self.places]
        whole = None if self._whole is None else whole_of(theirs)
        if whole is None or self._whole is None or whole.shape != self._whole.shape:
            return theirs, [*self.places.values()]
        return [whole], [self._whole]

    def _require_replayed(self, noise: Mapping[str, Tensor], geometry: Mapping[str, Geometry]) -> None:
        """Raise if the places get something else than each geometry makes of a copy, of one parameter at a time."""
        theirs, ours = self._pieces(noise)
        torch._foreach_copy_(ours, theirs)
        self._replay()
        gaps = []
        for name, part in noise.items():
            expected = part.clone()
            if name in geometry:
                geometry[name].colour_(expected)
            size = expected.norm().clamp(min=1e-30)
            gaps.append(expected.sub_(self.places[name]).norm() / size)
        gap = float(torch.stack(gaps).max())
        if not gap <= _TOLERANCE:
            raise ValueError(f"what was recorded makes something else of noise, by {gap:.2g} of its size")


def _shaped(geometry: Mapping[str, Geometry]) -> dict[str, Geometry]:
    return {name: shape for name, shape in geometry.items() if not shape.is_identity}


def _may_be_recorded(tensors: Iterable[Tensor]) -> bool:
    devices = {tensor.device for tensor in tensors}
    on_gpu = len(devices) == 1 and next(iter(devices)).type in _DEVICES
    return on_gpu and not torch.are_deterministic_algorithms_enabled()
