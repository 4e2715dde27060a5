"""The oracle: per-example gradients by micro-batches of one, obviously right and slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dphero.geometry import Geometry, identity
from dphero.tape import GradientBatch
from dphero.taps import Taps


def micro_batches(module: nn.Module, batch: tuple[Any, ...], loss: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Return each example's gradient, one backward pass per example: name to ``(n, *shape)``."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gradients: dict[str, list[Tensor]] = {name: [] for name in parameters}
    n = len(batch[0])
    for i in range(n):
        module.zero_grad(set_to_none=True)
        loss(module, *(part[i : i + 1] for part in batch)).backward()
        for name, p in parameters.items():
            gradients[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    module.zero_grad(set_to_none=True)
    return {name: torch.stack(parts) for name, parts in gradients.items()}


def tapped(
    module: nn.Module,
    batch: tuple[Any, ...],
    loss: Callable[..., Tensor],
    geometry: Mapping[str, Geometry] | None = None,
) -> GradientBatch:
    """Return what the taps collect from one ordinary backward pass over the batch (a mean loss)."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    geometry = geometry or {name: identity(p.shape) for name, p in parameters.items()}
    found: list[GradientBatch] = []
    taps = Taps(module, parameters, geometry=lambda: geometry, rows=lambda: len(batch[0]), consume=found.append)
    try:
        loss(module, *batch).backward()
    finally:
        taps.detach()
    assert len(found) == 1
    return found[0]


def check_against_micro_batches(
    module: nn.Module,
    batch: tuple[Any, ...],
    loss: Callable[..., Tensor],
    geometry: Mapping[str, Geometry] | None = None,
    rtol: float = 1e-4,
) -> None:
    """Compare norms and weighted sums of every parameter with the oracle's."""
    expected = micro_batches(module, batch, loss)
    found = tapped(module, batch, loss, geometry)
    n = len(batch[0])
    weights = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=next(iter(expected.values())).dtype)
    largest = max(float(gradients.flatten(1).norm(dim=1).max()) for gradients in expected.values())
    for name, gradients in expected.items():
        whitened = geometry[name].whiten(gradients) if geometry else gradients
        norms = whitened.flatten(1).norm(dim=1)
        total = torch.einsum("n,n...->...", weights, gradients)
        scale = max(float(norms.max()), 1e-3 * largest)
        if name not in found.pieces:
            assert not gradients.any(), f"{name}: no gradient found"
            continue
        got = found.square_norms[name].sqrt() * n
        assert torch.allclose(got, norms, rtol=rtol, atol=rtol * scale), (name, got, norms)
        summed = found.pieces[name].weighted_sum(weights) * n
        assert summed.shape == total.shape, (name, summed.shape, total.shape)
        tolerance = rtol * max(float(total.abs().max()), 1e-3 * largest)
        assert torch.allclose(summed, total, rtol=rtol, atol=tolerance), (name, (summed - total).abs().max())
