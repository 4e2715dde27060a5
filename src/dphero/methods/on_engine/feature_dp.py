"""FeatureDP: a small model on fixed wavelet features, trained with DP-SGD (Tramèr and Boneh 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero import checkpoint
from dphero._checks import one_of, positive
from dphero.accounting import Gaussian, Ledger
from dphero.methods.card import Card
from dphero.methods.method import Method, register
from dphero.methods.task import Task
from dphero.methods.trainer import Step, Trainer
from dphero.methods.trainers.base_trainer import key_of
from dphero.methods.trainers.engine_trainer import PrivateTrainer
from dphero.models import FeatureModel
from dphero.noise import FastNoise, NoiseSource, SecureNoise

_HISTOGRAM_NOISE = 4.0  # as often the moments' noise multiplier: the histogram needs to be right to a few percent only
_EDGES = torch.logspace(-10, 10, 81, base=2, dtype=torch.float64)  # quarter octaves
_CHUNK = 4096


class ChannelNorm(nn.Module):
    """(x − mean) / √variance for each channel, with numbers that were released once; changes nothing before that.

    Unlike a batch norm, it mixes no examples.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        return (x - self.mean.view(shape)) * self.variance.rsqrt().view(shape)


class CentredRows(nn.Module):
    """Each example's features at norm 1, less a mean that was released once, at norm 1 again.

    Clipped gradients of features that all point the same way say little but their mean.
    """

    mean: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(F.normalize(x.flatten(1)) - self.mean)


class Moments:
    """Adds noise to sums over the whole data set, and charges for it.

    Guarantee: a sum that one example moves by at most ``bound`` is released by the Gaussian mechanism, and the ledger
    says so.
    """

    def __init__(self, noise: NoiseSource, ledger: Ledger) -> None:
        self._noise, self._ledger, self._releases = noise, ledger, 0

    def release(self, total: Tensor, bound: float, noise_multiplier: float) -> Tensor:
        """Return ``total + noise_multiplier · bound · z``."""
        self._ledger.record(Gaussian(noise_multiplier))
        noise = torch.empty_like(total)
        self._noise.fill([noise], noise_multiplier * bound, self._releases, bound_to=[total.cpu()])
        self._releases += 1
        return total + noise

    def typical_norm(self, norms: Tensor, noise_multiplier: float) -> float:
        """Return a number near the median of the norms, from a noisy histogram: an example counts in one bin."""
        bins = torch.bucketize(norms, _EDGES.to(norms.device))
        counts = torch.bincount(bins, minlength=len(_EDGES) + 1).double()
        reached = self.release(counts, 1.0, noise_multiplier).cumsum(0)
        middle = int((reached >= reached[-1] / 2).int().argmax())
        return float(_EDGES[min(middle, len(_EDGES) - 1)])


@torch.no_grad()
def release_moments(
    features: Tensor, records: int, moments: Moments, noise_multiplier: float, bounds: tuple[float | None, float | None]
) -> tuple[Tensor, Tensor]:
    """Release mean and variance of each channel.

    m_i are the means of the channels of image i, clipped to norm τ: mean = (Σ m_i + σ τ z) / N; the same for the means
    of squares, with a τ of their own. Where a bound is not given, a noisy histogram of the norms gives one near their
    median. The variance is kept above its own noise.

    Args:
        features: N×K×…, on the device.
        records: The public number of records N.
        moments: Adds the noise and charges for it.
        noise_multiplier: σ of each of the two sums; a histogram has four times that.
        bounds: τ for means and for squares; ``None`` finds one.
    """
    found = []
    for power, given in zip((1, 2), bounds, strict=True):
        parts = [part.double().pow(power).flatten(2).mean(2) for part in features.split(_CHUNK)]
        rows = torch.cat(parts)
        rows = rows.where(rows.isfinite().all(1, keepdim=True), 0.0)  # one broken image must not show in every sum
        norms = rows.norm(dim=1)
        bound = moments.typical_norm(norms, _HISTOGRAM_NOISE * noise_multiplier) if given is None else given
        total = (rows * (bound / norms.clamp(min=bound))[:, None]).sum(0)
        found.append(moments.release(total, bound, noise_multiplier) / records)
        noise_level = noise_multiplier * bound / records
    mean, square = found
    return mean, (square - mean.square()).clamp(min=noise_level)


