"""Guidance by the past noisy gradients: AdaCliP (diagonal) and GeoClip (full), without their shift."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dphero._checks import one_of
from dphero.geometry.geometry import Geometry
from dphero.guidance import second_moments as moments
from dphero.guidance import spectra
from dphero.guidance.base import Axis, Block, Released, as_matrix, same_settings, settings, share_rows
from dphero.guidance.second_moments import Average, Moment


@dataclass(eq=False)
class History:
    """Shapes the noise by the second moment of past released gradients, less the noise known to be in them.

        s = EMA of (g g^T - noise_scale^2 A A^T), clamped at 0
        v = (s / mean s + floor)^exponent, scaled so that the mean of v^2 is 1

    Everything it reads has been released, so it costs no privacy. With exponent 1/4 (scale = square root of
    the standard deviation) it is, up to scale and floor, AdaCliP's rule ("diagonal") and GeoClip's ("full").

    Attributes:
        kind: "diagonal": each coordinate alone. "full": the covariance of the whole flattened block where
            that has at most `max_full` coordinates; the covariance along the feature axis of larger weights,
            as a left (embeddings: right) factor that the bias shares.
        exponent: p.
        decay: of the exponential average.
        floor: what every direction gets, relative to the mean moment; positive, for estimates do reach zero.
        centred: average (g - mean)(g - mean)^T, mean being an exponential average of the past gradients.
        mean_decay: of that mean.
        scope: "layer" normalises each block alone, "model" all together, every coordinate counting once.
        refresh_every: steps between geometries.
        components: directions resolved where the feature axis is longer than `exact_up_to`.
        exact_up_to: the longest feature axis whose covariance matrix is formed.
        max_full: the largest block with a full covariance (an eigh of that size at each refresh).
    """

    kind: Literal["diagonal", "full"] = "diagonal"
    exponent: float = 0.25
    decay: float = 0.99
    floor: float = 0.1
    centred: bool = False
    mean_decay: float = 0.99
    scope: Literal["layer", "model"] = "layer"
    refresh_every: int = 10
    components: int = 16
    exact_up_to: int = 128
    max_full: int = 1024
    _moments: dict[str, Moment] = field(default_factory=dict, init=False, repr=False)
    _means: dict[str, Average] = field(default_factory=dict, init=False, repr=False)

    needs_gradients: ClassVar[bool] = True

    @classmethod
    def adaclip(cls, refresh_every: int = 1, floor: float = 0.01) -> History:
        """Returns AdaCliP (Pichapati et al. 2019): scale_j ~ sqrt(std_j) over all coordinates of the model.

        Without its shift: the mechanism clips around zero. The floor stands for its clamp of the variance.
        """
        return cls("diagonal", 0.25, 0.99, floor, centred=True, scope="model", refresh_every=refresh_every)

    @classmethod
    def geoclip(cls, refresh_every: int = 10, floor: float = 0.01) -> History:
        """Returns GeoClip (Gilani et al. 2025): A ~ covariance^(1/4), with decays 0.999 and 0.99 (mean).

        Without its shift, from batch releases (its paper's form, not its script's), and block by block: full
        for small blocks, along the feature axis for large ones.
        """
        return cls("full", 0.25, 0.999, floor, centred=True, scope="model", refresh_every=refresh_every)

    def __post_init__(self) -> None:
        one_of("kind", self.kind, ("diagonal", "full"))
        one_of("scope", self.scope, ("layer", "model"))
        if not self.floor > 0.0:
            raise ValueError(f"floor={self.floor} must be positive: an estimated moment can be zero")
        for name in ("decay", "mean_decay"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        for name in ("refresh_every", "components"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @torch.no_grad()
    def observe(self, released: Released) -> None:
        """Averages in the gradients of one release."""
        for block, axis in self._plan(released):
            if block.gradient is None:
                continue
            gradient = block.gradient.to(torch.promote_types(block.gradient.dtype, torch.float32))
            variance = released.noise_scale**2
            if self.centred:
                mean = self._means.setdefault(block.name, Average(self.mean_decay))
                centre = (mean.mean(), mean.echo()) if mean.count else None
                mean.add(gradient)
                if centre is None:
                    continue
                gradient, variance = gradient - centre[0], variance * (1.0 + centre[1])
            if block.name not in self._moments:
                self._moments[block.name] = self._moment(gradient, axis)
            self._moments[block.name].update(gradient, block.geometry, variance)

    @torch.no_grad()
    def geometry(self, released: Released) -> dict[str, Geometry]:
        """Returns the geometry of every block observed; before the first observation none: isotropic."""
        if self.exponent == 0.0:
            return {}
        plan = [(block, axis) for block, axis in self._plan(released) if block.name in self._moments]
        found = []
        for block, _ in plan:
            spectrum = self._moments[block.name].spectrum(block.name)
            found.append(replace(spectrum, copies=block.value.numel() // spectrum.size))
        made = spectra.factors(found, self.exponent, self.floor, scope=self.scope)
        sides = {None: "flat", "rows": "left", "columns": "right"}
        geometries = {
            block.name: Geometry(tuple(block.value.shape), **{sides[axis]: factor})
            for (block, axis), factor in zip(plan, made, strict=True)
        }
        return share_rows(released, geometries)

    def state_dict(self) -> dict[str, Any]:
        """Returns the settings and the averages."""
        return {
            "settings": settings(self),
            "moments": {name: moment.state() for name, moment in self._moments.items()},
            "means": {name: mean.state() for name, mean in self._means.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` returned, from a History of the same settings."""
        same_settings(settings(self), state.get("settings"))
        self._moments = {
            name: moments.moment(saved["kind"], self.decay, saved["axis"], self.components).loaded(saved)
            for name, saved in state["moments"].items()
        }
        self._means = {name: Average(self.mean_decay).loaded(saved) for name, saved in state["means"].items()}

    def _plan(self, released: Released) -> list[tuple[Block, Axis | None]]:
        """Returns the blocks with a moment of their own, each with its axis; None is the flattened block."""
        large = {b.name for b in released.blocks if b.has_matrix and b.value.numel() > self.max_full}
        plan: list[tuple[Block, Axis | None]] = []
        for block in released.blocks:
            if block.plain or block.value.numel() == 0:
                continue
            if self.kind == "diagonal":
                plan.append((block, None))
            elif block.name in large:
                plan.append((block, block.features))
            elif block.value.numel() <= self.max_full and block.shares not in large:
                plan.append((block, None))
        return plan

    def _moment(self, gradient: Tensor, axis: Axis | None) -> Moment:
        if self.kind == "diagonal":
            return moments.DiagonalMoment(self.decay)
        size = 0 if axis is None else len(as_matrix(gradient, axis))
        if axis is None or size <= max(self.exact_up_to, self.components):
            return moments.DenseMoment(self.decay, axis)
        return moments.LeadingMoment(self.decay, axis, self.components)
