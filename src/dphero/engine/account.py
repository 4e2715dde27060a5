"""What an engine has spent, and may spend: its ledger and its limit outlive each training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dphero.accounting import DEFAULT_FILTER_ORDER, Budget, Event, Ledger, Price, Statement, price, statement
from dphero.engine.sources import hashed_key
from dphero.mechanism.published import UNSOUND
from dphero.mechanism.release import Mechanism

logger = logging.getLogger(__name__)

_KEY_SHARED = (
    "Another run of the same process used the same key of noise (a seed, or a checkpoint continued twice). Its noise "
    "was another wherever its sums were; if both runs are published, their budgets add up."
)
_SET_ANEW = (
    "The noise was set anew after {} releases ({}; then {}). The bound holds if that was decided beforehand, or from "
    "public things. If it was decided by what had come out, composition is fully adaptive, for which this bound is not "
    "proven: only a Rényi filter that was fixed before the first release covers that."
)
_RAISED = "The limit was raised from {} to {} after releases had been made: the first limit is no longer kept."
_SEEDED = "The random seed was chosen by the user; the guarantee holds only while it stays secret."


class Account:
    """Prices what an engine has released, and keeps its limit."""

    def __init__(self, accountant: str) -> None:
        self._own_accountant = accountant
        self._ledger = Ledger()
        self._mechanism: Mechanism | None = None  # that of the training under way
        self._notes: dict[str, None] = {}
        self.budget: Budget | None = None
        self.used_keys: set[str] = set()  # hashes of the keys of noise: none may be used again

    # -- trainings come and go ----------------------------------------------------------------------------

    def require_relation(self, event: Event, sampling: str) -> None:
        """Refuse a training whose neighbours are others than those of earlier ones."""
        if self._ledger.relation not in (None, event.relation):
            raise ValueError(
                f"this engine's ledger is about neighbours under {self._ledger.relation!r}, sampling={sampling!r} is "
                f"about {event.relation!r}: their prices do not add up. Use another PrivacyEngine."
            )

    def begin(self, mechanism: Mechanism, event: Event) -> None:
        """Charge a training to this account: what makes its releases, and what each of them costs."""
        self._mechanism = mechanism
        self.used_keys |= hashed_key(mechanism.noise)
        self.budget = mechanism.budget = self.budget_for(self.accountant)
        self._note_if_set_anew(event)

    def end(self, notes: Sequence[str]) -> None:
        """The training is over; its releases and notes stay."""
        self.notes(notes)
        self._ledger, self._mechanism = self.ledger, None

    # -- what may be spent --------------------------------------------------------------------------------

    def limit(self, epsilon: float, delta: float) -> None:
        """See :meth:`dphero.PrivacyEngine.limit`."""
        assert self._mechanism is not None
        if self.accountant == "filter" and self.ledger.steps:
            raise RuntimeError('with mechanism="published" a limit must be set before the first step of this engine')
        before, self.budget = self.budget, Budget(epsilon, delta, accountant=self.accountant)
        self._mechanism.budget = self.budget
        if before is not None and self.ledger.steps and (epsilon > before.epsilon or delta > before.delta):
            note = _RAISED.format(f"({before.epsilon:g}, {before.delta:g})", f"({epsilon:g}, {delta:g})")
            logger.warning("%s", note)
            self._notes[note] = None

    def budget_for(self, accountant: str) -> Budget | None:
        """Return the limit for a training that is about to begin."""
        budget = self.budget
        if budget is None or budget.accountant == accountant or self._ledger.steps:
            return budget
        return Budget(budget.epsilon, budget.delta, accountant=accountant)

    def stricter_budget(self, saved: Sequence[Any] | None) -> Budget | None:
        """Return the smaller of the limits of a checkpoint and of this account.

        Raises:
            ValueError: If neither is the smaller one.
        """
        ours = self.budget
        if saved is None:
            return ours
        theirs = Budget(saved[0], saved[1], saved[2], filter_order=saved[3])
        if ours is None:
            return theirs
        if ours.delta != theirs.delta:
            raise ValueError(
                f"the checkpoint has limit({theirs.epsilon:g}, {theirs.delta:g}), this engine limit({ours.epsilon:g}, "
                f"{ours.delta:g}): at different δ neither is the stricter one. Load without a limit, or with that δ"
            )
        if ours.epsilon > theirs.epsilon:
            logger.info("The limit of the checkpoint, ε %g, stays: it is stricter than %g.", saved[0], ours.epsilon)
            return Budget(theirs.epsilon, theirs.delta, ours.accountant)
        return ours

    # -- what was spent -----------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """What was released so far."""
        return self._ledger if self._mechanism is None else self._mechanism.ledger

    @property
    def accountant(self) -> str:
        """How the ledger is priced: by a filter if noise depends on earlier outputs."""
        published = self._mechanism is not None and self._mechanism.mode == "published"
        return "filter" if published or any(event.adaptive for event in self.ledger.counts) else self._own_accountant

    def price(self, delta: float, accountant: str | None, *, coarse: bool) -> Price:
        """See :meth:`dphero.PrivacyEngine.price`."""
        order = self._filter.filter_order if self._filter else DEFAULT_FILTER_ORDER
        return price(self.ledger, delta, accountant or self.accountant, coarse=coarse, filter_order=order)

    def statement(self, delta: float, unit: str, notes: Sequence[str]) -> Statement:
        """Return what is protected, at what price; with what the training under way has to add."""
        made = statement(self.ledger, delta, unit=unit, accountant=self.accountant, notes=self.notes(notes))
        if self._filter and self._filter.delta == delta:
            made = replace(made, price=self._filter.guarantee(self.ledger))
        return made

    @property
    def _filter(self) -> Budget | None:
        """The Rényi filter that was set before a run whose noise depends on earlier outputs."""
        budget = self._mechanism.budget if self._mechanism is not None else None
        return budget if budget is not None and budget.accountant == "filter" else None

    def notes(self, more: Sequence[str]) -> tuple[str, ...]:
        """Return what statements say besides the price, with more of it from the training under way."""
        mechanism = self._mechanism
        if mechanism is not None:
            shared = getattr(mechanism.noise, "key_shared", False)
            found = {UNSOUND: mechanism.mode == "published", _SEEDED: mechanism.noise.seeded, _KEY_SHARED: shared}
            self._notes |= {note: None for note, holds in found.items() if holds}
            own = (mechanism.clipping.note, getattr(mechanism.noise, "note", None))
            self._notes |= dict.fromkeys(note for note in own if note)
        self._notes |= dict.fromkeys(more)
        return tuple(self._notes)

    def _note_if_set_anew(self, event: Event) -> None:
        """Note if a training releases otherwise than those before it: somebody chose that after outputs were seen."""
        names = ("noise_multiplier", "sample_rate")
        now = {name: getattr(event, name, None) for name in names}
        for earlier in self._ledger.counts:
            then = {name: getattr(earlier, name, None) for name in names}
            if type(earlier) is type(event) and then != now:
                was, is_now = ("σ {noise_multiplier}, q {sample_rate}".format(**each) for each in (then, now))
                self._notes[_SET_ANEW.format(self._ledger.steps, was, is_now)] = None

    # -- checkpoints --------------------------------------------------------------------------------------

    def state_dict(self, notes: Sequence[str]) -> dict[str, Any]:
        """Return all of this but the ledger, which is the mechanism's."""
        budget = self.budget
        return {
            "notes": list(self.notes(notes)),
            "used_keys": sorted(self.used_keys),
            "budget": budget and [budget.epsilon, budget.delta, budget.accountant, budget.filter_order],
        }

    def load_state_dict(self, state: Mapping[str, Any], budget: Budget | None) -> None:
        """Take over what a checkpoint says (an older one is silent), and the limit; its run was loaded already."""
        assert self._mechanism is not None
        self._notes = dict.fromkeys(state.get("notes", ()))
        self.used_keys = {*state.get("used_keys", ()), *hashed_key(self._mechanism.noise)}
        self.budget = self._mechanism.budget = budget
