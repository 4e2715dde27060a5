"""Second moments of past noisy gradients, with the noise that is known to be in them taken out.

A released gradient is g + noise_scale A z. Its second moment is E[g g^T] + noise_scale^2 A A^T, and the
second term is public. Each moment here keeps an exponential average of the difference, unclamped (a clamp at
every step would bias it), and clamps only when it is read as a spectrum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.geometry import Geometry
from dphero.guidance import spectra, subspace
from dphero.guidance.base import Axis, as_matrix


@dataclass(frozen=True)
class Noise:
    """The covariance N of unit noise coloured by a geometry, averaged over the columns of a matrix view."""

    root: Callable[[Tensor], Tensor]  # y -> N^(1/2) Y up to a rotation, for Y of k rows: (root Y)^T (root Y) = Y^T N Y
    trace: float  # the trace of N


def flat_variance(geometry: Geometry | None, like: Tensor) -> Tensor:
    """Returns the diagonal of A A^T, flattened."""
    if geometry is None or geometry.is_identity:
        return torch.ones_like(like).flatten()
    if geometry.flat is not None:
        return geometry.flat.variance().to(like)
    left = (geometry.left or Scalar(geometry.rows)).variance().to(like)
    right = (geometry.right or Scalar(geometry.columns)).variance().to(like)
    return torch.outer(left, right).flatten()


def flat_covariance(geometry: Geometry | None, like: Tensor) -> Tensor:
    """Returns A A^T over the flattened parameter."""
    size = like.numel()
    unit = torch.eye(size, dtype=like.dtype, device=like.device)
    if geometry is None or geometry.is_identity:
        return unit
    return geometry.colour(geometry.colour(unit.reshape(size, *geometry.shape))).reshape(size, size)


def axis_noise(geometry: Geometry | None, axis: Axis, like: Tensor) -> Noise:
    """Returns the noise along one axis of the matrix view: along rows, L L^T tr(R R^T) / columns."""
    rows, columns = like.shape[0], like[0].numel()
    size, other = (rows, columns) if axis == "rows" else (columns, rows)
    if geometry is None or geometry.is_identity:
        return Noise(lambda y: y, float(size))
    if geometry.flat is not None:
        return _flat_noise(geometry, axis, like)
    ours, theirs = (geometry.left, geometry.right) if axis == "rows" else (geometry.right, geometry.left)
    mine, across = ours or Scalar(size), theirs or Scalar(other)
    mean = float(across.variance().double().mean())
    return Noise(lambda y: mean**0.5 * mine.colour(y, -2), mean * float(mine.variance().double().sum()))


def _flat_noise(geometry: Geometry, axis: Axis, like: Tensor) -> Noise:
    assert geometry.flat is not None
    view, kept = (geometry.rows, geometry.columns), (1 if axis == "rows" else 0)
    if isinstance(geometry.flat, Diagonal | Scalar):
        variance = geometry.flat.variance().to(like).reshape(view).mean(kept)
        return Noise(lambda y: variance.sqrt()[:, None] * y, float(variance.sum()))
    operator = flat_covariance(geometry, like).reshape(*view, *view)
    covariance = torch.einsum("icjc->ij" if axis == "rows" else "cicj->ij", operator) / view[kept]
    values, basis = torch.linalg.eigh(covariance)
    root = basis.mT * values.clamp_min(0.0).sqrt()[:, None]
    return Noise(lambda y: root @ y, float(values.sum()))


class Average:
    """An exponential average that starts from nothing, corrected for that when read."""

    def __init__(self, decay: float):
        self.decay = decay
        self.count = 0
        self.tensors: dict[str, Tensor] = {}

    @property
    def weight(self) -> float:
        """How much it has seen: 1 - decay^count."""
        return 1.0 - self.decay**self.count

    def add(self, fresh: Tensor) -> None:
        """Mixes one more observation in."""
        old = self.tensors.get("value")
        mixed = (1.0 - self.decay) * fresh if old is None else torch.lerp(fresh, old.to(fresh), self.decay)
        self.tensors["value"] = mixed
        self.count += 1

    def mean(self) -> Tensor:
        """Returns the average."""
        return self.tensors["value"] / self.weight

    def echo(self) -> float:
        """Returns the variance of the average of unit white noise: how much of it lingers in `mean`."""
        squares = (1.0 - self.decay) / (1.0 + self.decay) * (1.0 - self.decay ** (2 * self.count))
        return squares / self.weight**2

    def state(self) -> dict[str, Any]:
        """Returns its kind, `count` and `tensors`."""
        axis = getattr(self, "axis", None)
        return {"kind": type(self).__name__, "axis": axis, "count": self.count, "tensors": dict(self.tensors)}

    def loaded(self, saved: dict[str, Any]) -> Self:
        """Takes up what `state` returned."""
        self.count, self.tensors = saved["count"], dict(saved["tensors"])
        return self


class DiagonalMoment(Average):
    """The second moment of each coordinate."""

    _noise: tuple[Geometry | None, Tensor] | None = None

    def update(self, gradient: Tensor, geometry: Geometry | None, variance: float) -> None:
        """Adds g^2 - variance diag(A A^T)."""
        if self._noise is None or self._noise[0] is not geometry:
            self._noise = (geometry, flat_variance(geometry, gradient))
        self.add(gradient.flatten().square() - variance * self._noise[1])

    def spectrum(self, name: str) -> spectra.Spectrum:
        """Returns the coordinates' moments, none negative."""
        values = self.mean().clamp_min(0.0)
        return spectra.Spectrum(name, values, None, len(values), float(values.sum()))


