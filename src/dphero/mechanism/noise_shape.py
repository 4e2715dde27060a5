"""The shape of the noise over time: ask guidance, refuse what cannot be private, keep one geometry within a lot."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dphero.geometry.geometry import Digests, Geometry, identity
from dphero.guidance import Block, Guidance, Prepares, Released
from dphero.mechanism.modes import ModeRule, UnevenError
from dphero.numerics.precision import at_least_single, full_precision

logger = logging.getLogger(__name__)


class NoiseShape:
    """The geometry of the coming releases, renewed by guidance every ``refresh_every`` of them.

    Guidance sees parameters, noisy gradients and their scale, all released: what it makes of them is post-processing.
    A geometry never changes within a lot, so norms and noise see the same one.

    Args:
        rule: The mode.
        guidance: Makes geometries from released things.
        parameters: Name to parameter.
        templates: What guidance may know of each parameter besides its value.
        expected_lot: B.
        noise_scale: σ C / B of the first release.

    Attributes:
        noise: The geometry that shapes the noise.
        norms: The geometry in which per-example norms are taken.
    """

    def __init__(
        self,
        rule: ModeRule,
        guidance: Guidance,
        *,
        parameters: Mapping[str, nn.Parameter],
        templates: Mapping[str, Mapping[str, Any]],
        expected_lot: float,
        noise_scale: float,
    ) -> None:
        self.guidance = guidance
        self._rule, self._parameters, self._templates = rule, parameters, templates
        self._expected_lot = expected_lot
        self._identity = {name: identity(tuple(p.shape)) for name, p in parameters.items()}
        self.noise = self.norms = self._identity
        self._digest = b""
        self._digests: Digests | None = None  # what the digest of the geometry in hand is still to be found in
        self._renewed_at = 0
        self._begun = False  # see `_begin_ahead`
        self._next: dict[str, Geometry] | None = None
        self.refresh(0, noise_scale)

    @property
    def digest(self) -> bytes:
        """What tells the shape of the noise from others."""
        if self._digests is not None:
            self._digest, self._digests = b"".join(self._digests.found()), None
        return self._digest

    def refresh(self, step: int, noise_scale: float) -> None:
        """Ask guidance for the geometry of the coming releases.

        One that is too uneven is refused at the beginning; later on, that before it stays.
        """
        try:
            with full_precision():
                found, self._next = self._next or self._ask(step, noise_scale), None
            self._take(found)
        except UnevenError as error:
            if not step:
                raise
            logger.warning("The shape of the noise stays as it was. Of the new one: %s", error)
        self._begun, self._renewed_at = False, step

    def before_lot(self, step: int, noise_scale: float) -> None:
        """Renew the geometry when its time has come."""
        age = step - self._renewed_at
        if age >= self.guidance.refresh_every:
            self.refresh(step, noise_scale)
        elif age == self.guidance.refresh_every - 1:
            self._begin_ahead(step, noise_scale)

    def after_release(self, step: int, noise_scale: float, gradients: Mapping[str, Tensor]) -> None:
        """Show guidance what was released, if it wants to know."""
        if self._begun:
            self._finish_ahead(step, noise_scale)
        if self.guidance.needs_gradients:
            self.guidance.observe(self._released(step, noise_scale, gradients))

    def independent_copy(self) -> NoiseShape:
        """Return a copy with a guidance of its own, for an onlooker who sees released things alone."""
        other = copy.copy(self)
        other.guidance = copy.deepcopy(self.guidance)
        return other

    def _take(self, geometry: dict[str, Geometry]) -> None:
        # Its digest is asked for when the lot's norms have arrived, and a GPU idles: by then it is on the CPU.
        self.noise, self._digests = geometry, Digests(list(geometry.values()))
        self.norms = geometry if self._rule.clips_in_geometry else self._identity

    def _ask(self, step: int, noise_scale: float) -> dict[str, Geometry]:
        found = self.guidance.geometry(self._released(step, noise_scale))
        unknown = found.keys() - self._parameters.keys()
        if unknown:
            raise ValueError(f"guidance returned a geometry for unknown parameters {sorted(unknown)}")
        dtypes = {name: at_least_single(parameter.dtype) for name, parameter in self._parameters.items()}
        return self._rule.admit({**self._identity, **found}, dtypes, self._expected_lot)

    def _released(self, step: int, noise_scale: float, gradients: Mapping[str, Tensor] | None = None) -> Released:
        blocks = tuple(
            Block(
                name=name,
                value=parameter,
                gradient=None if gradients is None else gradients[name],
                geometry=self.noise[name],
                **self._templates[name],
            )
            for name, parameter in self._parameters.items()
        )
        return Released(step=step, blocks=blocks, noise_scale=noise_scale)

    # -- on a GPU, one lot ahead --------------------------------------------------------------------------

    def _begin_ahead(self, step: int, noise_scale: float) -> None:
        """Let guidance begin one lot before its time, if it wants to: a GPU then is not waited for.

        On a CPU it was worth less than 1 % of a step (0.5 ms in ten steps of a network of 1.9 million parameters), and
        there is no such way any more.
        """
        if isinstance(self.guidance, Prepares):
            with full_precision():
                self._begun = self.guidance.prepare(self._released(step, noise_scale))

    def _finish_ahead(self, step: int, noise_scale: float) -> None:
        """Take what was begun. Errors are logged, not raised: they recur before the next lot."""
        self._begun = False
        try:
            self._next = self._ask(step - 1, noise_scale)
        except Exception as error:
            logger.info("Guidance is asked again before the next lot, as it found no geometry ahead: %s", error)

    # -- checkpoint ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs for the coming geometries to be what they would have been."""
        return {
            "renewed_at": self._renewed_at,
            "guidance": self.guidance.state_dict(),
            "geometry": _states(self.noise),
            "next_geometry": None if self._next is None else _states(self._next),
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from a checkpoint, which was read to the CPU."""
        wanted = [state["guidance"], state["geometry"], state.get("next_geometry")]  # older checkpoints have no such
        guidance, geometry, following = tree_map_only(Tensor, lambda tensor: tensor.to(device), wanted)
        self.guidance.load_state_dict(guidance)
        self._renewed_at, self._begun = int(state["renewed_at"]), False
        self._take(self._from_states(geometry))
        self._next = None if following is None else self._from_states(following)

    def _from_states(self, states: Mapping[str, Any]) -> dict[str, Geometry]:
        return {**self._identity, **{name: Geometry.from_state(state) for name, state in states.items()}}


def _states(geometry: Mapping[str, Geometry]) -> dict[str, Any]:
    return {name: shape.state() for name, shape in geometry.items() if not shape.is_identity}
