"""The colouring of noise, recorded once and replayed: on a GPU, starting its many small products takes longest."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dphero.cuda_graphs.live_geometry import LiveGeometry
from dphero.cuda_graphs.pool import Pool
from dphero.geometry.geometry import Geometry, colour_all_

logger = logging.getLogger(__name__)

_DEVICES = ("cuda",)
_FIRST = 3
"""So many times as usual: libraries do then what they do at first use."""
_TOLERANCE = 1e-4
"""Relative difference allowed between what a recording makes of some numbers and what the geometry does."""


class RecordedColour:
    """Colours the noise of one release after another, in geometries of one form.

    A recording reads the geometry from places of its own, into which each new one is copied. It is compared with the
    geometry itself before it is trusted; where it cannot be made, noise is coloured as usual.
    """

    def __init__(self) -> None:
        self._made: _Recording | None = None
        self._followed: Mapping[str, Geometry] | None = None
        self._calls, self._given_up = 0, False

    def __call__(self, geometry: Mapping[str, Geometry], noise: Mapping[str, Tensor]) -> None:
        """Replace each z by A z, in place."""
        self._calls += 1
        if self._given_up or self._calls <= _FIRST or not _may_be_recorded(noise.values()):
            colour_all_(geometry, noise)
            return
        try:
            self._follow(geometry, noise)
        except (RuntimeError, ValueError) as error:
            self._made, self._given_up = None, True
            logger.info("Noise is coloured without a recording: %s", str(error).partition("\n")[0])
            colour_all_(geometry, noise)
            return
        if self._made is not None:
            self._made.run(noise)

    def _follow(self, geometry: Mapping[str, Geometry], noise: Mapping[str, Tensor]) -> None:
        """Let the recording be that of this geometry; leave it out if there is nothing to colour."""
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
    """What colours tensors in places of its own."""

    def __init__(self, geometry: Mapping[str, Geometry], noise: Mapping[str, Tensor]) -> None:
        device = next(iter(noise.values())).device
        self.live = LiveGeometry(geometry, device)
        self._places = {name: noise[name].clone() for name in geometry}
        expected = {name: noise[name].clone() for name in geometry}
        colour_all_(geometry, expected)
        self._pool = Pool(device)
        self._replay, _ = self._pool.record(lambda: colour_all_(self.live.live, self._places))
        found = {name: part.clone() for name, part in noise.items() if name in geometry}
        self.run(found)
        gaps = [(found[name] - part).norm() / part.norm().clamp(min=1e-30) for name, part in expected.items()]
        gap = float(torch.stack(gaps).max())
        if not gap <= _TOLERANCE:
            raise ValueError(f"replayed, it makes something else of noise, by {gap:.2g} of its size")

    def run(self, noise: Mapping[str, Tensor]) -> None:
        places, parts = [*self._places.values()], [noise[name] for name in self._places]
        torch._foreach_copy_(places, parts)
        self._replay()
        torch._foreach_copy_(parts, places)


def _may_be_recorded(tensors: Iterable[Tensor]) -> bool:
    devices = {tensor.device for tensor in tensors}
    on_gpu = len(devices) == 1 and next(iter(devices)).type in _DEVICES
    return on_gpu and not torch.are_deterministic_algorithms_enabled()
