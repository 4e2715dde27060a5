"""A geometry that stays in one place while its values follow another one: what a recording of a pass can read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dphero.geometry.dense import Dense
from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.factor import Factor, times
from dphero.geometry.geometry import Geometry
from dphero.geometry.low_rank import LowRank
from dphero.numerics.transfer import grouped, to_device

_KINDS = (Dense, Diagonal, LowRank, Scalar)
_NOT_COMPUTED_WITH = ("largest",)
_SIDES = ("left", "right", "flat")


class LiveGeometry:
    """Copies of the geometries of all parameters, in places of their own, on the device where the passes run.

    Every tensor of a factor is copied, every number becomes a tensor of one entry (elsewhere it would be part of the
    recording itself), and all else must stay the same. So nothing that a geometry computes with can be left behind when
    it changes. The values of ``live``, by name, change with :meth:`follow`.
    """

    def __init__(self, geometry: Mapping[str, Geometry], device: torch.device) -> None:
        self._followed = geometry
        self._copies: dict[int, Factor] = {}
        self._places: list[tuple[Factor, str]] = []  # of the numbers
        self.live: dict[str, Geometry] = {}
        for name, shape in geometry.items():
            sides = {side: getattr(shape, side) for side in _SIDES}
            self.live[name] = Geometry(
                shape.shape, **{side: factor and self._copy(factor) for side, factor in sides.items()}
            )
        values = [vars(factor)[name] for factor, name in self._places]
        self._numbers = torch.tensor(values, dtype=torch.float64, device=device)  # in one piece, so that one copy does
        for (factor, name), number in zip(self._places, self._numbers, strict=True):
            vars(factor)[name] = number

    def _copy(self, factor: Factor) -> Factor:
        if type(factor) not in _KINDS:
            raise ValueError(f"its geometry has a factor of type {type(factor).__name__}")
        if id(factor) not in self._copies:  # a weight and its bias share one, and still do
            made = copy.copy(factor)
            for name, value in vars(factor).items():
                if isinstance(value, Tensor):
                    vars(made)[name] = value.clone()
                elif _is_number(name, value):
                    self._places.append((made, name))
            if isinstance(made, LowRank):
                made.__class__ = _LiveLowRank
            self._copies[id(factor)] = made
        return self._copies[id(factor)]

    def follow(self, geometry: Mapping[str, Geometry]) -> bool:
        """Take over the values of another geometry; return ``False``, and change nothing, if its form differs."""
        if geometry is self._followed:
            return True
        pairs: list[tuple[Tensor, Any]] = []
        paired: dict[int, Factor] = {}  # a weight and its bias share a factor, which is copied once
        if geometry.keys() != self.live.keys():
            return False
        for name, shape in geometry.items():
            for side in _SIDES:
                theirs, mine = getattr(shape, side), getattr(self.live[name], side)
                if (theirs is None) != (mine is None):
                    return False
                if theirs is None or paired.get(id(mine)) is theirs:
                    continue
                if id(mine) in paired or not _pair(theirs, mine, pairs):  # two factors would go where one was shared
                    return False
                paired[id(mine)] = theirs
        tensors = [(mine, value) for mine, value in pairs if isinstance(value, Tensor)]
        # One call copies all of its list one after another where some are of another type, or have gaps.
        for some in grouped((mine.dtype, mine.is_contiguous(), value.is_contiguous()) for mine, value in tensors):
            torch._foreach_copy_([tensors[n][0] for n in some], [tensors[n][1] for n in some])
        if self._places:
            values = {id(mine): value for mine, value in pairs}
            found = [values[id(vars(factor)[name])] for factor, name in self._places]
            now = torch.tensor(found, dtype=torch.float64, device="cpu")
            self._numbers.copy_(to_device(now, self._numbers.device))
        self._followed = geometry
        return True


class _LiveLowRank(LowRank):
    """A low-rank factor whose ``rest`` is a tensor."""

    def colour_(self, x: Tensor, axis: int = -1) -> None:
        x.copy_(self.colour(x, axis))

    def _apply(self, x: Tensor, axis: int, inverse: bool) -> Tensor:
        number, out = (1.0 / self.rest, self._gather) if inverse else (self.rest, self._spread)
        # A product cannot take a factor for x that lies on the GPU. So what is added is divided by it, which is small,
        # and the result multiplied: in x's own precision, since mixed ones take a much slower way.
        rest = torch.as_tensor(number).to(x.dtype)
        out = out / rest
        if axis == -1:
            flat = x.reshape(-1, self.size)
            return torch.addmm(flat, flat @ self.basis, out.mT).mul_(rest).reshape(x.shape)
        return times(out, times(self.basis.mT, x), add=x).mul_(rest)


def _pair(theirs: Factor, mine: Factor, pairs: list[tuple[Tensor, Any]]) -> bool:
    """Note which value goes where; return whether the two factors have one form."""
    kind = LowRank if isinstance(mine, _LiveLowRank) else type(mine)
    if type(theirs) is not kind or vars(theirs).keys() != vars(mine).keys():
        return False
    for name, value in vars(theirs).items():
        place = vars(mine)[name]
        if isinstance(value, Tensor):
            if not isinstance(place, Tensor) or (value.shape, value.dtype) != (place.shape, place.dtype):
                return False
            pairs.append((place, value))
        elif _is_number(name, value):
            pairs.append((place, value))
        elif name not in _NOT_COMPUTED_WITH and (isinstance(place, Tensor) or value != place):
            return False
    return True


def _is_number(name: str, value: Any) -> bool:
    return isinstance(value, float) and name not in _NOT_COMPUTED_WITH
