"""A network's last layer behind a fixed map that makes its inputs easy to learn from with clipped gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

_FLOOR = 0.01  # of the mean eigenvalue


class Head(nn.Module):
    """A network's last layer, behind a fixed map of its inputs: linear((x − mean) M).

    DP-SGD learns badly from features that all point the same way: the clipped gradients say little but the mean. Mean
    and M come from synthetic images, so they are public.
    """

    mean: Tensor
    matrix: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(linear.in_features))
        self.register_buffer("matrix", torch.eye(linear.in_features))
        self.linear = linear

    def whitened(self, x: Tensor) -> Tensor:
        """Return what the linear layer takes."""
        return (x - self.mean) @ self.matrix

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.whitened(x))

    def whiten_by(self, x: Tensor) -> None:
        """Choose mean and M so that these features become uncorrelated, of one variance, and their median norm 1."""
        wide = x.double()
        mean = wide.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov((wide - mean).T).reshape(x.shape[1], x.shape[1]))
        raised = values.clamp(min=0) + _FLOOR * values.mean() + torch.finfo(torch.float32).tiny
        matrix = (vectors * raised.rsqrt()) @ vectors.T
        size = ((wide - mean) @ matrix).norm(dim=1).median()
        self.mean.copy_(mean)
        self.matrix.copy_(matrix / size.clamp(min=1e-6))


def with_head(model: nn.Module) -> nn.Module:
    """Put a :class:`Head` in the place of a network's last linear layer; as long as it is new it changes nothing.

    Raises:
        ValueError: If the network has no linear layer.
    """
    names = [name for name, child in model.named_modules() if isinstance(child, nn.Linear)]
    if not names:
        raise ValueError(f"the network ({type(model).__name__}) must end with a linear layer, and has none")
    linear = model.get_submodule(names[-1])
    assert isinstance(linear, nn.Linear)
    if linear is model:
        return Head(linear)
    parent, _, name = names[-1].rpartition(".")
    setattr(model.get_submodule(parent), name, Head(linear))
    return model


def head_of(model: nn.Module, example: Tensor) -> Head:
    """Return the head that :func:`with_head` made.

    The network is tried in evaluation mode: dropout gives other outputs each time, and a batch norm keeps what it saw.

    Raises:
        ValueError: If the network does not end with it.
    """
    (head,) = (child for child in model.modules() if isinstance(child, Head))
    was_training = model.training
    model.eval()
    with torch.no_grad():
        inputs = features(model, example)
        found = inputs.dim() == 2 and torch.equal(head(inputs), model(example))
    model.train(was_training)
    if found:
        return head
    raise ValueError(f"the network ({type(model).__name__}) must end with a linear layer: its outputs are none's")


def features(model: nn.Module, images: Tensor) -> Tensor:
    """Return what goes into a network's head."""
    return headless(model)(images)


def headless(model: nn.Module) -> nn.Module:
    """Return a network that ends before the head, of the same parameters."""
    if isinstance(model, Head):
        return nn.Identity()
    known: dict[int, Any] = {id(child): child for child in (*model.parameters(), *model.buffers())}
    for child in model.modules():
        if isinstance(child, Head):
            known[id(child)] = nn.Identity()
    return copy.deepcopy(model, known)
