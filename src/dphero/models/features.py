"""Models on features that nobody has to learn: a fixed public transform, then a small part that is trained."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from dphero.models.plain import flattened
from dphero.models.scattering import MAPS, Scattering
from dphero.models.synthetic import Joined, Mirrored, PrincipalChannels, SideBySide, Stages, Whitened
from dphero.models.views import MeanOverViews, Views

_GROUPS = 27
_ROWS = 256
_WIDTH, _KEPT = 96, 192


class FeatureModel(nn.Module):
    """A model ``head(features(x))`` of which the head alone is trained.

    The features depend on each example alone and on nothing that was learned, so to compute them costs no privacy.
    They are in evaluation mode, always: in training mode a batch norm would mix examples and keep their statistics.
    Compute them once, and train ``head`` on them: ``stored = model.features(images)``. The whole model remains what
    predicts from images, with the weights that its head has then.

    Args:
        features: A transform without trainable parameters.
        head: What is trained.

    Raises:
        ValueError: If the features have trainable parameters.
    """

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        trained = [name for name, parameter in features.named_parameters() if parameter.requires_grad]
        if trained:
            raise ValueError(
                f"features must be fixed, and these of their parameters are trainable: {', '.join(trained)}. Freeze "
                "them (requires_grad_(False)) if they are public, or make them part of the head."
            )
        self.features, self.head = features, head
        features.eval()

    def train(self, mode: bool = True) -> Self:
        """Put the head in training or evaluation mode; the features stay in evaluation mode."""
        super().train(mode)
        self.features.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Piecemeal(nn.Sequential):
    """Steps that are applied to some examples at a time: a whole data set needs little memory beyond its result."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= _ROWS:
            return super().forward(x)
        out: Tensor | None = None
        for first in range(0, len(x), _ROWS):
            part = super().forward(x[first : first + _ROWS])
            if out is None:
                out = part.new_empty(len(x), *part.shape[1:])
            out[first : first + _ROWS] = part
        assert out is not None
        return out


def scatter_linear(channels: int, height: int, width: int, classes: int) -> FeatureModel:
    """Return a linear classifier of normalised scattering features (Tramèr & Boneh, 2021)."""
    return _linear(_normalised_scattering(channels, height, width), _size(channels, height, width), classes)


def scatter_cnn(channels: int, height: int, width: int, classes: int) -> FeatureModel:
    """Return a small tanh network on normalised scattering features (Tramèr & Boneh, 2021).

    One channel: conv 16 3×3/2 – conv 32 3×3 – fc 32. More: conv 64 3×3 – max-pool – conv 64 3×3.
    """
    features = _normalised_scattering(channels, height, width)
    maps = channels * MAPS
    if channels == 1:
        convolutions = [
            nn.Conv2d(maps, 16, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.Tanh(),
        ]
    else:
        convolutions = [
            nn.Conv2d(maps, 64, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.Tanh(),
        ]
    size = flattened(convolutions, (maps, height // 4, width // 4))
    classifier = (
        [nn.Linear(size, 32), nn.Tanh(), nn.Linear(32, classes)] if channels == 1 else [nn.Linear(size, classes)]
    )
    return FeatureModel(features, nn.Sequential(*convolutions, nn.Flatten(), *classifier))


def scatter_mirrored(channels: int, height: int, width: int, classes: int) -> FeatureModel:
    """Return a linear classifier of the scattering of an image and of its mirror image, added up and normalised."""
    norm = nn.GroupNorm(_GROUPS, channels * MAPS, affine=False)
    return _linear(Piecemeal(Mirrored(Scattering(height, width)), norm), _size(channels, height, width), classes)


def scatter_whitened(channels: int, height: int, width: int, classes: int) -> FeatureModel:
    """Return a linear classifier of scattering features, whitened as they are over synthetic images.

    Of images with colours the mirror image's are added: writing has one channel, and is not mirrored.
    """
    scattering = Scattering(height, width)
    transform = scattering if channels == 1 else Mirrored(scattering)
    whitened = Whitened(transform, (channels, height, width))
    return _linear(Piecemeal(whitened), _size(channels, height, width), classes)


def learned_linear(channels: int, height: int, width: int, classes: int) -> FeatureModel:
    """Return a linear classifier of what a network that learned from synthetic images sees, and of scattering."""
    if channels != 3:
        raise ValueError("its network has learned from images of three channels")
    shape = (channels, height, width)
    parts = [Whitened(Mirrored(each), shape) for each in (Stages(), Scattering(height, width))]
    return _linear(Piecemeal(Joined(parts)), sum(part.mean.numel() for part in parts), classes)


def scatter_views(channels: int, height: int, width: int, classes: int) -> FeatureModel:
    """Return a small network on normalised scattering features of several views."""
    transform = _normalised_scattering(channels, height, width)
    return _on_views(transform, (channels, height, width), channels * MAPS, classes)


def learned_views(channels: int, height: int, width: int, classes: int) -> FeatureModel:
    """Return a small network on several views, as one that learned from synthetic images, and scattering, see them.

    Of the channels of both, those directions are kept in which synthetic images vary most.
    """
    if channels != 3:
        raise ValueError("its network has learned from images of three channels")
    shape = (channels, height, width)
    both = SideBySide([Stages((height // 4, width // 4)), Scattering(height, width)])
    return _on_views(Piecemeal(PrincipalChannels(both, shape, _KEPT)), shape, _KEPT, classes)


def _on_views(transform: nn.Module, shape: tuple[int, int, int], maps: int, classes: int) -> FeatureModel:
    """Return conv 96 1×1 – conv 96 3×3 – max-pool – conv 96 3×3, each with ReLU and group norm, then linear."""
    layers: list[nn.Module] = []
    for inner, kernel in ((maps, 1), (_WIDTH, 3), (_WIDTH, 3)):
        layers += [nn.Conv2d(inner, _WIDTH, kernel, padding=kernel // 2), nn.ReLU(), nn.GroupNorm(16, _WIDTH)]
    layers.insert(6, nn.MaxPool2d(2, ceil_mode=True))
    size = flattened(layers, (maps, shape[1] // 4, shape[2] // 4))
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, classes))
    return FeatureModel(Piecemeal(Views(transform, mirrored=shape[0] > 1)), MeanOverViews(network))


def _linear(features: nn.Module, size: int, classes: int) -> FeatureModel:
    return FeatureModel(features, nn.Sequential(nn.Flatten(), nn.Linear(size, classes)))


def _size(channels: int, height: int, width: int) -> int:
    return channels * MAPS * (height // 4) * (width // 4)


def _normalised_scattering(channels: int, height: int, width: int) -> Piecemeal:
    # a group is part of one image: unlike a batch norm, this mixes no examples
    return Piecemeal(Scattering(height, width), nn.GroupNorm(_GROUPS, channels * MAPS, affine=False))
