"""Models and optimizers that cannot be made private, and what to put in their place."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer


def require_private_modules(module: nn.Module) -> None:
    """Check a model before it is made private.

    Raises:
        ValueError: If a module mixes the examples of a batch, writes data into buffers, or cannot be followed,
            naming every one of them and its replacement.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    problems, fixable = [], True
    for path, child in module.named_modules():
        label = f"{path or 'the model'} ({type(child).__name__})"
        if why := _mixes(child):
            problems.append(f"{label}: {why}")
        elif why := _hides(child):
            problems.append(f"{label}: {why}")
            fixable = False
    if problems:
        advice = "\ndphero.fix(module) puts private ones in their place." if fixable else ""
        raise ValueError("these modules cannot be made private:\n  " + "\n  ".join(problems) + advice)


def _mixes(module: nn.Module) -> str | None:
    """Return why a module is not private; :func:`fix` replaces every such module."""
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


def _hides(module: nn.Module) -> str | None:
    """Return why the layers inside a module cannot be followed."""
    if isinstance(module, DataParallel | DistributedDataParallel):
        return "it copies the model or adds up gradients behind the engine's back; give the model inside it"
    if isinstance(module, torch.jit.ScriptModule):
        return "its code is compiled; give the Python module"
    if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
        return "it is compiled; give the module before torch.compile"
    return None


def trained_parameters(module: nn.Module, optimizers: list[Optimizer]) -> dict[str, nn.Parameter]:
    """Return the module's parameters that the optimizers train, by name.

    Raises:
        ValueError: If a parameter would be trained without privacy, twice, or not at all.
    """
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise ValueError("optimizer must be a torch optimizer, or a list of them")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    held: set[str] = set()
    for parameter in _held(optimizers):
        name = names.get(id(parameter))
        if name is None:
            raise ValueError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the module's: it would "
                "be trained without privacy. Build the optimizer from module.parameters(), after moving the module to "
                "its device."
            )
        if name in held:
            raise ValueError(f"two optimizers hold parameter {name!r}; one release can step it once")
        held.add(name)
    wanted = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    loose = sorted(wanted.keys() - held)
    if loose:
        raise ValueError(
            f"no optimizer holds {', '.join(map(repr, loose[:5]))}{' and others' if len(loose) > 5 else ''}, which "
            "require gradients: another optimizer would train them without privacy. Freeze them "
            "(requires_grad_(False)), or give every optimizer: optimizer=[a, b]."
        )
    if not wanted:
        raise ValueError("the optimizer holds no parameter that requires a gradient: nothing would be trained")
    for name, parameter in wanted.items():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} has no shape yet: call the model once on public data first")
        if not parameter.is_floating_point():
            raise ValueError(f"parameter {name!r} is {parameter.dtype}; only real floating-point parameters get noise")
        if parameter.dtype == torch.float16:
            raise ValueError(
                f"parameter {name!r} is float16, whose smallest numbers are too large for the noise of a private "
                "gradient: use float32 (module.float(); autocast is fine) or bfloat16"
            )
    return wanted


def _held(optimizers: list[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def fix(module: nn.Module) -> nn.Module:
    """Return a copy of a model with every module that mixes examples or stores data replaced.

    Batch norms become group norms with the same number of channels and the same affine weights (groups of
    at least 8 channels, at most 32 groups), norms lose their running statistics, embeddings ``max_norm`` and
    ``scale_grad_by_freq``. Parameters are new objects: build the optimizer after it.
    """
    fixed = copy.deepcopy(module)
    if isinstance(fixed, _BatchNorm):
        return _group_norm(fixed)
    norms: dict[_BatchNorm, nn.GroupNorm] = {}  # one that is used in several places is replaced by one
    for parent in list(fixed.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm):
                norms[child] = norms.get(child) or _group_norm(child)
                parent._modules[name] = norms[child]
            elif isinstance(child, nn.Module):
                _switch_off(child)
    _switch_off(fixed)
    return fixed


def _group_norm(norm: _BatchNorm) -> nn.GroupNorm:
    channels = norm.num_features
    groups = math.gcd(channels, 32)
    while groups > 1 and channels // groups < min(8, channels):
        groups //= 2
    new = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        new.to(norm.weight.device, norm.weight.dtype)
        with torch.no_grad():
            new.weight.copy_(norm.weight)
            new.bias.copy_(norm.bias)
        new.weight.requires_grad_(norm.weight.requires_grad)
        new.bias.requires_grad_(norm.bias.requires_grad)
    return new.train(norm.training)


def _switch_off(module: nn.Module) -> None:
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        module.max_norm, module.scale_grad_by_freq = None, False
