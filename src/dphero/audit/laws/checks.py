"""Checks of the parts that a price rests on: one question each, answered with a p-value or exactly.

A two-sample audit asks what an attacker can tell. A check asks whether a part of the mechanism is what the price
assumes: is the noise normal, as large as charged, new every time? Is each record in each lot by its own coin? It sees
faults that a canary cannot, because it looks at all directions and all releases at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Check:
    """One question about a part of the mechanism, and its answer.

    Attributes:
        name: What was looked at.
        finding: What was found, in words.
        p_value: The probability of so much evidence, or more, if the part is what the price assumes.
        exact: Whether chance has no part in the answer: then the p-value is 0 or 1.
        level: The p-value at or below which the claim is refuted.
    """

    name: str
    finding: str
    p_value: float
    exact: bool = False
    level: float = 0.0

    @classmethod
    def exactly(cls, name: str, finding: str, *, sound: bool) -> Check:
        """Return an answer in which chance has no part."""
        return cls(name, finding, 1.0 if sound else 0.0, exact=True)

    @property
    def refuted(self) -> bool:
        """Whether the part is not what the price assumes."""
        return self.p_value <= self.level

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as plain values."""
        return {**vars(self), "refuted": self.refuted}


def judge(checks: Iterable[Check], error: float) -> list[Check]:
    """Share an error probability among checks (Bonferroni): all of them are right together but with that probability.

    Exact answers take no share.
    """
    made = list(checks)
    uncertain = sum(not each.exact for each in made)
    return [replace(each, level=error / max(uncertain, 1)) for each in made]
