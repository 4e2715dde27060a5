"""The ε that a finished run printed, against its own ledger: priced anew, twice, and counted against its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dphero._files import DamagedFile
from dphero.accounting import IndividualFilter, RandomisedLabels, ShuffledFilter, price
from dphero.accounting.events.filters import WHOLE_ORDERS
from dphero.accounting.prices import DEFAULT_FILTER_ORDER
from dphero.audit.laws.independent_price import independent_epsilon, price_check
from dphero.experiments import RunDirectory

_ROUNDING = 1e-3  # relative: grids of other versions of the accountants
_PAID_ONCE = (IndividualFilter, ShuffledFilter, RandomisedLabels)  # events that stand for any number of steps


@dataclass(frozen=True)
class RunLedger:
    """What a run says of itself, and what its ledger says of it.

    Attributes:
        printed_epsilon: ε as it was printed, at
        delta: δ.
        accountant: How it was priced.
        steps: How many steps the run took.
        ledger_epsilon: What the ledger costs at δ, by the same accountant. By a filter, at the order where that is
            least: the run does not tell which one it had fixed.
        releases: How many releases the ledger holds.
        problems: What does not agree.
        independent_epsilon: What the ledger costs by dp-accounting alone; ``None`` where that has no price for it.
    """

    printed_epsilon: float
    delta: float
    accountant: str
    steps: int
    ledger_epsilon: float
    releases: int
    problems: tuple[str, ...] = ()
    independent_epsilon: float | None = None

    @property
    def refuted(self) -> bool:
        """Whether the run's word and its ledger disagree."""
        return bool(self.problems)

    @property
    def sentence(self) -> str:
        """All of it, for people."""
        printed, costs = (
            "infinite" if math.isinf(each) else f"{each:.4g}" for each in (self.printed_epsilon, self.ledger_epsilon)
        )
        alone = "" if self.independent_epsilon is None else f" ({self.independent_epsilon:.4g} by dp-accounting alone)"
        return (
            f"the run's own claim: ε = {printed} at δ = {self.delta:g} over {self.steps} steps ({self.accountant}); "
            f"its ledger costs {costs}{alone}, entries: {self.releases}"
            + "".join(f"; {each}" for each in self.problems)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as plain values."""
        return {**vars(self), "problems": list(self.problems), "refuted": self.refuted}


def check_ledger(directory: RunDirectory) -> RunLedger:
    """Price the ledger of a finished run anew, and compare.

    Raises:
        ValueError: If the run's files are damaged, or its ledger cannot be priced as it says.
        OSError: If they cannot be read.
    """
    result, ledger = directory.result, directory.ledger
    if result is None:
        raise ValueError(f"{directory.path} is not finished: dphero train --resume {directory.path}")
    if missing := [name for name in ("epsilon", "delta", "steps", "accountant") if name not in result]:
        raise DamagedFile(directory.path / "result.json", f"it lacks {', '.join(missing)}")
    printed = math.inf if result["epsilon"] is None else float(result["epsilon"])
    steps = max([int(result["steps"]), *(int(each["step"]) for each in directory.metrics)])
    delta, accountant = float(result["delta"]), str(result["accountant"])
    filtered = accountant == "filter"
    orders = WHOLE_ORDERS if filtered else (DEFAULT_FILTER_ORDER,)
    costs = min(price(ledger, delta, accountant, filter_order=float(order)).epsilon for order in orders)
    problems = []
    if costs > printed * (1 + _ROUNDING):
        problems.append("it printed less than its ledger costs")
    elif costs < printed * (1 - _ROUNDING) and not filtered:  # of a filter, the whole size is printed
        problems.append("it printed more than its ledger costs: something is missing there")
    each_step = not any(isinstance(event, _PAID_ONCE) for event in ledger.counts)
    if each_step and ledger.steps < steps:
        problems.append(f"{steps - ledger.steps} of its {steps} steps are not on its ledger")
    if not problems and price_check(ledger, delta, printed).refuted:
        problems.append("it printed less than dp-accounting alone finds")
    other = independent_epsilon(ledger, delta)
    return RunLedger(printed, delta, accountant, steps, costs, ledger.steps, tuple(problems), other)