@torch.no_grad()
def release_mean_direction(
    features: Tensor, seen_through: nn.Module, records: int, moments: Moments, noise_multiplier: float
) -> Tensor:
    """Release the mean of the examples' features, as a public transform shows them, at norm 1: (Σ x/‖x‖ + σ z) / N."""
    total = features.new_zeros(features[0].numel(), dtype=torch.float64)
    for part in features.split(_CHUNK):
        rows = F.normalize(seen_through(part).flatten(1).double())  # in float32 a norm may come out above 1
        total += rows.where(rows.isfinite().all(1, keepdim=True), 0.0).sum(0, dtype=torch.float64)
    return moments.release(total, 1.0, noise_multiplier) / records


class _FeatureTrainer(PrivateTrainer):
    """Releases the normalisation before its first step, and takes the features through it once.

    Trained is what follows the normalisation; a resumed training has the normalisation in its checkpoint.
    """

    def __init__(self, card: Card, task: Task, method: FeatureDP) -> None:
        self.method = method
        self.key = key_of(task.recipe.seed, "normalisation")
        self.normalisation, trained = nn.Sequential(), task.module
        if method.normalisation_events().steps:
            self.normalisation, trained = task.module.children()  # type: ignore[assignment]
        self._normalised = not self.normalisation
        super().__init__(
            card,
            task,
            besides=method.normalisation_events(),
            module=trained,
            options={"guidance": "isotropic"},
        )

    def advance(self) -> Step:
        """Draw a lot, release its gradient, and let the optimizer use it."""
        if not self._normalised:
            if not self.ledger.steps:
                self._release_normalisation()
            self._normalise()
        return super().advance()

    def _release_normalisation(self) -> None:
        recipe, method = self.task.recipe, self.method
        moments = Moments(SecureNoise() if recipe.secure else FastNoise(self.key), self.ledger)
        features, records, sigma = self.train.tensors[0], self.task.records, method.normalisation_noise
        for place, layer in enumerate(self.normalisation):
            if isinstance(layer, ChannelNorm):
                bounds = (method.mean_bound, method.square_bound)
                mean, variance = release_moments(features, records, moments, sigma, bounds)
                layer.mean.copy_(mean)
                layer.variance.copy_(variance)
            elif isinstance(layer, CentredRows):
                seen = self.normalisation[:place]
                layer.mean.copy_(release_mean_direction(features, seen, records, moments, sigma))
        assert self.ledger == method.normalisation_events(), "what was released is what the noise was calibrated for"

    @torch.no_grad()
    def _normalise(self) -> None:
        """Put normalised features in the place of the features: to do so at every step would be most of its work."""
        features, labels = self.train.tensors
        parts = features.split(_CHUNK)
        normalised = torch.empty(len(features), *self.normalisation(parts[0]).shape[1:], device=features.device)
        for part, place in zip(parts, normalised.split(_CHUNK), strict=True):
            place.copy_(self.normalisation(part))
        self.train.tensors = (normalised, labels)
        self._normalised = True

    def save(self, path: str | PathLike[str], extra: Mapping[str, Any]) -> None:
        """Write the engine's checkpoint, the normalisation if it was released, and the key of its noise."""
        released = self.normalisation.state_dict() if self._normalised else None
        own = {"normalisation": released, "normalisation_key": str(self.key)}
        super().save(path, {**own, "extra": dict(extra)})

    def load(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Load the checkpoint, which was made with normalised features if the normalisation was released."""
        released = checkpoint.load(path).extra["normalisation"]
        if released is not None and not self._normalised:
            self.normalisation.load_state_dict(released)
            self._normalise()
        saved = super().load(path)
        self.key = int(saved["normalisation_key"])
        return dict(saved["extra"])


@register
@dataclass(frozen=True)
class FeatureDP(Method):
    """Scattering features, which nobody has to learn, then DP-SGD on a linear classifier or a small network.

    The features need normalising. ``group`` takes each image by itself and costs nothing. ``private`` releases mean and
    variance of each channel once, before training, and is charged: the noise of training is calibrated for both.
    With ``centred``, for a linear classifier, each image's features are then brought to norm 1, their mean is released
    once and taken away, and what is left is brought to norm 1: that is charged too.

    Attributes:
        normalisation: ``group``, which leaves features as the model has them, or ``private``.
        centred: Take the mean away.
        normalisation_noise: σ of the two releases that ``private`` makes, and of the one of ``centred``; 8 in the
            paper.
        mean_bound: A public bound on the norm of an image's channel means. Unless given, it is found from a noisy
            histogram, charged too (the paper takes the exact median, which is not private).
        square_bound: The same for the means of squares.
    """

    card: ClassVar[Card] = Card(
        name="feature-dp",
        title="DP-SGD on fixed scattering features",
        protects="one training example",
        relation="add or remove",
        sampling="Poisson; the normalisation takes all examples, once",
        paper="Tramèr and Boneh 2021 (arXiv 2011.11660), DP Learning Needs Better Features (or Much More Data)",
        priced="PLD of the Poisson-sampled Gaussian and of the Gaussians of the normalisation",
        flaws=(
            "published figures use shuffled batches at the Poisson price, and an older, looser conversion",
            "the published normalisation clips at the exact median of private norms; here that is noisy and charged",
            "its hyperparameters were chosen on test accuracy without charge",
        ),
    )

    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "*": {"model": "scatter-linear", "clip": 0.1, "momentum": 0.9},
        "digits": {"lot": 512, "lr": 2.0, "epochs": 40},
        "mnist": {"lot": 4096, "lr": 8.0, "epochs": 40, "options": {"normalisation": "private"}},
        "fashion-mnist": {"lot": 8192, "lr": 16.0, "epochs": 40},
        "cifar10": {
            "model": "scatter-cnn",
            "lot": 8192,
            "lr": 4.0,
            "epochs": 60,
            "options": {"normalisation": "private"},
        },
    }

    normalisation: Literal["group", "private"] = "group"
    centred: bool = False
    normalisation_noise: float = 8.0
    mean_bound: float | None = None
    square_bound: float | None = None

    def __post_init__(self) -> None:
        one_of("normalisation", self.normalisation, ("group", "private"))
        positive("normalisation_noise", self.normalisation_noise)
        for name in ("mean_bound", "square_bound"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))

    def normalisation_events(self) -> Ledger:
        """Return what the normalisation releases."""
        ledger = Ledger()
        if self.normalisation == "private":
            for bound in (self.mean_bound, self.square_bound):
                if bound is None:
                    ledger.record(Gaussian(_HISTOGRAM_NOISE * self.normalisation_noise))
                ledger.record(Gaussian(self.normalisation_noise))
        if self.centred:
            ledger.record(Gaussian(self.normalisation_noise))
        return ledger

    def network(self, model: nn.Module) -> nn.Module:
        """Return the model; where a normalisation is released, its head is that and what is trained after it."""
        if not isinstance(model, FeatureModel):
            raise ValueError(
                "method 'feature-dp' trains on fixed features: give --model scatter-linear or scatter-cnn, or a "
                "dphero.models.FeatureModel of your own"
            )
        features, trained = model.features, model.head
        released: list[nn.Module] = []
        if self.normalisation == "private":
            *first, last = features.children() if isinstance(features, nn.Sequential) else [features]
            if not first or not isinstance(last, nn.GroupNorm):
                raise ValueError(
                    "normalisation='private' replaces a group norm at the end of the features: there is none"
                )
            features = type(features)(*first)
            released.append(ChannelNorm(last.num_channels))
        if self.centred:
            head = list(trained.children())
            if len(head) != 2 or not isinstance(head[0], nn.Flatten) or not isinstance(head[1], nn.Linear):
                raise ValueError("centred=true is for a linear classifier: give --model scatter-linear")
            released.append(CentredRows(head[1].in_features))
            trained = nn.Sequential(head[1])
        if not released:
            return model
        return FeatureModel(features, nn.Sequential(nn.Sequential(*released), trained))

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        return _FeatureTrainer(self.card, task, self)
