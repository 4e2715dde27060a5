"""A price: what a ledger costs, the question that accountants are asked, and when they refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dphero.accounting.events.base import Event, Relation

DEFAULT_FILTER_ORDER = 8.0
"""The Rényi filter's order unless another is fixed in advance; near the best for epsilon 3 at delta 1e-5."""


class UnpriceableError(ValueError):
    """An accountant was asked for the price of an event that it cannot price."""

    def __init__(self, event: Event, accountant: str, reason: str) -> None:
        super().__init__(f"accountant {accountant!r} cannot price {event}: {reason}")
        self.event, self.accountant = event, accountant


@dataclass(frozen=True)
class Price:
    """What a ledger costs.

    Attributes:
        epsilon: The privacy loss at ``delta``; infinite when nothing is guaranteed.
        delta: The probability left out of account.
        accountant: The accountant that answered.
        relation: The neighbouring relation that the price is about.
        is_bound: Whether (epsilon, delta) is a proven upper bound; ``False`` for approximations and claims.
        warning: What a reader must know before using the number, if anything.
    """

    epsilon: float
    delta: float
    accountant: str
    relation: Relation
    is_bound: bool
    warning: str | None = None


@dataclass(frozen=True)
class Query:
    """What an accountant is asked."""

    charges: Mapping[Event, int]  # the events to pay for, and how many of each
    delta: float  # the probability left out of account
    coarse: bool = False  # whether a coarser, quicker bound will do
    filter_order: float = DEFAULT_FILTER_ORDER  # the Rényi order that was fixed before the run

    def refuse_adaptive(self, accountant: str) -> None:
        """Raise ``UnpriceableError`` if a noise multiplier was chosen from earlier outputs."""
        for event in self.charges:
            if event.adaptive:
                reason = (
                    "its noise multiplier was chosen from earlier outputs, and only a Rényi filter at an order "
                    "fixed in advance covers that; use accountant 'filter'"
                )
                raise UnpriceableError(event, accountant, reason)


def add_up(charges: Mapping[Event, int], accountant: str, curve: Callable[[Event], Any], missing: str) -> Any:
    """Add up what each release costs, a number or one for each order, where releases add up.

    Raises:
        UnpriceableError: If a release has no such curve.
    """
    total: Any = 0.0
    for event, count in charges.items():
        value = curve(event)
        if value is None:
            raise UnpriceableError(event, accountant, missing)
        total = total + count * value
    return total


@dataclass(frozen=True)
class Answer:
    """What an accountant answers: see :class:`Price`; ``accountant`` is set where another one had to answer."""

    epsilon: float
    is_bound: bool = True
    warning: str | None = None
    accountant: str | None = None
