"""The oracle: per-example gradients by micro-batches of one, obviously right and slow."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dphero.checks.first_batch import probe
from dphero.geometry.geometry import Geometry, identity
from dphero.gradients.batch import GradientBatch
from dphero.guidance import Block, Guidance, Released
from dphero.hooks.taps import Taps
from dphero.mechanism.parameters import describe

Batch = tuple[Tensor, ...]
Loss = Callable[..., Tensor]
"""``loss(module, *batch)``: a mean over the examples."""


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def micro_batches(module: nn.Module, batch: Batch, loss: Loss) -> dict[str, Tensor]:
    """Return each example's gradient, one backward pass per example: name to ``(n, *shape)``."""
    state = copy.deepcopy(module.state_dict())
    gradients: dict[str, list[Tensor]] = {name: [] for name in trained(module)}
    for i in range(len(batch[0])):
        module.load_state_dict(state)  # some modules write buffers in each forward pass
        module.zero_grad(set_to_none=True)
        loss(module, *(part[i : i + 1] for part in batch)).backward()
        for name, parameter in trained(module).items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense().clone()
            gradients[name].append(gradient)
    module.load_state_dict(state)
    module.zero_grad(set_to_none=True)
    return {name: torch.stack(parts) for name, parts in gradients.items()}


class Tapped:
    """A model with taps, its batches collected in ``found``."""

    def __init__(self, module: nn.Module, rows: int, geometry: Mapping[str, Geometry] | None = None) -> None:
        self.rows = rows
        self.found: list[GradientBatch] = []
        parameters = trained(module)
        isotropic = {name: identity(tuple(parameter.shape)) for name, parameter in parameters.items()}
        self.taps = Taps(
            module,
            parameters,
            geometry=lambda: {**isotropic, **(geometry or {})},
            rows=lambda: self.rows,
            consume=self.found.append,
            examine=probe,
        )

    def __enter__(self) -> Tapped:
        return self

    def __exit__(self, *_: object) -> None:
        self.taps.detach()


def tapped(
    module: nn.Module, batch: Batch, loss: Loss, geometry: Mapping[str, Geometry] | None = None
) -> GradientBatch:
    """Return what the taps collect from one ordinary backward pass over the batch."""
    with Tapped(module, len(batch[0]), geometry) as model:
        loss(module, *batch).backward()
    assert len(model.found) == 1
    leaked = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
    assert not leaked, f"ordinary gradients reached {leaked}"
    return model.found[0]


def guided(module: nn.Module, guidance: Guidance) -> dict[str, Geometry]:
    """Return the geometry that a guidance makes from a model's weights."""
    templates = describe(module, trained(module))
    blocks = tuple(Block(name, p.detach(), **templates[name].for_guidance) for name, p in trained(module).items())
    return guidance.geometry(Released(0, blocks, 0.0))


def compare(
    expected: Mapping[str, Tensor],
    found: GradientBatch,
    geometry: Mapping[str, Geometry] | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Compare norms and weighted sums of every parameter with the oracle's (of a mean over the examples)."""
    n = found.rows
    weights = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    largest = max(float(gradients.abs().max()) for gradients in expected.values())
    for name, gradients in expected.items():
        if name not in found.pieces:
            assert not gradients.any(), f"{name}: no gradient found"
            continue
        whitened = geometry[name].whiten(gradients) if geometry and name in geometry else gradients
        for got, want in (
            (found.square_norms[name].sqrt() * n, whitened.reshape(n, -1).norm(dim=1)),
            (
                found.pieces[name].weighted_sum(weights.to(gradients.dtype)) * n,
                torch.einsum("n,n...->...", weights.to(gradients.dtype), gradients),
            ),
        ):
            assert got.shape == want.shape, (name, got.shape, want.shape)
            scale = max(float(want.abs().max()), 1e-3 * largest)
            error = float((got - want).abs().max()) / scale
            assert error <= tolerance, f"{name}: off by {error:.2g}"


def check(
    module: nn.Module,
    batch: Batch,
    loss: Loss,
    geometry: Mapping[str, Geometry] | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Check a model: what its taps find in one backward pass is what micro-batches of one find."""
    compare(micro_batches(module, batch, loss), tapped(module, batch, loss, geometry), geometry, tolerance)
