"""A budget: refuses the step that would exceed (epsilon, delta) before it is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from dphero import _checks as checks
from dphero.accounting.accountants import price
from dphero.accounting.calibration import stages
from dphero.accounting.events.base import Event
from dphero.accounting.ledger import Ledger
from dphero.accounting.numerics.search import largest_count
from dphero.accounting.prices import Price, UnpriceableError
from dphero.accounting.privacy_loss import MAX_STEPS
from dphero.accounting.renyi import filter_divergence, filter_price

_RECENT_RUNS = 8
_Cost = Callable[[int], float]


class BudgetExhausted(RuntimeError):
    """The next release would exceed the budget. Nothing was released or recorded."""


class Budget:
    """An (epsilon, delta) that a run may not exceed.

    Call ``check`` before every release. How far the budget reaches is searched once per kind of step and
    remembered, so a check costs next to nothing while the events repeat.

    Guarantee:
        If every release was checked first, the whole run is (epsilon, delta)-differentially private, provided
        that the accountant gives bounds (all but ``gdp``). With ``filter`` this covers events whose noise was
        chosen from earlier outputs: the budget is a Rényi filter whose order and size are fixed here, before
        the run.

    Args:
        epsilon: The privacy loss allowed.
        delta: The probability left out of account.
        accountant: How to price; ``filter`` for adaptive events.
        filter_order: The filter's Rényi order; by default the best one for Gaussian releases at this
            (epsilon, delta).
    """

    def __init__(
        self, epsilon: float, delta: float, accountant: str = "pld", *, filter_order: float | None = None
    ) -> None:
        self.epsilon = checks.epsilon(epsilon)
        self.delta = checks.delta(delta)
        self.accountant = accountant
        self.filter_order = _best_order(self.epsilon, self.delta) if filter_order is None else filter_order
        self.spent(Ledger())  # refuses an unknown accountant and a bad order now, not mid-run
        # Counts of events that are known to fit together. Costs grow with counts, so whatever is within them
        # fits too.
        self._fitting: dict[Event, int] = {}
        # The divergence of a ledger's finished runs, which never change: (ledger, number of runs, their sum).
        self._filtered: tuple[Ledger, int, float] | None = None

    def check(self, ledger: Ledger, next_event: Event) -> None:
        """Return if ``next_event`` may be released after what is in ``ledger``.

        Raises:
            BudgetExhausted: If the release would exceed the budget. It must then not be made.
            UnpriceableError: If the accountant cannot price it.
        """
        if self.accountant == "filter" and next_event.adaptive:
            spent = self._divergence(ledger) + filter_divergence({next_event: 1}, self.filter_order)
            fits = filter_price(spent, self.delta, self.filter_order) <= self.epsilon
        else:
            fits = self._is_known_to_fit(ledger, next_event) or self._search(ledger, next_event)
        if not fits:
            raise BudgetExhausted(
                f"the budget of epsilon {self.epsilon:g} at delta {self.delta:g} ({self.accountant}) is used "
                f"up: {ledger.steps} releases cost {self.spent(ledger).epsilon:.4g}, and one more, "
                f"{next_event}, would exceed it; stop, or start a new run with more noise or a larger budget"
            )

    def remaining_steps(self, ledger: Ledger, event: Event) -> int:
        """How many more releases of ``event`` fit, up to ``MAX_STEPS``."""
        costs = stages(partial(self._extended_price, ledger, (event,), self.accountant), self.accountant)
        return self._affordable(costs, ledger, (event,))

    def spent(self, ledger: Ledger) -> Price:
        """What ``ledger`` has cost so far, in this budget's terms."""
        return price(ledger, self.delta, self.accountant, filter_order=self.filter_order)

    def guarantee(self, ledger: Ledger) -> Price:
        """What may be promised about a run whose every release was checked by this budget.

        For adaptive events this is the whole budget, since only its size was fixed in advance; otherwise what
        was spent.
        """
        spent = self.spent(ledger)
        if spent.is_bound or self.accountant != "filter" or spent.epsilon > self.epsilon:
            return spent
        return Price(self.epsilon, self.delta, self.accountant, spent.relation, is_bound=True)

    def _is_known_to_fit(self, ledger: Ledger, event: Event) -> bool:
        fitting, counts = self._fitting, ledger.counts
        if counts.get(event, 0) + 1 > fitting.get(event, 0):
            return False
        return all(count <= fitting.get(other, 0) for other, count in counts.items())

    def _search(self, ledger: Ledger, event: Event) -> bool:
        """Whether the event fits; remembers how many more do, alone or with the events it alternates with."""
        # From quick to exact: the coarse grid serves until nothing more fits on it.
        for together in dict.fromkeys((self._alternating(ledger, event), (event,))):
            for cost in stages(partial(self._extended_price, ledger, together, self.accountant), self.accountant):
                more = self._affordable([cost], ledger, together)
                if more > 0:
                    self._fitting = dict(ledger.counts)
                    for member in together:
                        self._fitting[member] = self._fitting.get(member, 0) + more
                    return True
        return False

    @staticmethod
    def _alternating(ledger: Ledger, event: Event) -> tuple[Event, ...]:
        """The events that take turns with ``event``: those released since it was, itself included."""
        latest = [member for member, _ in ledger.runs(start=max(0, ledger.run_count - _RECENT_RUNS))]
        if event not in latest:
            return (event,)
        since = len(latest) - 1 - latest[::-1].index(event)
        return tuple(dict.fromkeys(latest[since:]))

    def _affordable(self, costs: Sequence[_Cost], ledger: Ledger, events: tuple[Event, ...]) -> int:
        """How many times all ``events`` together can still be released."""
        guess = 1
        if self.accountant == "pld":
            with suppress(UnpriceableError):  # Rényi divergences are quick, and point near the answer
                quick = stages(partial(self._extended_price, ledger, events, "rdp"), "rdp")
                guess = largest_count(quick, self.epsilon, 1, MAX_STEPS, before=ledger.steps)
        return largest_count(costs, self.epsilon, guess, MAX_STEPS, before=ledger.steps)

    def _extended_price(
        self, ledger: Ledger, events: tuple[Event, ...], accountant: str, count: int, coarse: bool
    ) -> float:
        """What the ledger costs with a count of ``events`` added."""
        extended = ledger.copy()
        for event in events:
            extended.record(event, count)
        return price(extended, self.delta, accountant, coarse=coarse, filter_order=self.filter_order).epsilon

    def _divergence(self, ledger: Ledger) -> float:
        """The ledger's divergence at the filter's order; only runs new since the last call are added up."""
        known = self._filtered
        done, total = (known[1], known[2]) if known is not None and known[0] is ledger else (0, 0.0)
        for event, count in ledger.runs(start=done):
            done += 1
            last = count * filter_divergence({event: 1}, self.filter_order)
            if done < ledger.run_count:
                total += last
            else:
                self._filtered = (ledger, done - 1, total)
                return total + last
        return total


def _best_order(epsilon: float, delta: float) -> float:
    """The order at which Gaussian releases worth (epsilon, delta) convert best.

    ``1 + sqrt(ln(1/delta) / rho)`` where ``rho + 2 sqrt(rho ln(1/delta)) = epsilon``. A whole number, because
    sampled divergences are exact sums there; at least 2.
    """
    log = -math.log(delta)
    root_rho = epsilon / (math.sqrt(log + epsilon) + math.sqrt(log))
    return float(min(max(round(1 + math.sqrt(log) / root_rho), 2), 256))
