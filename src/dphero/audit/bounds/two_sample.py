"""The two-sample audit of anything that releases: with the canary, without it, and how far apart the two are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dphero.audit.bounds.claims import Claim
from dphero.audit.bounds.statistics import Evidence, separate


class Release(Protocol):
    """Anything that can be audited: makes one release and returns what an attacker makes of it.

    Calls must be independent of one another. A larger number should speak for the canary; how well it does decides
    the power of the audit, never its validity.
    """

    def __call__(self, canary_in: bool, seed: int, /) -> float:
        """Release once, with the canary among the data or without it."""


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found.

    Attributes:
        name: What was audited.
        claim: What it claims.
        confidence: The probability with which every bound below holds, all together.
        evidence: The thresholds and rates that the bounds follow from.
        epsilon_any: A lower bound on ε at δ that assumes nothing about the mechanism.
        refuted: Whether the claim is refuted, at some point of its curve. Assumes nothing about the mechanism.
        true_epsilon: ε as it follows from theory; ``None`` where that is not known.
        inside: Observations with the canary.
        outside: Observations without.
        uncharged: Releases for which the ledger charged nothing, where that was looked at; any refutes the claim.
        noise_multiplier: σ that the claim is about, where that is known.
    """

    name: str
    claim: Claim
    confidence: float
    evidence: tuple[Evidence, ...]
    epsilon_any: float
    refuted: bool
    true_epsilon: float | None = None
    inside: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0), repr=False)
    outside: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0), repr=False)
    uncharged: int = 0
    noise_multiplier: float | None = None

    @cached_property
    def epsilon_fitted(self) -> float | None:
        """A larger lower bound, which assumes that the releases are what they claim to be up to the size of the noise.

        Gaussian, that is, on lots of the claimed rate; ``None`` where the claim is of no such kind. Computed when it is
        first asked for: for sampled releases that takes a second.
        """
        return self.claim.fitted(self.evidence)

    @property
    def audited_epsilon(self) -> float:
        """The larger of the two lower bounds; they hold together."""
        return max(self.epsilon_any, self.epsilon_fitted or 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as plain values."""
        return {
            "mechanism": self.name,
            "noise_multiplier": self.noise_multiplier,
            "claimed_epsilon": _finite(self.claim.epsilon),
            "true_epsilon": None if self.true_epsilon is None else _finite(self.true_epsilon),
            "audited_epsilon": self.audited_epsilon,
            "audited_epsilon_any_mechanism": self.epsilon_any,
            "audited_epsilon_gaussian": self.epsilon_fitted,
            "refuted": self.refuted,
            "uncharged_releases": self.uncharged,
            "confidence": self.confidence,
            "delta": self.claim.delta,
            "releases": [len(self.inside), len(self.outside)],
        }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def audit(
    release: Release,
    claim: Claim | Callable[[], Claim],
    *,
    name: str,
    releases: int,
    confidence: float = 0.95,
    seed: int = 0,
    true_epsilon: float | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> Audit:
    """Release with and without the canary, and test the claim.

    The hypothesis that is tested: for the two data sets that ``release`` builds, every event obeys the claim's curve,
    in both directions. Where it is true, ``refuted`` is ``True``, or ``audited_epsilon`` above the claimed one, with
    probability at most 1 − confidence.

    Args:
        release: What is audited.
        claim: What it claims; a function is called after the releases, when a ledger has something to say.
        name: For the report.
        releases: How many with, and how many without, the canary.
        confidence: See above.
        seed: The first seed; each release gets one of its own.
        true_epsilon: ε by theory, for the report.
        report: Called with the number of releases done, now and then.
    """
    observed: dict[bool, list[float]] = {True: [], False: []}
    for number in range(releases):
        for canary_in in (True, False):
            observed[canary_in].append(float(release(canary_in, seed + 2 * number + canary_in)))
        if number % 64 == 63 or number == releases - 1:
            report(2 * (number + 1))
    inside, outside = np.array(observed[True]), np.array(observed[False])
    made = claim() if callable(claim) else claim
    evidence = separate(inside, outside, delta=made.delta, confidence=confidence)
    return Audit(
        name=name,
        claim=made,
        confidence=confidence,
        evidence=evidence,
        epsilon_any=max(each.epsilon(made.delta) for each in evidence),
        refuted=made.refuted(evidence),
        true_epsilon=true_epsilon,
        inside=inside,
        outside=outside,
    )
