"""Second moments of what goes into a network's layers, and of the gradients that come back to their outputs.

The gradient of a layer's weight is a sum of outer products, delta a^T: a is an input of the layer (of a convolution: a
patch of it), delta the gradient of the loss at the output there. R = E[a a^T] and L = E[delta delta^T] therefore tell
along which columns and rows of the weight gradients are large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(eq=False)
class LayerMoments:
    """The moments of one weight, summed in float64; a weight that several layers share has their sum.

    Attributes:
        columns: the sum of a a^T.
        rows: the sum of delta delta^T.
    """

    columns: Tensor | None = None
    rows: Tensor | None = None

    def add(self, inputs: Tensor, gradients: Tensor) -> None:
        """Adds what a layer saw: (n, columns) inputs and (n, rows) gradients."""
        self.columns = _plus(self.columns, inputs)
        self.rows = _plus(self.rows, gradients)


@dataclass(eq=False)
class Watch:
    """Layers that tell what they see while :meth:`watched` lasts.

    Attributes:
        names: the name of each weight of interest, by its identity.
        found: what was seen so far, by the name of the weight.
    """

    names: dict[int, str]
    found: dict[str, LayerMoments] = field(default_factory=dict)

    @contextmanager
    def watched(self, network: nn.Module) -> Iterator[None]:
        """Watches the network's linear layers and convolutions; its parameters take no gradients meanwhile."""
        layers = [layer for layer in network.modules() if _matrix_layer(layer) and id(layer.weight) in self.names]
        handles = [layer.register_forward_hook(self._called, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _called(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        inputs = (args[0] if args else kwargs["input"]).detach()
        moments = self.found.setdefault(self.names[id(layer.weight)], LayerMoments())
        if not output.requires_grad:  # the first layer of all: gradients need go no further back
            output = output.detach().requires_grad_().clone()  # a copy, since what follows may work in place
        output.register_hook(lambda gradient: moments.add(*_matrices(layer, inputs, gradient)))
        return output


def of_batch(network: nn.Module, names: dict[int, str], inputs: Tensor, loss: Loss, random: torch.Generator) -> Watch:
    """Runs a network on inputs, some at a time, and returns what its layers saw.

    Args:
        network: in evaluation mode, its parameters without ``requires_grad``.
        names: the name of each weight of interest, by its identity.
        inputs: a batch.
        loss: the sum of the examples' losses, from the network's outputs and a generator.
        random: for what the loss draws.
    """
    watch = Watch(names)
    with torch.enable_grad(), watch.watched(network):
        for some in inputs.split(_AT_A_TIME):
            total = loss(network(some), random)
            if total.requires_grad:
                total.backward()
    return watch


def drawn_labels(outputs: Tensor, random: torch.Generator) -> Tensor:
    """Returns the sum of cross-entropies with labels drawn from the network's own predictions, one for each example.

    Raises:
        ValueError: where the outputs are not one row of class scores for each example, or not finite.
    """
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        what = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"guidance 'prior' draws labels from class scores, (examples, classes), and the model returned {what}: "
            "give Prior a loss=, a function of the outputs and a torch.Generator that returns the sum of losses"
        )
    chances = outputs.detach().float().softmax(1)
    if not bool(chances.isfinite().all()):
        raise ValueError("the network's outputs on synthetic images are NaN or infinite: the training has diverged")
    labels = torch.multinomial(chances, 1, generator=random).squeeze(1)
    return F.cross_entropy(outputs.float(), labels, reduction="sum")


def patches(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """Returns the patches of (n, channels, height, width) inputs that a convolution multiplies, one in each row."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
    found = F.unfold(padded, layer.kernel_size, dilation=layer.dilation, stride=layer.stride)
    return found.mT.flatten(0, 1)


_AT_A_TIME = 64
"""Examples: a bound on memory."""


def _matrix_layer(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)


def _matrices(layer: nn.Module, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Returns inputs and output gradients of a call as matrices, position by position."""
    if isinstance(layer, nn.Conv2d):
        four = inputs if inputs.dim() == 4 else inputs.unsqueeze(0)
        return patches(layer, four), gradients.reshape(-1, *gradients.shape[-3:]).flatten(2).mT.flatten(0, 1)
    return inputs.reshape(-1, inputs.shape[-1]), gradients.reshape(-1, gradients.shape[-1])


def _plus(total: Tensor | None, rows: Tensor) -> Tensor:
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    fresh = (wide.mT @ wide).double()
    return fresh if total is None else total + fresh
