"""The answer in a few numbers: what it costs, what that means, how well the models do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dphero.experiments.comparison.table import Row, tabulate
from dphero.report.gain import RATES, Gain, worst_gain
from dphero.report.markup import Html, join, table, tag
from dphero.report.reading.gather import Material
from dphero.report.reading.runs import Run
from dphero.report.words import Verdict, accuracy, epsilon, explain_epsilon, explain_gain, percent, setting, verdict

_MANY = 12  # settings; the table of more is folded
_PRINTED = 60  # settings that are unfolded on paper


def badge(found: Verdict) -> Html:
    """Return a verdict as a coloured word."""
    return tag("span", found.text, class_=f"badge {found.kind}", title=found.why)


def value(shown: str, exact: float | None) -> Html:
    """Return a number as it is read, with the exact one for machines."""
    return tag("span", shown, data_value=None if exact is None or not math.isfinite(exact) else repr(exact))


def summary(material: Material) -> Html:
    """Return the answer in a few numbers: what it costs, what that means, how well the model does."""
    if len(material.rows) == 1:
        return _one(material, material.rows[0])
    return _several(material)


def _one(material: Material, row: Row) -> Html:
    runs, spent = material.runs_of(row), _spent(material, row)
    gain = worst_gain(runs)
    reached, spread = _accuracy(row, runs)
    over = "" if spread is None else f"± {100 * spread:.2f} over "
    tiles = [
        _tile(
            "privacy loss",
            join("ε = ", value(epsilon(spent), spent)),
            f"at δ = {row.delta:g}",
            badge(verdict(row, runs)),
        ),
        _tile("an attacker finds at most", _found(gain, RATES[1]), _of_whom(gain)),
        _tile("test accuracy", value(accuracy(reached), reached), over + _seeds(row)),
        _tile("state", _state(row, runs), _steps(row, runs)),
    ]
    return join(
        tag("ul", *tiles, class_="tiles"),
        tag("p", explain_epsilon(row), class_="lead"),
        tag("p", explain_gain(gain)) if row.protects != "nothing" else None,
    )


def _tile(what: str, shown: str, note: str, more: Html | None = None) -> Html:
    return tag(
        "li",
        tag("span", what, class_="what"),
        tag("span", shown, class_="value"),
        tag("span", note, class_="note"),
        tag("div", more) if more is not None else None,
        class_="tile",
    )


def _several(material: Material) -> Html:
    words = None
    if any(not row.sound for row in material.rows):
        words = "Settings that are unsound as published are shown with their true ε: compare no accuracy with theirs."
    shown = outcomes(material)
    if (count := len(material.rows)) > _MANY:
        printed = count <= _PRINTED
        shown = tag("details", tag("summary", f"All {count} settings"), shown, id="all-settings", data_print=printed)
    return join(_tiles(material), None if words is None else tag("p", words, class_="lead"), shown)


def _tiles(material: Material) -> Html | None:
    """The best setting with a proof, what it gives away, what privacy costs it, and what cannot be believed."""
    proven = [
        row for row in material.rows if row.accuracy is not None and verdict(row, material.runs_of(row)).kind == "sound"
    ]
    if not proven:
        return None
    whole = [row for row in proven if row.remark == ""]  # labels alone are less than whole examples
    best = max(whole or proven, key=lambda row: row.accuracy or 0.0)
    gain = worst_gain(material.runs_of(best))
    spread = "" if best.spread is None else f"± {100 * best.spread:.2f} over {best.seeds} runs: "
    of_all = f"{spread}{_name(best)}" + (f", of {len(proven)} settings with a proven bound" if len(proven) > 1 else "")
    of_all += _rivals(best, proven)
    shown = value(accuracy(best.accuracy), best.accuracy)
    tiles = [_tile("most accurate", shown, of_all, badge(verdict(best, material.runs_of(best))))]
    if gain.curve is not None:
        note = f"{_of_whom(gain)} (true ε {epsilon(best.epsilon)})"
        tiles.append(_tile("an attacker finds at most", _found(gain, RATES[1]), note))
    free = [row for row in material.rows if row.protects == "nothing" and row.data == best.data and row.accuracy]
    if free:
        ceiling = max(free, key=lambda row: row.accuracy or 0.0)
        lost = 100 * ((ceiling.accuracy or 0.0) - (best.accuracy or 0.0))
        note = f"of accuracy against {ceiling.label}, which reaches {accuracy(ceiling.accuracy)} without privacy"
        tiles.append(_tile("privacy costs it", f"{lost:.2f} points", note))
    unsound = [row for row in material.rows if not row.sound and row.epsilon is not None]
    if unsound:
        worst = max(unsound, key=lambda row: row.epsilon or 0.0)
        claimed = "" if worst.claimed_epsilon is None else f"claims an ε of {epsilon(worst.claimed_epsilon)}, and "
        note = f"{_name(worst)} {claimed}truly costs {epsilon(worst.epsilon)}"
        many = f"{len(unsound)} setting{'s' if len(unsound) > 1 else ''}"
        tiles.append(_tile("not to be believed", many, note, badge(verdict(worst))))
    return tag("ul", *tiles, class_="tiles")


def _rivals(best: Row, proven: Sequence[Row]) -> str:
    """Say how many others are as accurate, as far as several runs of each can tell."""
    near = 0
    for row in proven:
        if row is not best and row.data == best.data and best.spread is not None and row.spread is not None:
            near += (best.accuracy or 0.0) - (row.accuracy or 0.0) <= max(best.spread, row.spread)
    return f"; {near} of the others within one standard deviation" if near else ""


def outcomes(material: Material) -> Html:
    """Return a table of all settings: what each costs, means and reaches."""
    gains = [worst_gain(material.runs_of(row)) for row in material.rows]
    known = any(gain.curve is not None for gain in gains)
    lines = []
    for row, gain in zip(material.rows, gains, strict=True):
        spent = _spent(material, row)
        lines.append(
            [
                join(_name(row), tag("div", badge(verdict(row, material.runs_of(row))))),
                value(epsilon(spent), spent),
                value(accuracy(row.accuracy, row.spread), row.accuracy),
                *((_found(gain, RATES[1]), _found(gain, RATES[0])) if known else ()),
                _seeds(row),
            ]
        )
    found = ("found at 1 %", "found at 0.1 %") if known else ()
    headings = ("setting", "true ε", "accuracy", *found, "runs")
    meaning = "“Found at 1 %”: the most members that any attacker finds who accuses 1 % of outsiders wrongly."
    if any(gain.labels_only for gain in gains):
        meaning += " Of labels: the most exchanged labels; who was in the data is not protected."
    gone = "What an attacker could find is not known: of these runs the table alone is left, without their ledgers."
    caption = "What each setting costs, reaches and gives away" if known else "What each setting costs and reaches"
    shown = table(headings, lines, caption=caption, numbers=range(1, len(headings) - 1))
    return join(shown, tag("p", meaning if known else gone, class_="sub"))


def _name(row: Row) -> str:
    """What a row is called beside its verdict."""
    noise = "" if row.noise_multiplier is None else f", σ = {row.noise_multiplier:.4g}"
    asked = noise if row.asked_epsilon is None else f", ε = {row.asked_epsilon:g} asked"
    labels = f" ({row.remark})" if row.sound and row.protects != "nothing" and row.remark else ""
    return f"{row.label}{'' if row.protects == 'nothing' else asked}{labels}"


def _of_whom(gain: Gain) -> str:
    """What a share that an attacker finds is a share of."""
    if gain.labels_only:
        return "of exchanged labels, taking 1 in 100 others for exchanged; who was in the data is not protected"
    return "of the members, accusing 1 in 100 outsiders wrongly"


def _found(gain: Gain, rate: float) -> Html:
    if gain.curve is None:
        return tag("span", "not known", title=gain.reason)
    exact = gain.rates[rate]
    of_labels = " of labels" if gain.labels_only else ""
    return value(percent(exact) + of_labels + ("" if gain.is_bound else " (not proven)"), exact)


def _spent(material: Material, row: Row) -> float | None:
    """The ε of a row: of its finished runs, or of what the others have spent so far."""
    if row.epsilon is not None or row.protects == "nothing":
        return math.inf if row.protects == "nothing" else row.epsilon
    last = [run.metrics[-1] for run in material.runs_of(row) if run.metrics]
    spent = [line["epsilon"] for line in last if "epsilon" in line]
    return max((math.inf if each is None else float(each) for each in spent), default=None)


def _accuracy(row: Row, runs: Sequence[Run]) -> tuple[float | None, float | None]:
    if row.accuracy is not None:
        return row.accuracy, row.spread
    last = [float(run.metrics[-1]["accuracy"]) for run in runs if run.metrics]
    return (sum(last) / len(last) if last else None), None


def _seeds(row: Row) -> str:
    parts = [f"{row.seeds} run{'s' if row.seeds != 1 else ''}"] if row.seeds else []
    parts += [f"{row.failed} failed"] if row.failed else []
    parts += [f"{row.unfinished} unfinished"] if row.unfinished else []
    return ", ".join(parts)


def _state(row: Row, runs: Sequence[Run]) -> str:
    if row.failed and not row.unfinished:
        return "failed"
    if not row.unfinished:
        return "finished"
    return "in training" if any(run.metrics for run in runs) else "begun"


def _steps(row: Row, runs: Sequence[Run]) -> str:
    if row.steps is not None:
        return f"{row.steps:,.0f} steps in {row.seconds or 0:,.0f} s"
    latest = max((int(run.metrics[-1]["step"]) for run in runs if run.metrics), default=0)
    return f"{latest:,} steps so far"


def run_card(run: Run) -> Html:
    """Return one run in a few lines, for notebooks."""
    row = tabulate([run.outcome])[0]
    material = Material((run.path,), (run,), (row,), ())
    facts = [
        ["method", row.method],
        ["data, model", f"{run.recipe.data}, {run.recipe.model}"],
        ["true ε", f"{epsilon(_spent(material, row))} at δ = {row.delta:g}"],
        ["verdict", verdict(row, [run]).text],
        ["an attacker finds", explain_gain(worst_gain([run]))],
        ["test accuracy", accuracy(_accuracy(row, [run])[0])],
        ["state", f"{_state(row, [run])}, {_steps(row, [run])}"],
        ["setting", setting(run.setting)],
    ]
    return table(("what", "value"), [each for each in facts if each[1]], caption=f"run {Path(run.path).name}")
