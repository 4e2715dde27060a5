"""Verdicts, numbers and sentences, the same ones wherever the page shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dphero.accounting.statement import round_up
from dphero.experiments.comparison.table import Row, shown_price
from dphero.report.gain import RATES, Gain
from dphero.report.reading.runs import Run

_TELLING = 100.0  # factors above this are no comfort
_NOBODY = 50.0  # an ε above this limits nothing that could be observed


@dataclass(frozen=True)
class Verdict:
    """What a promise is worth, in a word.

    Attributes:
        kind: ``sound``, ``unproven``, ``unsound``, ``refuted`` or ``open``: the class of its colour.
        text: For people.
        why: A sentence more.
    """

    kind: str
    text: str
    why: str


def verdict(row: Row, runs: Sequence[Run] = ()) -> Verdict:
    """Return the verdict on the ε of a row, audits of its runs included."""
    if any(run.audit is not None and run.audit.get("refuted") is True for run in runs):
        also = "" if row.sound else "unsound as published, "
        return Verdict("refuted", f"{also}refuted by an audit", "An attack found more than the printed ε allows.")
    if row.protects == "nothing":
        return Verdict("open", "not private", "This training adds no noise and promises nothing.")
    if not row.sound:
        why = "The claim of its paper is wrong; the true ε is that of the weakest direction of its noise."
        return Verdict("unsound", "unsound as published", why)
    if row.epsilon is None:
        return Verdict("open", "not finished", "The promise is made when the run is finished.")
    if math.isinf(row.epsilon):
        return Verdict("unsound", "nothing guaranteed", "The privacy loss is unbounded.")
    if row.is_bound is False:
        return Verdict("unproven", "not a proven bound", "Its statement says what the number rests on.")
    return Verdict("sound", "proven bound", "The privacy loss is at most this: an upper bound with a proof.")


def epsilon(value: float | None) -> str:
    """Return a price, rounded up."""
    return shown_price(value) or "–"


def percent(value: float, digits: int = 2) -> str:
    """Return a share in percent, rounded up: what is gained must not shrink in print."""
    return f"{min(round_up(100 * value, digits), 100.0):.{digits}f} %"


def accuracy(mean: float | None, spread: float | None = None) -> str:
    """Return an accuracy in percent, with its spread over the seeds."""
    if mean is None:
        return "–"
    return f"{100 * mean:.2f} %" if spread is None else f"{100 * mean:.2f} ± {100 * spread:.2f} %"


def explain_epsilon(row: Row) -> str:
    """Say in plain words what an ε means."""
    unit = row.protects
    if unit == "nothing":
        return "Nothing is promised to anybody: whoever sees the model may learn anything about the training data."
    if row.epsilon is None:
        return f"The run is not finished. When it is, its statement says what is promised to {unit}."
    if math.isinf(row.epsilon):
        return f"Nothing is promised to {unit}: whoever sees the model may learn everything about it."
    if not row.sound:
        large, unproven = ", which protects nobody in practice", ", and that is no proven bound"
        meaning = large if row.epsilon > _NOBODY else "" if row.is_bound else unproven
        return (
            f"UNSOUND AS PUBLISHED: privacy is claimed for {unit}, and the claim does not hold. The true ε is "
            f"{epsilon(row.epsilon)}{meaning}."
        )
    factor = math.exp(row.epsilon) if row.epsilon < 50 else math.inf
    times = f"a factor of {round_up(factor, 2 if factor < 100 else 0):,g}" if factor < 1e6 else "an astronomical factor"
    large = " So large a factor says little; what an attacker could gain says more." if factor > _TELLING else ""
    standing = "" if row.is_bound else " This is what its accountant charges, not a proven bound."
    return (
        f"What the model, and all that was released while it was trained, can tell about {unit} is limited: the "
        f"probability of any outcome is the same with it and without it, up to {times} (e^ε), apart from a "
        f"probability of δ = {row.delta:g}.{large}{standing}"
    )


def explain_gain(gain: Gain) -> str:
    """Say in plain words what an attacker could gain."""
    if gain.curve is None:
        return f"What an attacker could gain is not known: {gain.reason}."
    few, more = (gain.rates[rate] for rate in RATES)
    if few >= 0.995:
        return "Nothing stops an attacker: a test that finds every member without a false alarm is not ruled out."
    standing = "at most" if gain.is_bound else "about"
    if gain.labels_only:
        return (
            f"Labels alone are protected: who was in the data is not. An attacker who knows every record, and suspects "
            f"one label of being another, finds {standing} {percent(few)} of such exchanges if one unchanged label in "
            f"1,000 may be taken for exchanged, and {standing} {percent(more)} if one in 100 may. Blind guessing finds "
            "0.1 % and 1 %."
        )
    return (
        f"An attacker who knows everything but whether one record was used, and sees all that was released, finds "
        f"{standing} {percent(few)} of the members if one outsider in 1,000 may be accused wrongly, and {standing} "
        f"{percent(more)} if one in 100 may. Blind guessing finds 0.1 % and 1 %."
    )


def setting(values: Mapping[str, Any]) -> str:
    """Return settings as one text."""
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )
