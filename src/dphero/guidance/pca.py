"""Guidance by the weights: DP-Hero's heterogeneous noise, from the principal components of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dphero._checks import one_of
from dphero.geometry.geometry import Geometry
from dphero.guidance import spectra
from dphero.guidance.base import Axis, Block, Released, as_matrix, same_settings, settings, share_rows
from dphero.guidance.subspace import Start

THEOREM_2 = 1.0
"""Exponent of the paper's Theorem 2: noise in proportion to the eigenvalue."""
ALGORITHM_2 = 2.0
"""Exponent of the paper's Algorithm 2 read as V = V V^T: noise in proportion to the squared eigenvalue."""
INVERSE = -1.0
"""Exponent of the paper's text: noise in proportion to the inverse eigenvalue."""
_AHEAD = ("cuda",)
"""Devices that work on while Python does."""


@dataclass(eq=False)
class PCA:
    """Shapes each layer's noise by the spectrum of its current weights, W W^T = U diag(lambda) U^T.

        v_i = (lambda_i / mean lambda + floor)^exponent,  scaled so that sum v_i^2 = k;   A = U diag(v) U^T

    The exponents of the paper are `THEOREM_2` = 1, `ALGORITHM_2` = 2 and `INVERSE` = -1, each with floor 0;
    exponent 0 is DP-SGD. A bias takes its weight's left factor. The weights are released, so a geometry made
    from them costs no privacy (the initial weights must be public).

    Attributes:
        exponent: p.
        floor: what every direction gets, relative to the mean eigenvalue, so that none is left without noise.
            At floor 0 "auto" decomposes exactly, in float64, and a rank deficient weight is an error.
        bare: at floor 0, leave the directions that a rank deficient weight lacks without noise instead: the recipe as
            published, at an infinite price. Other mechanisms refuse such a geometry.
        centred: subtract the mean of the columns first (PCA proper).
        rank: keep this many principal components; the rest of the spectrum counts as zero: it gets the floor.
        side: the axis of the weight: "left" its features (rows of a linear weight, columns of an embedding),
            "right" the other axis, or "both".
        scope: "layer" normalises each layer alone; "model" takes one mean eigenvalue and one sum of v^2 over
            all layers, so that they share one noise budget.
        refresh_every: steps between decompositions.
        solver: "eigh" (exact, cost k^3), "subspace" (the leading `components` directions, and one mean value
            for all others; cost k m components), or "auto": "eigh" up to k = `exact_up_to` and at floor 0.
        components: directions that "subspace" resolves (`rank` where that is given).
        exact_up_to: the largest k for which "auto" takes "eigh".
    """

    exponent: float = 0.25
    floor: float = 0.1
    centred: bool = False
    rank: int | None = None
    side: Literal["left", "right", "both"] = "left"
    scope: Literal["layer", "model"] = "layer"
    refresh_every: int = 10
    solver: Literal["auto", "eigh", "subspace"] = "auto"
    components: int = 16
    exact_up_to: int = 64
    bare: bool = False
    _starts: dict[str, Start] = field(default_factory=dict, init=False, repr=False)
    _begun: dict[str, spectra.Search] = field(default_factory=dict, init=False, repr=False)

    needs_gradients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        one_of("side", self.side, ("left", "right", "both"))
        one_of("scope", self.scope, ("layer", "model"))
        one_of("solver", self.solver, ("auto", "eigh", "subspace"))
        if not self.floor >= 0.0:
            raise ValueError(f"floor={self.floor} must not be negative")
        for name in ("rank", "refresh_every", "components"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")

    def observe(self, released: Released) -> None:
        """Ignores the release: the weights say it all."""

    @torch.no_grad()
    def prepare(self, released: Released) -> bool:
        """Begins with the decomposition on a GPU, which does it between other work; on a CPU there is nothing to gain.

        The next `geometry` will then be that of the weights as they are now.
        """
        if self.exponent == 0.0 or not any(block.value.device.type in _AHEAD for block in released.blocks):
            return False
        self._begun = {side: self._search(self._axes(released, side)) for side in self._sides}
        for search in self._begun.values():
            search.begin()
        return True

    @torch.no_grad()
    def geometry(self, released: Released) -> dict[str, Geometry]:
        """Returns a left or right factor (or both) for each weight, and the left one for its bias."""
        if self.exponent == 0.0:
            return {}
        begun, self._begun = self._begun, {}
        found: dict[str, dict[str, Any]] = {}
        for side in self._sides:
            axes = self._axes(released, side)
            search = begun[side] if side in begun else self._search(axes)
            spectrums = self._spectra(axes, search)
            made = spectra.factors(spectrums, self.exponent, self.floor, bare=self.bare, scope=self.scope)
            for (block, axis), factor in zip(axes, made, strict=True):
                found.setdefault(block.name, {})["left" if axis == "rows" else "right"] = factor
        shapes = {block.name: tuple(block.value.shape) for block in released.blocks}
        return share_rows(released, {name: Geometry(shapes[name], **sides) for name, sides in found.items()})

    def state_dict(self) -> dict[str, Any]:
        """Returns the settings and where the next subspace iterations start.

        What `prepare` has begun is not among it: the weights that it decomposes are still the same.
        """
        return {"settings": settings(self), "starts": {name: tuple(start) for name, start in self._starts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` returned, from a PCA of the same settings."""
        same_settings(settings(self), state.get("settings"))
        # Older checkpoints have others, of no use here: then iterations start anew.
        self._starts = {name: Start(*start) for name, start in state.get("starts", {}).items()}
        self._begun.clear()

    @property
    def _sides(self) -> tuple[str, ...]:
        return ("left", "right") if self.side == "both" else (self.side,)

    def _axes(self, released: Released, side: str) -> list[tuple[Block, Axis]]:
        # One axis of a weight of one row or column is a number: alone, it normalises to 1.
        axes = [(b, _axis(b, side)) for b in released.blocks if b.has_matrix]
        return [(b, axis) for b, axis in axes if self.scope == "model" or b.length(axis) > 1]

    def _search(self, axes: Sequence[tuple[Block, Axis]]) -> spectra.Search:
        return spectra.Search([self._wanted(*each) for each in axes])

    def _spectra(self, axes: Sequence[tuple[Block, Axis]], search: spectra.Search) -> list[spectra.Spectrum]:
        found = []
        for (block, axis), (spectrum, start) in zip(axes, search.results(), strict=True):
            if start is not None:
                self._starts[f"{block.name}:{axis}"] = start
            found.append(spectrum if self.rank is None else spectra.limited(spectrum, self.rank))
        return found

    def _wanted(self, block: Block, axis: Axis) -> spectra.Wanted:
        matrix = _centred(block.matrix(axis)) if self.centred else block.matrix(axis)
        if self._is_exact(block, axis):
            return spectra.Wanted(matrix, block.name, wide=self.floor == 0.0)
        return spectra.Wanted(matrix, block.name, self._resolved, self._starts.get(f"{block.name}:{axis}"))

    @property
    def _resolved(self) -> int:
        return self.components if self.rank is None else self.rank

    def _is_exact(self, block: Block, axis: Axis) -> bool:
        size = block.length(axis)
        small = size <= self.exact_up_to or self.floor == 0.0
        return self.solver == "eigh" or (self.solver == "auto" and small) or self._resolved >= size


def spectrum(weight: Tensor, features: Axis = "rows", centred: bool = False) -> Tensor:
    """Returns the raw spectrum of a weight along its feature axis, largest first, in float64.

    By singular values, so that small eigenvalues are right; those below rounding error are exactly 0, so that
    `spectrum(w)[-1] == 0` says that the published recipe, having no floor, leaves a direction without noise. With
    `centred`, the mean over the other axis is subtracted first.
    """
    matrix = as_matrix(weight.detach(), features).double()
    singular = torch.linalg.svdvals(_centred(matrix) if centred else matrix)
    # Centring rounds too, by an ulp of the weight's size: hence the norm before it.
    error = max(matrix.shape) * torch.finfo(torch.float64).eps * float(torch.linalg.matrix_norm(matrix))
    values = torch.zeros(len(matrix), dtype=torch.float64, device=matrix.device)
    values[: len(singular)] = torch.where(singular > error, singular, 0.0).square()
    return values


def noise_scales(values: Tensor, exponent: float, floor: float = 0.0) -> Tensor:
    """Returns v_i = (lambda_i / mean lambda + floor)^exponent scaled to sum v_i^2 = k, zeros and all.

    For pricing: the published recipe's effective noise multiplier is sigma * min v; 0 means no privacy.
    An infinite scale (a zero eigenvalue under a negative exponent) likewise leaves every finite one at 0.
    """
    mean = values.mean()
    scales = ((values / mean if mean > 0 else values) + floor) ** exponent
    scales = scales.isinf().to(values.dtype) if bool(scales.isinf().any()) else scales
    length = float(torch.linalg.vector_norm(scales))
    return scales * (len(scales) ** 0.5 / length) if length > 0.0 else scales


def _axis(block: Block, side: str) -> Axis:
    other: Axis = "columns" if block.features == "rows" else "rows"
    return block.features if side == "left" else other


def _centred(matrix: Tensor) -> Tensor:
    return matrix - matrix.mean(1, keepdim=True)
