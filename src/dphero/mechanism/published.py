"""The recipe as published, isolated in one file: it is not sound, and runs only by consent.

It clips by the plain norm ‖g_i‖ ≤ C and adds σ C A z with an A that guidance chose, but claims the price of σ. Along
A's weakest direction, whose scale is s, the noise is s times as strong as claimed. So a release is charged as the
Gaussian mechanism with multiplier σ s, adaptively, since s follows from earlier outputs; with s = 0 there is no privacy
at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from dphero.accounting import AdaptiveGaussian, Event, NoNoise
from dphero.geometry.geometry import Geometry
from dphero.mechanism.modes import ModeRule, same_event

UNSOUND = "UNSOUND AS PUBLISHED: the noise is far weaker along some directions than the recipe claims."


class Published(ModeRule):
    """Plain norms, noise of any shape, charged by its weakest direction."""

    name = "published"
    clips_in_geometry = False

    def admit(
        self, geometry: dict[str, Geometry], dtypes: Mapping[str, torch.dtype], expected_lot: float
    ) -> dict[str, Geometry]:
        """Take every geometry as it is, also one that leaves directions without noise: it is what was published."""
        return geometry

    def event(self, event: Callable[[float], Event], multiplier: float, geometry: Mapping[str, Geometry]) -> Event:
        """Charge σ s; where some direction gets no noise, say so."""
        weakest = multiplier * min(shape.smallest for shape in geometry.values())
        return NoNoise() if weakest == 0 else event(weakest)

    def may_have_cost(self, found: Event, own: Event) -> bool:
        """Tell whether a release may have cost this: any multiplier, as s changes from release to release."""
        return isinstance(found, NoNoise) or same_event(found, own, apart_from="noise_multiplier")


def poisson_event(sample_rate: float) -> Callable[[float], Event]:
    """Return what a release of a Poisson lot costs, given its effective noise multiplier."""
    return partial(AdaptiveGaussian, sample_rate)


def require_consent(*, unsound: bool, sampling: str, clipping: object) -> None:
    """Refuse the published recipe unless it was asked for by name, in a form that can be priced.

    Raises:
        ValueError: If so.
    """
    if not unsound:
        raise ValueError(
            'mechanism="published" is the recipe as printed: its noise is weakest along some directions and its '
            "true ε is far above the claimed one. To study it, pass unsound=True; to train, use the ellipsoid."
        )
    if sampling != "poisson":
        raise ValueError('mechanism="published" is priced for Poisson sampling alone; pass sampling="poisson"')
    if clipping == "adaptive":  # the noise on its count would not follow the geometry that the price assumes
        raise ValueError('mechanism="published" cannot be priced with clipping="adaptive"; use "flat"')
