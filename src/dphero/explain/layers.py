"""Layer by layer: the spectrum of the weights, of the noise and of the released gradient, and where the noise falls.

All of it is computed from what a run has released (kept weights, kept gradients, public settings) and public images.
With W a layer's weight as a matrix of k features, A the left factor of its geometry, scaled so that ‖A‖² = k, G̃ the
released gradient and G the gradient of the mean loss on the public images:

``weights``             spectrum of W Wᵀ
``noise``               spectrum of A Aᵀ: the variance of the noise along its principal directions, 1 on average
``released``            spectrum of G̃ G̃ᵀ
``noise_on_public``     ‖Aᵀ G‖² / ‖G‖²: noise along the directions of the public gradient, 1 for isotropic noise
``noise_on_released``   the same along what is left of G̃ when the energy that noise has on average is taken away
``signal_share``        the share of ‖G̃‖² that is not such noise, and its standard error ``signal_share_error``
``cosine``              of G̃ and G

The geometry is that of the kept weights; the training refreshed it up to ``refresh_every`` steps before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero.explain.images import Images
from dphero.explain.runs import ExplainedRun
from dphero.geometry.geometry import Geometry
from dphero.guidance import Block, Guidance, Released, resolve, spectrum
from dphero.guidance.base import as_matrix
from dphero.mechanism.parameters import describe
from dphero.methods import make

_POINTS = 32  # of a spectrum that are kept


def layers_of(runs: Sequence[ExplainedRun], images: Images | None) -> list[dict[str, Any]]:
    """Return the figures of each layer of each run at each kept epoch.

    Args:
        runs: What is explained.
        images: Public images with labels, for the public gradient; without any, what needs it is left out.
    """
    found = []
    for run in runs:
        guidance = _guidance(run)
        for epoch in run.epochs:
            snapshot = run.snapshot(epoch)
            network = run.network(epoch)
            public = {} if images is None else _public_gradient(network, images)
            blocks = _blocks(network)
            shapes = {} if guidance is None else guidance.geometry(Released(snapshot.step, tuple(blocks), 1.0))
            for block in blocks:
                if not block.has_matrix or block.length(block.features) < 2:
                    continue
                facts: dict[str, Any] = {"run": run.name, "epoch": epoch, "layer": block.name}
                facts["weights"] = spectrum_facts(spectrum(block.value, block.features))
                factor = None
                if guidance is not None:
                    factor = noise_factor(shapes.get(block.name), block)
                    facts["noise"] = spectrum_facts(_variances(factor))
                gradients = {
                    "released": snapshot.gradient.get(block.name),
                    "public": public.get(block.name),
                }
                matrices = {
                    name: as_matrix(value, block.features).double()
                    for name, value in gradients.items()
                    if value is not None and float(value.norm()) > 0
                }
                found.append({**facts, **shares_of_noise(factor, matrices, _noise_scale(run))})
    return found


def shares_of_noise(factor: Tensor | None, matrices: Mapping[str, Tensor], scale: float | None) -> dict[str, Any]:
    """Return the figures that relate noise, released gradient and public gradient.

    Args:
        factor: A, or ``None`` where no noise is added or its shape is not known.
        matrices: ``released`` and ``public``, those of them that there are.
        scale: σC/B, or ``None`` if that is not known.
    """
    found: dict[str, Any] = {}
    released, public = matrices.get("released"), matrices.get("public")
    if released is not None:
        found["released"] = spectrum_facts(torch.linalg.svdvals(released).square())
        if public is not None:
            found["cosine"] = float((released * public).sum() / (released.norm() * public.norm()))
    if factor is None:
        return found
    if public is not None:
        found["noise_on_public"] = float((factor.mT @ public).square().sum() / public.square().sum())
    if released is not None and scale is not None:
        variances, columns = _variances(factor), released.shape[1]
        energy, noise = float(released.square().sum()), scale**2 * columns * float(variances.sum())
        error = scale**2 * math.sqrt(2 * columns * float(variances.square().sum())) / energy
        found["signal_share"], found["signal_share_error"] = 1 - noise / energy, error
        if found["signal_share"] > 3 * error:  # else there is nothing but noise to be seen
            along = float((factor.mT @ released).square().sum()) - scale**2 * columns * float(variances.square().sum())
            found["noise_on_released"] = along / (energy - noise)
    return found


def spectrum_facts(values: Tensor) -> dict[str, Any]:
    """Return, of eigenvalues, the effective rank (Σλ)²/Σλ², the share of the largest, and at most 32 of them.

    Those are scaled to a mean of 1, largest first, evenly over the ranks.
    """
    values = values.double().sort(descending=True).values
    total = float(values.sum())
    if not total > 0:
        return {"rank": 0.0, "largest_share": None, "values": []}
    scaled = values / values.mean()
    places = torch.linspace(0, len(values) - 1, min(_POINTS, len(values))).round().long()
    return {
        "rank": total**2 / float(values.square().sum()),
        "size": len(values),
        "largest_share": float(values[0]) / total,
        "values": [float(f"{value:.4g}") for value in scaled[places].tolist()],
    }


def noise_factor(geometry: Geometry | None, block: Block) -> Tensor:
    """Return A along the features of a weight as a k×k matrix, scaled so that its squares sum to k."""
    size = block.length(block.features)
    identity = torch.eye(size, dtype=torch.float64)
    side = None if geometry is None else geometry.left if block.features == "rows" else geometry.right
    if side is None:
        return identity
    factor = side.to(dtype=torch.float64).colour(identity, axis=-2)
    return factor * math.sqrt(size) / factor.norm()


def _variances(factor: Tensor) -> Tensor:
    """Return the variances along the principal directions; what rounding alone has left of a zero is zero."""
    scales = torch.linalg.svdvals(factor)
    return torch.where(scales > len(scales) * torch.finfo(factor.dtype).eps * scales[0], scales, 0.0).square()


def _guidance(run: ExplainedRun) -> Guidance | None:
    """What shaped the noise of a run, if that follows from its weights alone."""
    recipe = run.directory.recipe
    if recipe.guidance is None:
        return make(recipe.method, recipe.options).guidance()
    if recipe.guidance == "prior":  # follows from synthetic images too
        return None
    found = resolve(recipe.guidance)
    return None if found.needs_gradients else found


def _noise_scale(run: ExplainedRun) -> float | None:
    """σC/B, where each step had the same."""
    recipe, sigma = run.directory.recipe, run.result.get("noise_multiplier")
    fixed = recipe.clipping in (None, "flat") and run.is_private
    return sigma * recipe.clip / recipe.lot if fixed and sigma is not None else None


def _blocks(network: nn.Module) -> list[Block]:
    parameters = {name: value for name, value in network.named_parameters() if value.requires_grad}
    templates = describe(network, parameters)
    return [Block(name, value, **templates[name].for_guidance) for name, value in parameters.items()]


def _public_gradient(network: nn.Module, images: Images) -> dict[str, Tensor]:
    assert images.labels is not None and not images.private
    parameters = {name: value for name, value in network.named_parameters() if value.requires_grad}
    loss = F.cross_entropy(network(images.pixels), images.labels)
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: value for name, value in zip(parameters, gradients, strict=True) if value is not None}
