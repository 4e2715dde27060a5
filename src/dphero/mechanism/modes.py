"""The two sound modes: what clipping and noise do with the geometry A that guidance chose.

=============  ===============  ==============  =======================================
mode           norms            noise           charged
=============  ===============  ==============  =======================================
``ellipsoid``  ‖A⁻¹ g_i‖        σ C A z         DP-SGD(q, σ), exactly
``ball``       ‖g_i‖            σ C A z / s     DP-SGD(q, σ); s is A's smallest scale
=============  ===============  ==============  =======================================

The recipe as published, which is a third one and not sound, has a module of its own: :mod:`dphero.mechanism.published`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import ClassVar, Literal

import torch

from dphero.accounting import Event
from dphero.geometry.geometry import Geometry

Mode = Literal["ellipsoid", "ball", "published"]

_ROUNDING = 0.1
"""Of C: what one example may add in whitened space by changing how a sum is rounded, were all gradients alike."""
_MILD = 10.0
"""Condition numbers up to which a geometry magnifies that little."""


class UnevenError(ValueError):
    """A geometry in which the rounding of a sum would show beside the noise."""


class ModeRule(ABC):
    """How a geometry is used, and what a release under it costs."""

    name: ClassVar[Mode]
    clips_in_geometry: ClassVar[bool]
    """Whether norms are those of A⁻¹ g; else they are plain."""

    @abstractmethod
    def admit(
        self, geometry: dict[str, Geometry], dtypes: Mapping[str, torch.dtype], expected_lot: float
    ) -> dict[str, Geometry]:
        """Return the geometry that shapes the noise, made from the one that guidance chose.

        Args:
            geometry: Of every parameter, by name.
            dtypes: The precision in which each parameter's sum is computed.
            expected_lot: B.

        Raises:
            ValueError: If noise of this geometry would not be private.
        """

    def event(self, event: Callable[[float], Event], multiplier: float, geometry: Mapping[str, Geometry]) -> Event:
        """Return what a release costs, given what it costs at an effective noise multiplier."""
        return event(multiplier)

    def may_have_cost(self, found: Event, own: Event) -> bool:
        """Tell whether a release of this mode, which now costs ``own``, may have cost ``found`` earlier."""
        return same_event(found, own, apart_from="epoch")


class Ellipsoid(ModeRule):
    """Clip and add noise in the same geometry. The price does not depend on it."""

    name = "ellipsoid"
    clips_in_geometry = True

    def admit(
        self, geometry: dict[str, Geometry], dtypes: Mapping[str, torch.dtype], expected_lot: float
    ) -> dict[str, Geometry]:
        """Refuse noise that misses a direction, and noise so uneven that the rounding of a sum shows beside it.

        A sum is rounded relative to its size, which is that of its strongest direction, and by how much depends on
        every example. In the weakest direction of the noise that counts `condition` times as much.
        """
        _require_noise_everywhere(geometry)
        for name, shape in geometry.items():
            condition = shape.largest / shape.smallest
            if condition > _MILD and condition * torch.finfo(dtypes[name]).eps * expected_lot > _ROUNDING:
                raise UnevenError(
                    f"the noise of {name!r} would be {condition:.3g} times stronger in some directions than in others. "
                    f"With lots of {expected_lot:g}, the rounding of {dtypes[name]} would show through where it is "
                    "weak: give guidance a floor or a smaller exponent, or train in float64 (module.double())"
                )
        return geometry


class Ball(ModeRule):
    """Clip by the plain norm; scale the noise up until its weakest direction has the full σ C."""

    name = "ball"
    clips_in_geometry = False

    def admit(
        self, geometry: dict[str, Geometry], dtypes: Mapping[str, torch.dtype], expected_lot: float
    ) -> dict[str, Geometry]:
        """Refuse noise that misses a direction; divide by the smallest scale of all."""
        _require_noise_everywhere(geometry)
        smallest = min(shape.smallest for shape in geometry.values())
        return {name: shape.scaled(1 / smallest) for name, shape in geometry.items()}


def same_event(found: Event, own: Event, *, apart_from: str) -> bool:
    """Tell whether two events are equal but for one field."""
    names = {field.name for field in fields(own)} - {apart_from}
    return type(found) is type(own) and all(getattr(found, name) == getattr(own, name) for name in names)


def _require_noise_everywhere(geometry: Mapping[str, Geometry]) -> None:
    if any(shape.smallest == 0 for shape in geometry.values()):
        raise ValueError("guidance leaves directions without noise, which gives no privacy: give it a floor")
