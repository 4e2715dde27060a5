"""The colouring of noise, recorded once and replayed: on a GPU, starting its many small products takes longest."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dphero.cuda_graphs.live_geometry import LiveGeometry
from dphero.cuda_graphs.pool import Pool
from dphero.geometry.geometry import Geometry, colour_all_
from dphero.numerics.one_piece import room_for, whole_of

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
    compared with the geometry itself before they are trusted; where they cannot be, noise is coloured as usual.
    """

    def __init__(self) -> None:
        self._made: _Recording | None = None
        self._followed: Mapping[str, Geometry] | None = None
        self._given_up = False

    def __call__(self, geometry: Mapping[str, Geometry], noise: Mapping[str, Tensor]) -> None:
        """Replace each z by A z, in place."""
        if not self._given_up and _may_be_recorded(noise.values()):
            try:
                self._follow(geometry, noise)
                if self._made is not None:
                    self._made.run(noise)
                return
            except (RuntimeError, ValueError) as error:  # nothing was coloured
                self._made, self._given_up = None, True
                logger.info("Noise is coloured without a recording: %s", str(error).partition("\n")[0])
        colour_all_(geometry, noise)

    def _follow(self, geometry: Mapping[str, Geometry], noise: Mapping[str, Tensor]) -> None:
        """Take over the values of this geometry."""
        if geometry is self._followed:
            return
        shaped = {name: shape for name, shape in geometry.items() if not shape.is_identity}
        if not shaped:
            self._made = None
        elif self._made is None or not self._made.live.follow(shaped):
            self._made = None  # its memory is needed
            self._made = _Recording(shaped, noise)
        self._followed = geometry


class _Recording:
    """What colours tensors in places of its own: by one operation after another at first, then by a recording."""

    def __init__(self, geometry: Mapping[str, Geometry], noise: Mapping[str, Tensor]) -> None:
        self._device = next(iter(noise.values())).device
        self.live = LiveGeometry(geometry, self._device)
        # They lie as noise does, what is not coloured among them: then one copy does.
        self._places = dict(zip(noise, room_for(noise.values()), strict=True))
        self._whole = whole_of([*self._places.values()])
        self._runs, self._replay = 0, self._one_after_another
        self._require_replayed(noise, geometry)

    def run(self, noise: Mapping[str, Tensor]) -> None:
        """Replace each z by A z; where that fails, z is as it was."""
        self._runs += 1
        if self._runs == _FIRST + 1:
            self._record(noise)
        theirs, ours = self._pieces(noise)
        torch._foreach_copy_(ours, theirs)
        self._replay()
        torch._foreach_copy_(theirs, ours)

    def _record(self, noise: Mapping[str, Tensor]) -> None:
        self._pool = Pool(self._device)
        self._replay, _ = self._pool.record(self._one_after_another)
        self._require_replayed(noise, self.live.live)

    def _one_after_another(self) -> None:
        colour_all_(self.live.live, self._places)

    def _pieces(self, noise: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return noise and its places: in one piece, if all of it lies so."""
        theirs = [noise[name] for name in self._places]
        whole = None if self._whole is None else whole_of(theirs)
        if whole is None or self._whole is None or whole.shape != self._whole.shape:
            return theirs, [*self._places.values()]
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
            gaps.append(expected.sub_(self._places[name]).norm() / size)
        gap = float(torch.stack(gaps).max())
        if not gap <= _TOLERANCE:
            raise ValueError(f"what was recorded makes something else of noise, by {gap:.2g} of its size")


def _may_be_recorded(tensors: Iterable[Tensor]) -> bool:
    devices = {tensor.device for tensor in tensors}
    on_gpu = len(devices) == 1 and next(iter(devices)).type in _DEVICES
    return on_gpu and not torch.are_deterministic_algorithms_enabled()
