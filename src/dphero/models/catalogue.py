"""Models by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dphero._checks import closest
from dphero._imports import call_named
from dphero.models import features, plain, wide_resnet


@dataclass(frozen=True)
class Entry:
    """A built-in model.

    Attributes:
        name: What it is called.
        line: What it is, in a line.
        inputs: Which inputs it takes, in words.
        make: Returns it, with random weights: ``make(shape, classes)``. Raises ``ValueError`` for a shape that it
            does not take.
    """

    name: str
    line: str
    inputs: str
    make: Callable[[tuple[int, ...], int], nn.Module]


def _for_images(make: Callable[[int, int, int, int], nn.Module]) -> Callable[[tuple[int, ...], int], nn.Module]:
    def checked(shape: tuple[int, ...], classes: int) -> nn.Module:
        if len(shape) != 3:
            raise ValueError("it takes images, of shape (channels, height, width); 'mlp' takes any shape")
        return make(*shape, classes)

    return checked


MODELS = (
    Entry("mlp", "perceptron, 128 tanh units", "any shape", plain.mlp),
    Entry("digits", "conv 32 4x4/2, tanh, linear: the demonstration's", "images", _for_images(plain.digits)),
    Entry("lenet", "LeNet-5 with ReLU: the paper's for MNIST", "images of 28x28 or 32x32", _for_images(plain.lenet)),
    Entry(
        "cifar-cnn",
        "2 conv 64 5x5, fc 384, fc 384, ReLU: the paper's for CIFAR-10",
        "images, 4x4 or larger",
        _for_images(plain.cifar_cnn),
    ),
    Entry(
        "tanh-cnn",
        "tanh network: 2 convolutions and fc 32 for one channel, 6 and fc 128 for more",
        "images, 16x16 or larger (one channel) or 8x8 or larger",
        _for_images(plain.tanh_cnn),
    ),
    Entry(
        "tutorial-cnn",
        "2 convolutions and fc 32, ReLU: that of TensorFlow Privacy's tutorial",
        "images, 16x16 or larger",
        _for_images(plain.tutorial_cnn),
    ),
    Entry(
        "scatter-linear",
        "fixed scattering features, linear classifier",
        "images, sides multiples of 4",
        _for_images(features.scatter_linear),
    ),
    Entry(
        "scatter-cnn",
        "fixed scattering features, small tanh network",
        "images, sides multiples of 4",
        _for_images(features.scatter_cnn),
    ),
    Entry(
        "scatter-mirrored",
        "fixed scattering features of an image and its mirror image, linear classifier",
        "images, sides multiples of 4",
        _for_images(features.scatter_mirrored),
    ),
    Entry(
        "scatter-whitened",
        "fixed scattering features, whitened by synthetic images; linear classifier",
        "images, sides multiples of 4",
        _for_images(features.scatter_whitened),
    ),
    Entry(
        "learned-linear",
        "fixed features learned from synthetic images, and scattering; linear classifier",
        "images of 3 channels, sides multiples of 4",
        _for_images(features.learned_linear),
    ),
    Entry(
        "scatter-views",
        "fixed scattering features of several views of an image, small network",
        "images, sides multiples of 4",
        _for_images(features.scatter_views),
    ),
    Entry(
        "learned-views",
        "features of several views, learned from synthetic images and scattering; small network",
        "images of 3 channels, sides multiples of 4",
        _for_images(features.learned_views),
    ),
    Entry(
        "wrn-16-4",
        "wide ResNet, standardised weights; ReLU, group norm, convolution",
        "images",
        _for_images(lambda channels, height, width, classes: wide_resnet.wide_resnet(channels, classes)),
    ),
    Entry(
        "wrn-16-4-norm-first",
        "the same with group norm, ReLU, convolution",
        "images",
        _for_images(
            lambda channels, height, width, classes: wide_resnet.wide_resnet(channels, classes, order="norm-relu-conv")
        ),
    ),
)
"""The built-in models."""

NAMES = tuple(entry.name for entry in MODELS)
"""Their names."""


def build(spec: str, shape: tuple[int, ...], classes: int, *, seed: int = 0) -> nn.Module:
    """Return a model with random weights.

    The weights depend on ``seed`` alone, not on any data, so they are public, as private training needs them. torch's
    own generators are left as they were.

    Args:
        spec: A name in :data:`NAMES`, or ``package.module:function`` for one of your own: called as
            ``function(shape, classes)``, it returns a module. It is looked for in the working directory, too.
        shape: The shape of one input, without the batch: (channels, height, width) for images.
        classes: How many outputs there are.
        seed: Decides the weights.

    Raises:
        ValueError: If there is no such model, or it does not take such inputs.
    """
    shape = tuple(shape)
    if not shape or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in shape):
        raise ValueError(f"shape must be positive integers, the shape of one input without the batch, got {shape}")
    if not isinstance(classes, int) or isinstance(classes, bool) or classes < 2:
        raise ValueError(f"classes must be an integer of at least 2, got {classes!r}")
    own = ":" in spec
    make = None if own else _built_in(spec).make
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the generators of GPUs as well
        if make is None:
            model = call_named(spec, "model", shape, classes)
        else:
            try:
                model = make(shape, classes)
            except ValueError as error:
                raise ValueError(f"model {spec!r} does not fit inputs of shape {shape}: {error}") from None
    if not isinstance(model, nn.Module):
        raise ValueError(f"{spec} must return a torch.nn.Module, and returned {type(model).__name__}")
    return model


def _built_in(name: str) -> Entry:
    for entry in MODELS:
        if entry.name == name:
            return entry
    hint = closest(name.lower().replace("_", "-"), NAMES, "", cutoff=0.5)
    raise ValueError(
        f"there is no model {name!r}{f'; {hint}' if hint else '.'} Known are {', '.join(NAMES)}, and "
        "package.module:function for your own."
    )
