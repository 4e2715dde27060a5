"""Gradient canaries: an example whose gradient an attacker chose, planted in the real layers of a real model.

A *port* calls layers of the model directly, on inputs of the attacker's choice, and a linear loss reads their outputs
out. So the gradient of the example is whatever the attacker wants, and still goes the way of every gradient: loader,
taps, layer rules, norms, clipping, sum, noise.

For a weight of k rows and m columns, input a and output gradient δ plant δ aᵀ, and δ in the bias: large inputs aim at
the weights, small ones at the biases. The worst canary points where the noise is weakest, and is so large that only
clipping stops it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dphero.geometry.dense import Dense
from dphero.geometry.diagonal import Diagonal
from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Geometry
from dphero.geometry.low_rank import LowRank

Aim = Literal["weight", "bias"]

_SIZE = 100.0
"""Norm of the canary's gradient over the clip norm: far above it, so that skipped clipping cannot hide."""
_INPUT: Mapping[Aim, float] = {"weight": 100.0, "bias": 0.1}
"""Norm of what is fed to a layer, by what is aimed at: the gradient of its weight over that of its bias."""
_SIDE = 0.1
"""Share of the layers besides the weakest, where noise is weaker in some: enough to see one that is not clipped."""


@dataclass(frozen=True, eq=False)
class Plant:
    """What one layer is fed, and how its output is read.

    Attributes:
        layer: Path of the layer in the model.
        inputs: a, one row, as the layer takes it.
        readout: δ, one row of the shape of its output.
    """

    layer: str
    inputs: Tensor
    readout: Tensor


class Port(nn.Module):
    """The model, entered by its layers.

    Args:
        model: The model; its parameters are the port's.
        plants: The layers, and what they are fed.
    """

    def __init__(self, model: nn.Module, plants: list[Plant]) -> None:
        super().__init__()
        self.model = model
        self._layers = [each.layer for each in plants]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call each layer on its own input."""
        return tuple(self.model.get_submodule(path)(x) for path, x in zip(self._layers, inputs, strict=True))


def plant(
    model: nn.Module,
    geometry: Mapping[str, Geometry],
    *,
    clip_norm: float,
    shaped: bool,
    prefix: str = "",
    aim: Aim = "weight",
    seed: int | None = None,
) -> list[Plant]:
    """Return the worst canary for a model under noise of a geometry, or a random one.

    Args:
        model: Its linear and convolution layers carry the canary.
        geometry: The geometry of the noise, by parameter name.
        clip_norm: C.
        shaped: Whether norms are taken in the geometry of the noise (the ellipsoid): then all directions are equally
            bad, and the canary lies in every layer. Otherwise it lies where the noise is weakest.
        prefix: What stands before a parameter's name in ``geometry``.
        aim: Which parameter of each layer gets nearly all of it.
        seed: Draws another canary: a random direction in each layer, and random shares of the layers, some pulling
            against others. ``None`` for the worst one.

    Raises:
        ValueError: If no layer can carry it.
    """
    geometry = {name: shape.to("cpu") for name, shape in geometry.items()}
    directions: dict[str, tuple[Tensor, Tensor, float]] = {}
    for path, layer in model.named_modules():
        if _carries(layer) and (name := prefix + _name(path, aim)) in geometry:
            rows, columns, scale = weakest(geometry[name])
            directions[path] = rows, columns if aim == "weight" else _unit(_columns(layer)).to(rows), scale
    if not directions:
        what = "layer" if aim == "weight" else "layer with a bias"
        raise ValueError(f"the model has no trained linear or convolution {what}: a gradient canary has no place in it")
    if seed is not None:
        return _random(model, geometry, list(directions), clip_norm, prefix, aim, seed)
    scales = {path: scale for path, (_, _, scale) in directions.items()}
    main = min(scales, key=lambda path: scales[path])
    shares = {path: scales[path] if shaped else (1.0 if path == main else _SIDE) for path in scales}
    whole = math.sqrt(len(scales)) if shaped else math.hypot(1.0, _SIDE * math.sqrt(len(scales) - 1))
    size = _SIZE * clip_norm / (_INPUT[aim] if aim == "weight" else 1.0)
    return [
        _planted(path, model.get_submodule(path), columns * _INPUT[aim], rows * (shares[path] / whole * size))
        for path, (rows, columns, _) in directions.items()
    ]


def _random(
    model: nn.Module,
    geometry: Mapping[str, Geometry],
    paths: list[str],
    clip_norm: float,
    prefix: str,
    aim: Aim,
    seed: int,
) -> list[Plant]:
    """Return a canary of a random direction in each layer, and of random whitened shares of the layers."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.randn(len(paths), generator=generator, dtype=torch.float64)
    shares /= torch.linalg.vector_norm(shares)
    found = []
    for path, share in zip(paths, shares.tolist(), strict=True):
        layer, shape = model.get_submodule(path), geometry[prefix + _name(path, aim)]
        rows = torch.randn(shape.rows, generator=generator, dtype=torch.float64)
        columns = torch.randn(_columns(layer), generator=generator, dtype=torch.float64)
        rows, columns = rows / rows.norm(), columns / columns.norm()
        direction = torch.outer(rows, columns).reshape(shape.shape) if aim == "weight" else rows
        length = float(torch.linalg.vector_norm(shape.whiten(direction)))
        size = _SIZE * clip_norm * share / length / (_INPUT[aim] if aim == "weight" else 1.0)
        found.append(_planted(path, layer, columns.float() * _INPUT[aim], rows.float() * size))
    return found


