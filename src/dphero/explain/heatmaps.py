"""Grad-CAM: where in an image a network finds its reasons for a class.

    map = ReLU(Σₖ αₖ Aᵏ),   αₖ = the mean over positions of ∂ y_class / ∂ Aᵏ

with Aᵏ the feature maps of the last convolution after its activation (Selvaraju et al. 2017), computed by captum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence


_ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.Sigmoid, nn.Softplus)
_CHUNK = 200  # images that pass through the model at a time


def explained_layer(model: nn.Module, image: Tensor, name: str | None = None) -> str:
    """Return the name of the layer whose feature maps are explained: the activation behind the last convolution.

    Args:
        model: The network.
        image: One input, without the batch.
        name: The layer that the user wants instead.

    Raises:
        ValueError: If there is no such layer, or none that has feature maps.
    """
    modules = dict(model.named_modules())
    if name is not None and name not in modules:
        raise ValueError(f"the network has no layer {name!r}: it has {', '.join(each for each in modules if each)}")
    called = _feature_maps(model, image)
    if name is not None:
        if name not in called:
            raise ValueError(f"layer {name!r} has no feature maps (a height and a width): {', '.join(called)} have")
        return name
    convolutions = [number for number, each in enumerate(called) if isinstance(modules[each], nn.Conv2d)]
    if not convolutions:
        raise ValueError(
            "the network has no convolution, so there are no feature maps to locate anything by: heat maps need one "
            "(--model lenet, tanh-cnn, scatter-cnn, …)"
        )
    last = convolutions[-1]
    after = called[last + 1 : last + 2]
    return after[0] if after and isinstance(modules[after[0]], _ACTIVATIONS) else called[last]


def _feature_maps(model: nn.Module, image: Tensor) -> list[str]:
    """Return the innermost modules whose output has a height and a width, in the order in which they are called."""
    called: list[str] = []
    handles = []
    for name, module in model.named_modules():
        if not list(module.children()):

            def note(_: nn.Module, __: object, output: object, name: str = name) -> None:
                if isinstance(output, Tensor) and output.dim() == 4 and max(output.shape[2:]) > 1:
                    called.append(name)

            handles.append(module.register_forward_hook(note))
    try:
        with torch.no_grad():
            model(image.unsqueeze(0))
    finally:
        for handle in handles:
            handle.remove()
    return called


def grad_cam(model: nn.Module, layer: str, images: Tensor, targets: Tensor | Sequence[int]) -> Tensor:
    """Return the heat map of each image for its target class, N×H×W, scaled up to the image bilinearly.

    A map may be zero everywhere: then no position speaks for the class.

    Args:
        model: The network, in evaluation mode.
        layer: The name of the layer, as :func:`explained_layer` gives it.
        images: N×C×H×W.
        targets: The class to explain, for each image.
    """
    from captum.attr import LayerGradCam

    explainer = LayerGradCam(model, dict(model.named_modules())[layer])
    classes = torch.as_tensor(targets)
    found = []
    for part, wanted in zip(images.split(_CHUNK), classes.split(_CHUNK), strict=True):
        maps = explainer.attribute(part, target=wanted, relu_attributions=True).detach()
        found.append(F.interpolate(maps, size=images.shape[2:], mode="bilinear", align_corners=False).squeeze(1))
    return torch.cat(found)
