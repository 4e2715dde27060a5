"""No guidance: the same noise in every direction, which is DP-SGD."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from dphero.geometry.geometry import Geometry
from dphero.guidance.base import Released


class Isotropic:
    """A = I for every block, at every step."""

    refresh_every: ClassVar[int] = sys.maxsize
    needs_gradients: ClassVar[bool] = False

    def observe(self, released: Released) -> None:
        """Ignores the release."""

    def geometry(self, released: Released) -> dict[str, Geometry]:
        """Returns no geometry: every block keeps the identity."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes an empty state."""
        if state:
            raise ValueError("the checkpoint is of a run with another guidance: call make_private with that one")

    def __repr__(self) -> str:
        return "Isotropic()"
