"""The contract of guidance: released things in, geometry out.

Formal guarantee: a `Guidance` is given a `Released` and nothing else. What is in it (current parameter
values, past noisy gradients, their geometry and noise scale) has left the mechanism already, so whatever a
guidance computes from it is post-processing, and the geometry it returns is fixed before the next lot is
drawn. No batch, activation or raw gradient can reach it: there is no argument to pass one through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, runtime_checkable

from torch import Tensor

from dphero.geometry.geometry import Geometry

Axis = Literal["rows", "columns"]


@dataclass(frozen=True, eq=False)
class Block:
    """One parameter as the outside world knows it. Fields are public: all of this has been released.

    Attributes:
        name: the parameter's name, unique in the model.
        value: its current released value (detached here).
        shares: for a bias, the name of the weight whose row space it lives in: it takes that left factor.
        features: the feature axis of the matrix view (`shape[0]` rows, the rest columns): "rows" for linear
            and convolution weights, "columns" for embeddings.
        plain: scale 1 whatever the guidance: norm-layer affine, bare scalars, vectors of no weight.
        gradient: the last released noisy gradient, as the optimizer got it; None before the first release.
        geometry: the geometry that shaped that gradient's noise; None for the identity.
    """

    name: str
    value: Tensor
    shares: str | None = None
    features: Axis = "rows"
    plain: bool = False
    gradient: Tensor | None = None
    geometry: Geometry | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", self.value.detach())
        if self.features not in ("rows", "columns"):
            raise ValueError(f"block {self.name!r}: features must be 'rows' or 'columns', not {self.features!r}")
        if self.gradient is not None:
            object.__setattr__(self, "gradient", self.gradient.detach())
        for what in ("gradient", "geometry"):
            other = getattr(self, what)
            if other is not None and tuple(other.shape) != tuple(self.value.shape):
                shapes = f"{tuple(other.shape)}, its value {tuple(self.value.shape)}"
                raise ValueError(f"block {self.name!r}: its {what} has shape {shapes}")

    @property
    def has_matrix(self) -> bool:
        """Whether it is a weight with rows and columns of its own."""
        return not self.plain and self.shares is None and self.value.dim() >= 2 and self.value.numel() > 0

    def length(self, axis: Axis) -> int:
        """Returns how many rows `matrix` has."""
        rows = self.value.shape[0]
        return rows if axis == "rows" else self.value.numel() // rows

    def matrix(self, axis: Axis) -> Tensor:
        """Returns the value as a matrix whose rows run along `axis` (a view where possible)."""
        return as_matrix(self.value, axis)


@dataclass(frozen=True, eq=False)
class Released:
    """Everything a guidance may know.

    Attributes:
        step: how many releases have been made.
        blocks: the trained parameters.
        noise_scale: sigma C / B: the noise in each released gradient is `noise_scale * A z`, z ~ N(0, I).
    """

    step: int
    blocks: tuple[Block, ...]
    noise_scale: float

    def __post_init__(self) -> None:
        names = [block.name for block in self.blocks]
        if len(set(names)) < len(names):
            raise ValueError(f"block names must be unique: {sorted(n for n in set(names) if names.count(n) > 1)}")


@runtime_checkable
class Guidance(Protocol):
    """Chooses the shape of the noise from what was already released."""

    @property
    def refresh_every(self) -> int:
        """How many steps a geometry lasts before `geometry` is asked again."""

    @property
    def needs_gradients(self) -> bool:
        """Whether `observe` wants every release; if False the blocks may come without gradients."""

    def observe(self, released: Released) -> None:
        """Takes note of one release; called after each if `needs_gradients`."""

    def geometry(self, released: Released) -> dict[str, Geometry]:
        """Returns the geometry of each block by name; a name left out means the identity."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on identically; loads with `weights_only=True`."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` returned."""


@runtime_checkable
class Prepares(Protocol):
    """A guidance that wants to know one step before `geometry` is asked, to begin with what takes long."""

    def prepare(self, released: Released) -> bool:
        """Begins, and returns whether `geometry` may be asked at the step's end, before the next lot.

        It may be called again, or not at all, before the next `geometry`.
        """


@runtime_checkable
class Preconditions(Protocol):
    """A guidance that also changes the step: what it makes of released gradients is post-processing."""

    def precondition(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns what the optimizer gets instead of the gradients that were just released, by name."""


def preconditioned(guidance: Guidance, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns what the optimizer gets: what a guidance that :class:`Preconditions` makes of released gradients."""
    # asked for by name, as `isinstance` would, which takes ten times as long for a protocol
    change = getattr(guidance, "precondition", None)
    return gradients if change is None else cast(Preconditions, guidance).precondition(gradients)


def as_matrix(tensor: Tensor, axis: Axis) -> Tensor:
    """Returns a parameter-shaped tensor as a matrix (`shape[0]` by the rest) whose rows run along `axis`."""
    matrix = tensor.reshape(tensor.shape[0], -1)
    return matrix if axis == "rows" else matrix.mT


def share_rows(released: Released, geometries: dict[str, Geometry]) -> dict[str, Geometry]:
    """Adds to `geometries` each bias whose weight has a left factor: its gradient lives in the same space."""
    shared = dict(geometries)
    for block in released.blocks:
        owner = geometries.get(block.shares) if block.shares is not None else None
        if owner is not None and owner.left is not None and not block.plain and block.name not in shared:
            if tuple(block.value.shape) != (owner.rows,):
                what = f"shape {tuple(block.value.shape)} cannot share the {owner.rows} rows of {block.shares!r}"
                raise ValueError(f"block {block.name!r}: {what}")
            shared[block.name] = Geometry((owner.rows,), left=owner.left)
    return shared


def settings(guidance: Guidance) -> dict[str, Any]:
    """Returns what a guidance was built with: all that is not private to it."""
    return {name: value for name, value in vars(guidance).items() if not name.startswith("_")}


def same_settings(ours: dict[str, Any], theirs: dict[str, Any] | None) -> None:
    """Raises ValueError unless a saved guidance had the settings of the one that loads it."""
    if theirs is None:
        raise ValueError("the saved guidance is of another kind, without settings: build it as it was saved")
    different = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    if different:
        pairs = ", ".join(f"{n}: saved {theirs.get(n)!r}, here {ours.get(n)!r}" for n in different)
        raise ValueError(f"the saved guidance had other settings ({pairs}): build it as it was saved")
