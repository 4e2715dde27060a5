"""Modules that cannot be made private, and what to put in their place."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

__all__ = ["fix", "require_private_modules"]


def require_private_modules(module: nn.Module) -> None:
    """Check a model before it is made private.

    Raises:
        ValueError: If a module mixes the examples of a batch or writes data into buffers, naming every one
            of them and its replacement.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if isinstance(getattr(module, "forward", None), object) and "forward" in module.__dict__:
        raise ValueError("this module is already being trained privately; detach() the engine that holds it first")
    problems = [
        f"{path or 'the model'} ({type(child).__name__}): {why}"
        for path, child in module.named_modules()
        if (why := _problem(child))
    ]
    if problems:
        raise ValueError(
            "these modules cannot be made private:\n  " + "\n  ".join(problems) + "\ndphero.fix(module) replaces them."
        )


def _problem(module: nn.Module) -> str | None:
    if isinstance(module, _BatchNorm):
        return (
            "it normalises each example by the others of its batch, and its running statistics hold the data, whether "
            "or not it is affine, frozen or in evaluation mode now; use GroupNorm"
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return "its running statistics hold the data; use track_running_stats=False"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            return "max_norm rewrites the rows that the batch looks up, without noise; use max_norm=None"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq scales an example's gradient by the other examples; switch it off"
    return None


def fix(module: nn.Module) -> nn.Module:
    """Return a copy of a model with every module that cannot be made private replaced.

    Batch norms become group norms with the same number of channels and the same affine weights (groups of
    at least 8 channels, at most 32 groups), norms lose their running statistics, embeddings ``max_norm`` and
    ``scale_grad_by_freq``. In-place activations may follow. Parameters are new objects: build the optimizer after it.
    """
    fixed = copy.deepcopy(module)
    replacement = _replacement(fixed)
    if replacement is not None:
        return replacement
    for parent in list(fixed.modules()):
        for name, child in list(parent.named_children()):
            replacement = _replacement(child)
            if replacement is not None:
                setattr(parent, name, replacement)
    return fixed


def _replacement(module: nn.Module) -> nn.Module | None:
    if isinstance(module, _BatchNorm):
        channels = module.num_features
        groups = math.gcd(channels, 32)
        while groups > 1 and channels // groups < min(8, channels):
            groups //= 2
        norm = nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)
        if module.affine:
            with torch.no_grad():
                norm.weight.copy_(module.weight)
                norm.bias.copy_(module.bias)
            norm.to(module.weight.device, module.weight.dtype)
            norm.weight.requires_grad_(module.weight.requires_grad)
            norm.bias.requires_grad_(module.bias.requires_grad)
        return norm.train(module.training)
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        module.max_norm, module.scale_grad_by_freq = None, False
    return None
