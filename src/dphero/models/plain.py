"""Networks made of torch's own layers, for images (channels, height, width); the perceptron is for any shape."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import nn


def mlp(shape: Sequence[int], classes: int) -> nn.Module:
    """Return a perceptron with one hidden layer of 128 tanh units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 128), nn.Tanh(), nn.Linear(128, classes))


def digits(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Return the network of ``dphero demo``: conv 32 4×4/2 – tanh – linear."""
    return _classifier([nn.Conv2d(channels, 32, 4, stride=2, padding=1), nn.Tanh()], (channels, height, width), classes)


def lenet(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Return LeNet-5 with ReLU and max-pooling: conv 6 5×5 – conv 16 5×5 – fc 120 – fc 84.

    Images of 28×28 are padded to LeNet's 32×32 by the first convolution.
    """
    if (height, width) not in ((28, 28), (32, 32)):
        raise ValueError(f"it takes images of 28x28 or 32x32, not {height}x{width}")
    convolutions = [
        nn.Conv2d(channels, 6, 5, padding=(32 - height) // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return _classifier(convolutions, (channels, height, width), classes, 120, 84, activation=nn.ReLU)


def cifar_cnn(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Return the DP-Hero paper's network for CIFAR-10: twice conv 64 5×5 – ReLU – max-pool, then fc 384 – fc 384."""
    convolutions = [
        nn.Conv2d(channels, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return _classifier(convolutions, (channels, height, width), classes, 384, 384, activation=nn.ReLU)


def tanh_cnn(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Return the tanh networks of Papernot et al. (2021): a small one for one channel, a deeper one for more."""
    convolutions: list[nn.Module] = []
    if channels == 1:
        convolutions = [
            nn.Conv2d(1, 16, 8, stride=2, padding=2),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
        ]
        return _classifier(convolutions, (channels, height, width), classes, 32)
    inner = channels
    for outer in (32, 64, 128):
        convolutions += [nn.Conv2d(inner, outer, 3, padding=1), nn.Tanh()]
        convolutions += [nn.Conv2d(outer, outer, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        inner = outer
    return _classifier(convolutions, (channels, height, width), classes, 128)


def tutorial_cnn(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Return the ReLU network of TensorFlow Privacy's tutorial, the one of DP-SGD's best-known MNIST figures."""
    convolutions = [
        nn.Conv2d(channels, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
    ]
    return _classifier(convolutions, (channels, height, width), classes, 32, activation=nn.ReLU)


@torch.no_grad()
def flattened(layers: Sequence[nn.Module], shape: Sequence[int]) -> int:
    """Return how many numbers the layers make of one input.

    Raises:
        ValueError: If the input is too small for them.
    """
    try:
        return nn.Sequential(*layers)(torch.zeros(1, *shape)).numel()
    except RuntimeError as error:
        raise ValueError("the images are too small for it") from error


def _classifier(
    convolutions: list[nn.Module],
    shape: Sequence[int],
    classes: int,
    *hidden: int,
    activation: type[nn.Module] = nn.Tanh,
) -> nn.Module:
    """Return the convolutions with fully connected layers behind them."""
    size, layers = flattened(convolutions, shape), [*convolutions, nn.Flatten()]
    for width in hidden:
        layers += [nn.Linear(size, width), activation()]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, classes))
