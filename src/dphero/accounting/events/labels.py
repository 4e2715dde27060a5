"""Releases that protect labels alone: each label is randomised before anybody uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from dp_accounting.pld.common import DifferentialPrivacyParameters
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, from_privacy_parameters
from numpy.typing import NDArray

from dphero import _checks as checks
from dphero.accounting.events.base import Event, Relation


@dataclass(frozen=True)
class RandomisedLabels(Event, kind="randomised_labels"):
    """The labels of one part of the data, each drawn anew from probabilities that differ by at most e^ε.

    Guarantee: pure ``epsilon`` (delta 0) for neighbours that differ in one label; the inputs count as public. Parts are
    disjoint and chosen without looking at labels, so a label is in one part only: all parts together cost what the
    dearest one costs. Releases of the same part add up.

    Attributes:
        epsilon: The logarithm of the largest ratio of two labels' probabilities for one outcome.
        part: Which part of the data, from 0.
    """

    epsilon: float
    part: int

    relation: ClassVar[Relation] = "replace_label"
    title: ClassVar[str] = "Randomised labels"
    sampling: ClassVar[str] = (
        "The data is split in disjoint parts without looking at labels, and each label is randomised once, by itself; "
        "inputs are used as they are, without protection."
    )

    _checks: ClassVar = {"epsilon": checks.epsilon, "part": partial(checks.whole, "part", least=0)}

    @classmethod
    def charged(cls, counts: Mapping[Any, int]) -> Mapping[Event, int]:
        """One release at the dearest part's sum of epsilons."""
        totals: Counter[int] = Counter()
        for event, count in counts.items():
            totals[event.part] += count * event.epsilon
        return {cls(max(totals.values()), part=0): 1} if totals else {}

    def pure_epsilon(self) -> float | None:
        return self.epsilon

    def zcdp(self) -> float | None:
        """``epsilon^2 / 2``, which holds for whatever is purely ``epsilon`` private."""
        return self.epsilon**2 / 2

    def rdp(self, orders: Sequence[float]) -> NDArray[np.float64] | None:
        """The divergence of randomised response on two answers: no mechanism of this ``epsilon`` has a larger one.

        With ``p = 1 / (1 + e^-epsilon)`` and ``q = 1 - p``: ``ln(p^a q^(1-a) + q^a p^(1-a)) / (a-1)``.
        """
        order = np.asarray(orders, dtype=np.float64)
        log_p = -np.log1p(np.exp(-self.epsilon))
        log_q = log_p - self.epsilon
        both = np.logaddexp(order * log_p + (1 - order) * log_q, order * log_q + (1 - order) * log_p)
        return np.minimum(np.maximum(both, 0.0) / (order - 1), self.epsilon)

    def pld(self, interval: float) -> PrivacyLossDistribution | None:
        """The privacy losses of randomised response on two answers, rounded pessimistically."""
        bound = DifferentialPrivacyParameters(self.epsilon, 0)
        return from_privacy_parameters(bound, value_discretization_interval=interval)
