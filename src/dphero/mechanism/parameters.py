"""What a parameter is: the layer it belongs to, the axis of its features, whose row space it shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.instancenorm._InstanceNorm,
)


@dataclass(frozen=True)
class Template:
    """The public description of one parameter."""

    layer: str  # path of the module that owns it (the first one, for a tied weight)
    shares: str | None  # for a bias, the name of the weight in whose row space its gradient lives
    features: Literal["rows", "columns"]  # which axis of its matrix view holds the features
    plain: bool  # whether its noise is always isotropic: norms' scales, scalars, loose vectors

    @property
    def for_guidance(self) -> dict[str, Any]:
        """The fields that guidance gets to know."""
        return {"shares": self.shares, "features": self.features, "plain": self.plain}


def describe(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Template]:
    """Describe each parameter by the modules that own it."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    templates: dict[str, Template] = {}
    tables = [owner for owner in module.modules() if isinstance(owner, nn.Embedding | nn.EmbeddingBag)]
    embeddings = {id(owner._parameters["weight"]) for owner in tables if "weight" in owner._parameters}
    for path, owner in module.named_modules():
        for local, parameter in owner._parameters.items():
            name = name_of.get(id(parameter))
            if parameter is None or name is None or name in templates:
                continue
            weight = _weight_beside(owner, local, parameter)
            templates[name] = Template(
                layer=path,
                shares=name_of.get(id(weight)) if id(weight) not in embeddings else None,
                features="columns" if id(parameter) in embeddings else "rows",
                plain=isinstance(owner, _NORMS) or (parameter.dim() < 2 and weight is None) or 1 in parameter.shape[:1],
            )
    return {name: templates[name] for name in parameters}


def _weight_beside(owner: nn.Module, local: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Return the weight of the same layer whose rows a bias belongs to."""
    if parameter.dim() != 1 or "bias" not in local:
        return None
    weight = owner._parameters.get(local.replace("bias", "weight"))
    fits = weight is not None and weight.dim() >= 2 and weight.shape[0] == parameter.shape[0]
    return weight if fits else None
