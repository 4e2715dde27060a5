"""The privacy statement: what a run promises, to whom, and what it does not, in plain words."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dphero.accounting.accountants import price
from dphero.accounting.events.base import Event, Relation
from dphero.accounting.ledger import Ledger
from dphero.accounting.prices import DEFAULT_FILTER_ORDER, Price

UNSOUND_AS_PUBLISHED = "unsound as published"
"""A note with these words (in any case) labels the whole statement with them."""

_NEIGHBOURS: Mapping[Relation, str] = {
    "add_or_remove": "one of them is the other with {unit} added or removed",
    "zero_out": "one of them is the other with {unit} contributing nothing, the number of records public",
    "replace_one": "one of them is the other with {unit} exchanged for any other",
    "replace_label": "one of them is the other with {unit} exchanged for any other, all inputs the same",
}

_ACCOUNTANTS: Mapping[str, str] = {
    "pld": "privacy-loss distributions",
    "rdp": "Rényi divergences",
    "zcdp": "zero-concentrated privacy",
    "gdp": "Gaussian privacy",
    "filter": "a Rényi filter at one order fixed in advance",
    "pure": "the sum of pure losses, which hold at delta 0 and so at every delta",
}

_NOT_COVERED = (
    "hyperparameter search: every run on the same data spends its own budget, also a run that is thrown away",
    "choices made from the data outside the recorded releases (stopping, model, features, clip bounds)",
    "preprocessing and statistics released without noise (normalisation, vocabularies, the data's size)",
    "attacks on floating-point arithmetic: what is released lies on the grid of the model's own number format",
)


@dataclass(frozen=True)
class Statement:
    """What a run promises.

    Attributes:
        price: Epsilon at delta, and how far to trust it.
        unit: What is protected.
        releases: How many noisy releases were made.
        mechanisms: What was released, one sentence per kind.
        not_covered: What the promise leaves out.
        notes: Further remarks of whoever made the run.
        label: ``"unsound as published"`` where a note says so, else ``None``.
    """

    price: Price
    unit: str
    releases: int
    mechanisms: tuple[str, ...]
    not_covered: tuple[str, ...]
    notes: tuple[str, ...]
    label: str | None

    @property
    def text(self) -> str:
        """The statement for people to read."""
        head = f"Privacy statement ({self.label.upper()})" if self.label else "Privacy statement"
        neighbours = _NEIGHBOURS[self.price.relation].format(unit=self.unit)
        lines = [
            head,
            f"Protected unit: {self.unit}.",
            f"Neighbouring data sets: two data sets are neighbours if {neighbours} ({self.price.relation}).",
            *(f"Mechanism: {sentence}" for sentence in self.mechanisms),
            f"Number of noisy releases: {self.releases}.",
            f"Privacy loss: {self._loss}",
            f"Accountant: {_ACCOUNTANTS[self.price.accountant]} ({self.price.accountant}).",
        ]
        if self.price.warning:
            lines.append(f"Warning: {self.price.warning}.")
        lines.append("Not covered:")
        lines.extend(f"  - {item}" for item in self.not_covered)
        if self.notes:
            lines.append("Notes:")
            lines.extend(f"  - {note}" for note in self.notes)
        return "\n".join(lines)

    @property
    def _loss(self) -> str:
        epsilon, delta = self.price.epsilon, self.price.delta
        if math.isinf(epsilon):
            return f"unbounded (epsilon infinite at delta {delta:g}): nothing is guaranteed."
        standing = "a proven upper bound" if self.price.is_bound else "an approximation or claim, NOT a proven bound"
        shown = f"{round_up(epsilon):.4f}".rstrip("0").rstrip(".")  # not by significant digits, which could shrink it
        meaning = (
            "Between neighbours the probability of any outcome changes at most by the factor e^epsilon, "
            f"apart from a probability of {delta:g}."
        )
        return f"epsilon = {shown} at delta = {delta:g}, {standing}." + (f" {meaning}" if self.price.is_bound else "")

    def as_dict(self) -> dict[str, Any]:
        """Everything in plain values, the text included."""
        values = asdict(self)
        return {**values.pop("price"), **values, "text": self.text}

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """The statement in a notebook; one that is unsound stands out."""
        head, *lines = self.text.splitlines()
        colour = "#a53a0d" if self.label else "inherit"
        return (
            f'<div><strong style="color:{colour}">{html.escape(head)}</strong>'
            f'<pre style="white-space:pre-wrap">{html.escape(chr(10).join(lines))}</pre></div>'
        )


def statement(
    ledger: Ledger,
    delta: float,
    *,
    unit: str = "one training example",
    accountant: str = "pld",
    notes: Iterable[str] = (),
    filter_order: float = DEFAULT_FILTER_ORDER,
) -> Statement:
    """State what the releases in ``ledger`` promise, and what not; they are priced as by ``price``.

    ``unit`` is what one record of the data stands for. A note that contains "unsound as published" labels the whole
    statement so.
    """
    notes = tuple(notes)
    unsound = any(UNSOUND_AS_PUBLISHED in note.lower() for note in notes)
    return Statement(
        price=price(ledger, delta, accountant, filter_order=filter_order),
        unit=unit,
        releases=ledger.steps,
        mechanisms=tuple(_mechanisms(ledger.counts)),
        not_covered=_NOT_COVERED,
        notes=notes,
        label=UNSOUND_AS_PUBLISHED if unsound else None,
    )


def round_up(value: float, digits: int = 4) -> float:
    """``value`` to ``digits`` decimals, never below it: a price must not shrink in print."""
    rounded = round(value, digits)
    return rounded if rounded >= value else round(rounded + 10**-digits, digits)


def _mechanisms(counts: Mapping[Event, int]) -> Iterable[str]:
    by_kind: dict[type[Event], list[Event]] = {}
    for event in counts:
        by_kind.setdefault(type(event), []).append(event)
    for kind, events in by_kind.items():
        releases = sum(counts[event] for event in events)
        values = ", ".join(_values(field.name, events) for field in fields(kind))
        yield f"{kind.title}, {releases} releases ({values}). {kind.sampling}"


def _values(name: str, events: list[Event]) -> str:
    values = [getattr(event, name) for event in events]
    low, high = min(values), max(values)
    spread = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return f"{name.replace('_', ' ')} {spread}"