class DenseMoment(Average):
    """The second moment along an axis of the matrix view (None: of the flattened block), k x k."""

    _noise: tuple[Geometry | None, Tensor] | None = None

    def __init__(self, decay: float, axis: Axis | None):
        super().__init__(decay)
        self.axis = axis

    def update(self, gradient: Tensor, geometry: Geometry | None, variance: float) -> None:
        """Adds x x^T / columns - variance N, where x is the view of the gradient."""
        x = gradient.reshape(-1, 1) if self.axis is None else as_matrix(gradient, self.axis)
        if self._noise is None or self._noise[0] is not geometry:
            self._noise = (geometry, self._covariance(geometry, gradient, len(x)))
        self.add(x @ x.mT / x.shape[1] - variance * self._noise[1])

    def spectrum(self, name: str) -> spectra.Spectrum:
        """Returns its eigenvalues, none negative."""
        return spectra.of_symmetric(self.mean(), name)

    def _covariance(self, geometry: Geometry | None, like: Tensor, size: int) -> Tensor:
        if self.axis is None:
            return flat_covariance(geometry, like)
        root = axis_noise(geometry, self.axis, like).root(torch.eye(size, dtype=like.dtype, device=like.device))
        return root.mT @ root


class LeadingMoment(Average):
    """The leading directions of the second moment along a long axis, without its k x k matrix.

    The moment is kept as S = Q diag(value) Q^T + rest (I - Q Q^T), with its exact trace. An update takes the
    span of Q and x (x^T Q), and in it the largest Ritz values of decay S + (1 - decay) (x x^T / columns -
    variance N): about 8 k m r operations, and no k x k matrix.
    """

    def __init__(self, decay: float, axis: Axis, components: int):
        super().__init__(decay)
        self.axis, self.components = axis, components

    def update(self, gradient: Tensor, geometry: Geometry | None, variance: float) -> None:
        """Adds x x^T / columns - variance N, where x is the view of the gradient."""
        x, noise = as_matrix(gradient, self.axis), axis_noise(geometry, self.axis, gradient)
        size, columns = x.shape
        width = subspace.width(size, self.components)
        if not self.tensors:
            basis, value, total = subspace.first_basis(size, width).to(x), x.new_zeros(width), x.new_zeros(())
        else:
            basis, value, total = (self.tensors[name].to(x) for name in ("basis", "value", "total"))
        rest = (total - value.sum()) / max(size - width, 1)
        wide = torch.linalg.qr(torch.cat([basis, x @ (x.mT @ basis)], 1))[0]
        data, coloured, old = x.mT @ wide, noise.root(wide), basis.mT @ wide
        fresh = data.mT @ data / columns - variance * (coloured.mT @ coloured)
        kept = rest * (wide.mT @ wide) + old.mT @ ((value - rest)[:, None] * old)
        values, rotation = torch.linalg.eigh(torch.lerp(fresh, kept, self.decay))
        trace = x.square().sum() / columns - variance * noise.trace
        self.tensors = {
            "basis": wide @ rotation.flip(1)[:, :width],
            "value": values.flip(0)[:width].contiguous(),
            "total": torch.lerp(trace, total, self.decay),
        }
        self.count += 1

    def spectrum(self, name: str) -> spectra.Spectrum:
        """Returns the leading eigenvalues, none negative, and the mean of the rest."""
        basis = self.tensors["basis"][:, : self.components]
        values = self.mean()[: self.components].cpu().double().clamp_min(0.0)
        count = len(basis) - len(values)
        rest = max(float(self.tensors["total"]) / self.weight - float(values.sum()), 0.0) / count
        return spectra.Spectrum(name, values, basis, len(basis), float(values.sum()) + count * rest, rest)


Moment = DiagonalMoment | DenseMoment | LeadingMoment


def moment(kind: str, decay: float, axis: Axis | None = None, components: int = 0) -> Moment:
    """Returns an empty moment of that kind."""
    if kind == "LeadingMoment" and axis is not None:
        return LeadingMoment(decay, axis, components)
    return DenseMoment(decay, axis) if kind == "DenseMoment" else DiagonalMoment(decay)
