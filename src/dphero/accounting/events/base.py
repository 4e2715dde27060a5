"""The protocol of an event: one noisy release, and the curves that accountants may ask it for.

An event says what it is and lends accountants the curves it knows. A curve that it does not know is ``None``,
and an accountant that needs it refuses. So a new kind of release is one new class; no accountant changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray

Relation = Literal["add_or_remove", "zero_out", "replace_one", "replace_label"]
"""When data sets are neighbours: one has an example more, an example turned to zero, another example, or the same
examples with another label on one of them."""

POISSON = "Each example enters each lot independently with the sample rate as probability (Poisson sampling)."
"""How examples come into a Poisson lot, for the privacy statement."""

EVENT_KINDS: dict[str, type[Event]] = {}
"""Every kind of event by its name in a saved ledger; filled as the classes are defined."""


@dataclass(frozen=True)
class Event:
    """One noisy release. Subclass with ``kind="name"`` to add a kind; override the curves that are known.

    Attributes:
        kind: The name in a saved ledger.
        relation: The neighbouring relation that the curves are about.
        title: What was released, in a few plain words.
        sampling: How examples came into the release, as a plain sentence.
        adaptive: Whether a privacy parameter was itself chosen from earlier outputs. Ordinary composition
            does not cover that; only a filter does.
    """

    kind: ClassVar[str]
    relation: ClassVar[Relation] = "add_or_remove"
    title: ClassVar[str]
    sampling: ClassVar[str]
    adaptive: ClassVar[bool] = False
    _checks: ClassVar[Mapping[str, Callable[[Any], float]]] = {}
    """For fields: what returns a value as it is to be stored, or raises ``ValueError``."""

    def __post_init__(self) -> None:
        for name, check in self._checks.items():
            object.__setattr__(self, name, check(getattr(self, name)))

    def __init_subclass__(cls, *, kind: str) -> None:
        if kind in EVENT_KINDS:
            raise ValueError(f"event kind {kind!r} is already {EVENT_KINDS[kind].__name__}: choose another name")
        cls.kind = kind
        EVENT_KINDS[kind] = cls

    @classmethod
    def charged(cls, counts: Mapping[Any, int]) -> Mapping[Event, int]:
        """The events to pay for, given how often each of this kind happened (default: all of them)."""
        return counts

    def check_follows(self, latest: Event) -> None:
        """Raise ``ValueError`` if this event cannot come after ``latest``, the ledger's last of its kind."""

    @property
    def is_sampled(self) -> bool:
        """Whether only a random part of the data took part: the event has a ``sample_rate`` below 1."""
        return bool(getattr(self, "sample_rate", 1.0) < 1)

    def mu_squared(self) -> float | None:
        """``mu^2`` if the release is exactly mu-Gaussian private; these compose by adding ``mu^2``."""
        return None

    def clt_mu_squared(self) -> float | None:
        """What the release adds to ``mu^2`` in the central-limit approximation of Gaussian privacy."""
        return self.mu_squared()

    def zcdp(self) -> float | None:
        """``rho`` of zero-concentrated privacy: the Rényi divergence is at most ``rho`` times its order."""
        mu_squared = self.mu_squared()
        return None if mu_squared is None else mu_squared / 2

    def rdp(self, orders: Sequence[float]) -> NDArray[np.float64] | None:
        """Upper bounds on the Rényi divergence at each order, the larger of the two directions.

        By default ``order * rho``, where zCDP's ``rho`` is known.
        """
        rho = self.zcdp()
        return None if rho is None else np.asarray(orders, dtype=np.float64) * rho

    def pld(self, interval: float) -> PrivacyLossDistribution | None:
        """The privacy-loss distribution of one release, rounded pessimistically to a grid."""
        return None

    def sampled_gaussian(self) -> tuple[float, float] | None:
        """``(sample_rate, noise_multiplier)`` if the release is a Gaussian on a Poisson lot, with a rate below 1.

        Many different ones are then composed together, which is far quicker than one by one.
        """
        return None

    def pure_epsilon(self) -> float | None:
        """``epsilon`` at delta 0, if the release has one; these compose by adding."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """``kind`` and the fields, ready for JSON."""
        return {"kind": self.kind, **asdict(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Event:
        """The event that ``to_dict`` wrote.

        Raises:
            ValueError: On an unknown kind, or on fields that this kind does not have or needs.
        """
        values = dict(data)
        kind = values.pop("kind", None)
        if not isinstance(kind, str) or kind not in EVENT_KINDS:
            raise ValueError(f"unknown event kind {kind!r}: this version knows {', '.join(sorted(EVENT_KINDS))}")
        expected = {field.name for field in fields(EVENT_KINDS[kind])}
        if values.keys() != expected:
            raise ValueError(f"event {kind!r} needs exactly {sorted(expected)}, got {sorted(values)}")
        return EVENT_KINDS[kind](**values)
