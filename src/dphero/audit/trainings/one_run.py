"""The one-run audit: m canaries, each in or out by a fair coin, and one training (Steinke, Nasr and Jagielski 2023).

Canaries are gradients (:mod:`~dphero.audit.trainings.gradient_canaries`, white box) or inputs
(:mod:`~dphero.audit.trainings.input_canaries`, black box). Both say how much of the promised ε an attacker of that kind
can use up, at the cost of one training; the first comes closer to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dphero.audit.bounds.claims import Claim
from dphero.audit.bounds.one_run_bounds import Bound, curve_bound, curve_refuted, pair_bound
from dphero.audit.bounds.statistics import guessing_bound


@dataclass(frozen=True, eq=False)
class OneRun:
    """What one training gave away.

    Attributes:
        name: What was audited.
        claimed_epsilon: ε as it was printed, at
        delta: δ.
        audited_epsilon: A lower bound on it; it assumes nothing about the mechanism.
        confidence: The probability with which each bound holds, by itself.
        canaries: m.
        guesses: How many coins were guessed, in the test that gave the bound, and
        correct: how many of them rightly.
        scores: What the attacker made of each canary.
        included: Whether it was in.
        bounds: Larger lower bounds, each with what it assumes.
        verdict_epsilon: The bound without assumptions that the verdict rests on: it leaves room for the test of the
            curve.
        curve_refuted: Whether the trade-off curve of the claim is refuted; that assumes nothing about the mechanism.
        noise_multiplier: σ that the claim is about, where there is one.
    """

    name: str
    claimed_epsilon: float
    delta: float
    audited_epsilon: float
    confidence: float
    canaries: int
    guesses: int
    correct: int
    scores: NDArray[np.float64] = field(repr=False)
    included: NDArray[np.bool_] = field(repr=False)
    bounds: tuple[Bound, ...] = ()
    verdict_epsilon: float = 0.0
    curve_refuted: bool = False
    noise_multiplier: float | None = None

    @property
    def refuted(self) -> bool:
        """Whether the claim is refuted: its ε or its curve. Where it is true, with probability ≤ 1 − confidence."""
        return self.curve_refuted or self.verdict_epsilon > self.claimed_epsilon

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as plain values."""
        names = (
            "noise_multiplier",
            "claimed_epsilon",
            "audited_epsilon",
            "confidence",
            "delta",
            "refuted",
            "canaries",
            "guesses",
            "correct",
        )
        values = {name: getattr(self, name) for name in names}
        if math.isinf(self.claimed_epsilon):
            values["claimed_epsilon"] = None
        return {"mechanism": self.name, **values, "bounds": [each.as_dict() for each in self.bounds]}


@dataclass(frozen=True, eq=False)
class Scored:
    """What an attacker made of one training.

    Attributes:
        scores: Of each canary; larger should mean "in".
        epsilon: The claimed ε, given δ.
        claim: The whole claim, given δ, where there is one.
        normal: Whether scores are normal but for what sampling adds: sums of released noise along directions.
        noise_multiplier: σ, where the attacker knows it.
    """

    scores: NDArray[np.float64]
    epsilon: Callable[[float], float]
    claim: Callable[[float], Claim] | None = None
    normal: bool = False
    noise_multiplier: float | None = None


class CanaryTraining(Protocol):
    """A training with some of its canaries, that scores them all; larger should mean "in"."""

    canaries: int

    def __call__(self, included: NDArray[np.bool_], seed: int, /) -> Scored:
        """Train once."""


def audit_one_run(
    train: CanaryTraining, *, name: str, delta: float = 1e-5, confidence: float = 0.95, seed: int = 0
) -> OneRun:
    """Toss the coins, train once, guess the coins, and bound ε by the number of right guesses.

    The verdict rests on two tests that assume nothing about the mechanism and share the error probability: of the
    claimed ε, and of the claimed trade-off curve.

    Args:
        train: The training; must not look at the coins except to include canaries.
        name: For the report.
        delta: δ.
        confidence: Of the bound.
        seed: Decides the coins and the training.
    """
    included = np.random.default_rng([seed, 1]).random(train.canaries) < 0.5
    made = train(included, seed)
    scores, error = made.scores, 1 - confidence
    epsilon, guesses, correct = guessing_bound(scores, included, delta=delta, confidence=confidence)
    claim = None if made.claim is None else made.claim(delta)
    verdict, refuted = epsilon, False
    bounds: list[Bound | None] = []
    if claim is not None and math.isfinite(claim.epsilon):
        verdict, _, _ = guessing_bound(scores, included, delta=delta, confidence=1 - error / 2)
        refuted = curve_refuted(claim, scores, included, error / 2)
        bounds = [curve_bound(claim, scores, included, confidence)]
        if made.normal:
            bounds.append(pair_bound(scores, included, delta, confidence))
    return OneRun(
        name, made.epsilon(delta), delta, epsilon, confidence, train.canaries, guesses, correct, scores, included,
        tuple(each for each in bounds if each is not None), verdict, refuted, made.noise_multiplier,
    )  # fmt: skip
