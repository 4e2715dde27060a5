"""The rule that turns spectra into noise scales.

It is shared by every guidance that has a spectrum (lambda_1 .. lambda_k with eigenvectors U):

    v_i = (lambda_i / mean lambda + floor)^p,  then scaled so that sum v_i^2 = k;   A = U diag(v) U^T

Numbers are few, and in any number of spectra: so it is operations that take time, and those of the CPU are done for all
spectra at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from dphero.geometry.diagonal import Diagonal
from dphero.geometry.factor import Factor
from dphero.geometry.together import Known, together
from dphero.guidance.spectra import Spectrum
from dphero.numerics.transfer import grouped

_ROOTS = {0.25: 2, 0.5: 1}
"""Exponents that are so many square roots, which are an order of magnitude cheaper than `pow` on a CPU."""


def factors(
    spectra: Sequence[Spectrum], exponent: float, floor: float, *, bare: bool = False, scope: str = "layer"
) -> list[Factor]:
    """Applies the rule of this module to spectra: to each alone ("layer"), or to all together ("model").

    With `bare`, directions may be left without any noise (a positive exponent and floor 0 where a weight is rank
    deficient): a :class:`~dphero.geometry.dense.Singular` factor.

    Raises:
        ValueError: where a scale would be zero or infinite, which only a floor of 0 can bring about.
    """
    if floor == 0.0:
        for each in spectra:
            _refuse_deficient(each, bare and exponent > 0)
    numbers = range(len(spectra))
    groups = [numbers] if scope == "model" and spectra else [[number] for number in numbers]
    means, units = [0.0] * len(spectra), [0.0] * len(spectra)
    for group in groups:
        mean = _mean([spectra[n] for n in group])
        for n in group:
            means[n] = mean
    raised = _raised([s.values for s in spectra], means, exponent, floor)
    squares = [float(each.sum()) for each in raised.changed(lambda x, _: x.square()).parts()]
    rests = [_rest(s, mean, exponent, floor) for s, mean in zip(spectra, means, strict=True)]
    for group in groups:
        unit = _unit([(spectra[n], squares[n], rests[n]) for n in group])
        for n in group:
            units[n] = unit
    scales = raised.changed(mul, units).parts()
    return _made(spectra, scales, [rest * unit for rest, unit in zip(rests, units, strict=True)], bare)


class _Numbers:
    """The numbers of several spectra: those in float64 on the CPU in one tensor, so that few operations do."""

    def __init__(self, whole: Sequence[Tensor], places: list[list[int]], sizes: list[int]):
        self._whole, self._places, self._sizes = whole, places, sizes

    @classmethod
    def joined(cls, tensors: Sequence[Tensor]) -> Self:
        """Joins the numbers of each spectrum."""
        small = (each.is_cpu and each.dtype == torch.float64 for each in tensors)
        places = grouped(-1 if here else number for number, here in enumerate(small))
        whole = [
            tensors[some[0]] if len(some) == 1 else torch.cat([tensors[number] for number in some]) for some in places
        ]
        return cls(whole, places, [len(each) for each in tensors])

    def changed(self, change: Callable[[Tensor, Any], Tensor], numbers: Sequence[float] = ()) -> Self:
        """Changes the numbers of each spectrum, by a number of its own; `change` does the same to every entry."""
        found = [change(x, self._spread(some, numbers)) for x, some in zip(self._whole, self._places, strict=True)]
        return type(self)(found, self._places, self._sizes)

    def _spread(self, some: list[int], numbers: Sequence[float]) -> Tensor | float | None:
        if not numbers or len(some) == 1:
            return numbers[some[0]] if numbers else None
        return torch.from_numpy(np.repeat([numbers[n] for n in some], [self._sizes[n] for n in some]))

    def parts(self) -> list[Tensor]:
        """Returns the numbers of each spectrum."""
        found: dict[int, Tensor] = {}
        for x, some in zip(self._whole, self._places, strict=True):
            found.update(zip(some, x.split_with_sizes([self._sizes[n] for n in some]), strict=True))
        return [found[number] for number in range(len(found))]


def _refuse_deficient(spectrum: Spectrum, may_be_bare: bool) -> None:
    unknown = spectrum.rest <= 0.0 and len(spectrum.values) < spectrum.size
    if (unknown or float(spectrum.values.min()) <= 0.0) and not (may_be_bare and not unknown):
        positive = int((spectrum.values > 0).sum())
        raise ValueError(
            f"block {spectrum.name!r} is rank deficient ({positive} of {spectrum.size} eigenvalues "
            "are positive): without a floor its geometry is singular and gives no privacy; set floor > 0"
        )


def _mean(spectra: Sequence[Spectrum]) -> float:
    return sum(s.copies * s.total for s in spectra) / sum(s.copies * s.size for s in spectra)


def _rest(spectrum: Spectrum, mean: float, exponent: float, floor: float) -> float:
    if len(spectrum.values) == spectrum.size:
        return 0.0
    rest: float = ((spectrum.rest / mean if mean > 0 else 1.0) + floor) ** exponent
    return rest


def _raised(values: Sequence[Tensor], means: Sequence[float], exponent: float, floor: float) -> _Numbers:
    """Returns (lambda / mean lambda + floor)^p."""
    # A model that is all zeros knows nothing: isotropic.
    known = [each if mean > 0 else torch.ones_like(each) for each, mean in zip(values, means, strict=True)]
    divisors = [mean if mean > 0 else 1.0 for mean in means]
    found = _Numbers.joined(known).changed(lambda x, mean: (x / mean).add_(floor), divisors)
    if exponent not in _ROOTS:
        # not in one tensor: how `pow` rounds a number depends on where in it that is, and so on other layers
        return _Numbers.joined([each**exponent for each in found.parts()])
    for _ in range(_ROOTS[exponent]):
        found = found.changed(lambda x, _: x.sqrt_())
    return found


def _unit(raised: Sequence[tuple[Spectrum, float, float]]) -> float:
    """Returns what to multiply scales by, given the sum of their squares: then that is their number."""
    power = 0.0
    for s, squares, rest in raised:
        power += s.copies * (squares + (s.size - len(s.values)) * rest**2)
    return math.sqrt(sum(s.copies * s.size for s, _, _ in raised) / power) if power > 0.0 else 1.0


def _made(spectra: Sequence[Spectrum], scales: Sequence[Tensor], rests: Sequence[float], bare: bool) -> list[Factor]:
    known, along_axes = [], {}
    for number, (s, v, rest) in enumerate(zip(spectra, scales, rests, strict=True)):
        if s.basis is None:
            along_axes[number] = _diagonal(s.name, v)
        else:
            singular = bare and len(v) == s.size and float(v.min()) == 0.0
            known.append(Known(s.name, s.basis, v, rest, s.defect, s.device or s.basis.device, singular))
    others = iter(together(known))
    return [along_axes[number] if number in along_axes else next(others) for number in range(len(spectra))]


def _diagonal(name: str, scales: Tensor) -> Factor:
    try:
        return Diagonal(scales)
    except ValueError as error:
        raise ValueError(f"block {name!r}: {error}") from error