def unreached(model: nn.Module) -> list[str]:
    """Return the trained parameters that no canary enters: those of norms, embeddings, other convolutions and so on."""
    aims: tuple[Aim, ...] = ("weight", "bias")
    reached = {_name(path, aim) for path, layer in model.named_modules() if _carries(layer) for aim in aims}
    return [name for name, each in model.named_parameters() if each.requires_grad and name not in reached]


def has_bias(model: nn.Module) -> bool:
    """Return whether a canary can be aimed at a bias."""
    return any(
        _carries(layer) and isinstance(layer.bias, Tensor) and layer.bias.requires_grad for layer in model.modules()
    )


def _name(path: str, aim: Aim) -> str:
    return f"{path}.{aim}" if path else aim


def _columns(layer: nn.Module) -> int:
    """Return how many inputs a row of the layer's weight has."""
    assert isinstance(layer.weight, Tensor)
    return layer.weight[0].numel()


def _carries(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear


def _planted(path: str, layer: nn.Module, columns: Tensor, rows: Tensor) -> Plant:
    """Shape input and read-out for the layer: for a convolution, one patch, read where it alone is seen."""
    assert isinstance(layer.weight, Tensor)
    columns, rows = columns.to(layer.weight.device), rows.to(layer.weight.device)
    if isinstance(layer, nn.Linear):
        return Plant(path, columns[None], rows[None])
    assert isinstance(layer, nn.Conv2d)
    patch = columns.view(1, layer.in_channels, *layer.kernel_size)
    spread = [(size - 1) * gap + 1 for size, gap in zip(layer.kernel_size, layer.dilation, strict=True)]
    # Padding is taken care of by a picture in which the patch starts at a place that the strides reach.
    padding = [int(pad) for pad in layer.padding]
    places = [-(-pad // step) for pad, step in zip(padding, layer.stride, strict=True)]
    starts = [at * step - pad for at, step, pad in zip(places, layer.stride, padding, strict=True)]
    picture = torch.zeros(1, layer.in_channels, *(start + size for start, size in zip(starts, spread, strict=True)))
    picture = picture.to(columns)
    picture[:, :, starts[0] :: layer.dilation[0], starts[1] :: layer.dilation[1]] = patch
    with torch.no_grad():
        shape = torch.nn.functional.conv2d(
            picture, layer.weight, None, layer.stride, layer.padding, layer.dilation
        ).shape
    readout = torch.zeros(shape).to(rows)
    readout[0, :, places[0], places[1]] = rows
    return Plant(path, picture, readout)


def weakest(geometry: Geometry) -> tuple[Tensor, Tensor, float]:
    """Return (u, v, s): unit vectors of rows and columns such that the noise along u vᵀ is weak, and its scale s.

    Exactly the weakest direction, except for a full covariance of a flattened weight, whose weakest direction is no
    product of two vectors: then the nearest one that is.
    """
    rows, columns = geometry.rows, geometry.columns
    if geometry.flat is not None:
        direction = _weakest(geometry.flat).view(rows, columns)
        left, _, right = torch.linalg.svd(direction, full_matrices=False)
        u, v = left[:, 0], right[0]
    else:
        u = _unit(rows) if geometry.left is None else _weakest(geometry.left)
        v = _unit(columns) if geometry.right is None else _weakest(geometry.right)
    outer = torch.outer(u, v).reshape(geometry.shape)
    inverse = geometry.whiten(outer.double())
    return u.float(), v.float(), 1 / float(torch.linalg.vector_norm(inverse))


def _weakest(factor: Factor) -> Tensor:
    """Return the unit vector along which a factor is smallest."""
    if isinstance(factor, Dense):
        return factor.basis[:, factor.scales.argmin()].double()
    if isinstance(factor, Diagonal):
        unit = torch.zeros(factor.size, dtype=torch.float64)
        unit[factor.scales.argmin()] = 1.0
        return unit
    if isinstance(factor, LowRank):
        if float(factor.scales.min()) <= factor.rest:
            return factor.basis[:, factor.scales.argmin()].double()
        basis = factor.basis.double()
        guess = _unit(factor.size).to(basis)
        for _ in range(2):  # twice: the first projection leaves rounding
            guess = guess - basis @ (basis.mT @ guess)
        return guess / torch.linalg.vector_norm(guess)
    return _unit(factor.size)


def _unit(size: int) -> Tensor:
    """Return a unit vector with no zero coordinate and no symmetry."""
    values = torch.cos(1.0 + torch.arange(size, dtype=torch.float64) * 2.399963)
    return values / torch.linalg.vector_norm(values)
