"""The options of ``make_private``, checked as far as they can be without model and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

from dphero._checks import closest, one_of, positive, whole, whole_or_auto
from dphero.guidance import Guidance
from dphero.mechanism.clipping import Clipping as ClipRule
from dphero.mechanism.modes import Mode
from dphero.mechanism.published import require_consent
from dphero.noise import NoiseSource

Clipping = Literal["flat", "per_layer", "automatic", "adaptive"] | ClipRule


@dataclass(frozen=True)
class Options:
    """How a model is to be trained; see :meth:`dphero.PrivacyEngine.make_private` for each of them.

    Raises:
        ValueError: If one of them is impossible, or two do not go together.
    """

    noise_multiplier: float
    max_grad_norm: float
    guidance: str | Guidance
    mechanism: Mode
    clipping: Clipping
    sample_rate: float | None
    expected_batch_size: float | None
    dataset_size: int | Literal["public"] | None
    physical_batch_size: int | Literal["auto"] | None
    sampling: Literal["poisson", "shuffle"]
    loss_reduction: Literal["mean", "sum"]
    secure: bool
    seed: int | None
    unsound: bool
    noise: NoiseSource | None
    cuda_graphs: bool | Literal["auto"]
    pad_to: int | Sequence[int] | None

    def __post_init__(self) -> None:
        positive("noise_multiplier", self.noise_multiplier)
        one_of("mechanism", self.mechanism, ("ellipsoid", "ball", "published"))
        one_of("sampling", self.sampling, ("poisson", "shuffle"))
        one_of("loss_reduction", self.loss_reduction, ("mean", "sum"))
        one_of("cuda_graphs", self.cuda_graphs, ("auto", False, True))
        for length in self.lengths:
            whole("pad_to", length)
        whole_or_auto("physical_batch_size", self.physical_batch_size)
        if self.physical_batch_size == "auto" and len(self.lengths) > 1:
            raise ValueError(
                f'physical_batch_size="auto" goes by the memory that a row takes, and with pad_to={self.pad_to} rows '
                "are of several lengths: give a number of rows, or one length"
            )
        if self.mechanism == "published":
            require_consent(unsound=self.unsound, sampling=self.sampling, clipping=self.clipping)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The public lengths to which examples are padded, if any."""
        if self.pad_to is None:
            return ()
        return (self.pad_to,) if isinstance(self.pad_to, int) else tuple(self.pad_to)


def require_known(options: Mapping[str, Any], method: Any) -> None:
    """Refuse options that a method does not have, with the closest name that it has."""
    known = signature(method).parameters
    for name in options.keys() - known.keys():
        hint = closest(name, known, f"the arguments are {', '.join(known)}")
        raise TypeError(f"make_private_with_epsilon got an unexpected argument {name!r}; {hint}")
