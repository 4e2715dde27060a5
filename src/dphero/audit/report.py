"""What an audit found, all of it: for people, as JSON, and as pictures."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from dphero.audit.bounds.two_sample import Audit
from dphero.audit.laws.checks import Check
from dphero.audit.run_ledger import RunLedger
from dphero.audit.trainings.membership import Roc
from dphero.audit.trainings.one_run import OneRun
from dphero.experiments.pictures import FURTHER, GREY, METHOD_COLOURS, VERDICT_COLOURS, figure_of

_COLOURS = (METHOD_COLOURS["dp-sgd"], METHOD_COLOURS["dp-hero"], *FURTHER)  # one for each attack


@dataclass(frozen=True, eq=False)
class Report:
    """The findings about one thing.

    Attributes:
        title: What was audited.
        audits: Two-sample audits.
        one_runs: One-run audits.
        attacks: Membership inference.
        notes: What a reader must know: what was left out, and why.
        confidence: The probability with which all bounds hold together; ``None`` where each has its own.
        ledger: For a run: the ε that it printed, against its own ledger.
        checks: The parts of the mechanism that the claim rests on.
    """

    title: str
    audits: Sequence[Audit] = ()
    one_runs: Sequence[OneRun] = ()
    attacks: Sequence[Roc] = ()
    notes: Sequence[str] = ()
    confidence: float | None = None
    ledger: RunLedger | None = None
    checks: Sequence[Check] = ()

    @property
    def refuted(self) -> bool:
        """Whether any claim is refuted."""
        if self.ledger is not None and self.ledger.refuted:
            return True
        return any(each.refuted for each in self._tests)

    @property
    def _tests(self) -> list[Audit | OneRun | Check]:
        return [*self.audits, *self.one_runs, *self.checks]

    @property
    def conclusion(self) -> str:
        """All of it in one line."""
        attacks = len(self.audits) + len(self.one_runs)
        broken = [each.name for each in self._tests if each.refuted]
        if self.ledger is not None and self.ledger.refuted:
            broken.append("its own ledger")
        if broken:
            return f"REFUTED by {len(broken)} of {attacks + len(self.checks)} tests: {', '.join(broken)}"
        what = "the claims"
        if self.ledger is not None and math.isfinite(self.ledger.printed_epsilon):
            what = f"ε = {self.ledger.printed_epsilon:.4g}, δ = {self.ledger.delta:g}"
        return f"Not refuted: {attacks} attacks, {len(self.checks)} checks found nothing against {what}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "audited": self.title,
            "conclusion": self.conclusion,
            "refuted": self.refuted,
            "confidence": self.confidence,
            "ledger": None if self.ledger is None else self.ledger.as_dict(),
            "audits": [each.as_dict() for each in self.audits],
            "checks": [each.as_dict() for each in self.checks],
            "one_run": [each.as_dict() for each in self.one_runs],
            "membership": [each.as_dict() for each in self.attacks],
            "notes": list(self.notes),
        }


def save(report: Report, directory: Path, *, pictures: bool = True) -> None:
    """Write ``audit.json``, and the pictures as PNG and SVG: ``epsilons``, ``trade-off`` and ``roc``.

    Everything is drawn beside its place first: an interruption leaves what was there before.

    Raises:
        ImportError: If pictures are wanted and matplotlib is missing; ``audit.json`` is written nevertheless.
    """
    from dphero.experiments.runs.files import to_json, write_text

    directory.mkdir(parents=True, exist_ok=True)
    text = to_json(report.as_dict(), indent=2) + "\n"
    with TemporaryDirectory(prefix=".partial-", dir=directory) as beside:
        try:
            if pictures:
                _draw(report, Path(beside))
        except ImportError:
            write_text(directory / "audit.json", text, private=True)
            raise
        write_text(directory / "audit.json", text, private=True)
        for picture in sorted(Path(beside).iterdir()):
            os.replace(picture, directory / picture.name)


def _draw(report: Report, directory: Path) -> None:
    from dphero.experiments.plots import require_matplotlib, save_figure

    require_matplotlib()
    if report.audits or report.one_runs:
        save_figure(plot_epsilons(report), directory / "epsilons", private=True)
    if report.audits:
        save_figure(plot_trade_off(report.audits), directory / "trade-off", private=True)
    if report.attacks:
        save_figure(plot_roc(report.attacks), directory / "roc", private=True)


def plot_epsilons(report: Report) -> Any:
    """Draw claimed against audited ε: a sound claim stands right of its bar. Numbers stand apart, at the right."""
    rows = [(each.name, each.audited_epsilon, each.claim.epsilon, each.true_epsilon) for each in report.audits]
    rows += [(each.name, each.audited_epsilon, each.claimed_epsilon, None) for each in report.one_runs]
    figure, axes = _figure(8.5, 1.8 + 0.6 * len(rows))
    for place, (_, audited, claimed, true) in enumerate(rows):
        verdict = "refuted" if audited > claimed else "sound"
        axes.barh(place, audited, height=0.5, color=VERDICT_COLOURS[verdict])
        if np.isfinite(claimed):
            axes.plot([claimed, claimed], [place - 0.4, place + 0.4], color="black", linewidth=2.5)
        if true is not None and np.isfinite(true):
            axes.plot([true, true], [place - 0.4, place + 0.4], color="black", linewidth=2.5, linestyle=":")
        claim = "∞" if np.isinf(claimed) else f"{claimed:.2f}"
        text = f"≥ {audited:.2f}, claimed {claim}"
        axes.annotate(text, (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    for label, colour in (
        ("audited lower bound", "sound"),
        ("audited lower bound above the claim: refuted", "refuted"),
    ):
        if any((audited > claimed) == (colour == "refuted") for _, audited, claimed, _ in rows):
            axes.barh([0], [0], color=VERDICT_COLOURS[colour], label=label)
    axes.plot([], [], color="black", linewidth=2.5, label="claimed ε")
    if any(true is not None for *_, true in rows):
        axes.plot([], [], color="black", linewidth=2.5, linestyle=":", label="true ε")
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    _epsilon_scale(axes, max(value for row in rows for value in row[1:] if value is not None and np.isfinite(value)))
    axes.set_title(report.title, fontsize=10, wrap=True)
    figure.legend(fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _epsilon_scale(axes: Any, largest: float) -> None:
    """Let ε grow evenly up to 1 and by factors beyond, with numbers that people read."""
    right = max(1.5 * largest, 2.0)
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(0, right)
    ticks = [0, 0.5, *(step * 10**power for power in range(4) for step in (1, 2, 5))]
    shown = [tick for tick in ticks if tick <= right]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()
    axes.set_xlabel("ε (logarithmic above 1)")


def plot_trade_off(audits: Sequence[Audit]) -> Any:
    """Draw missed against false alarms of the attack, and the claimed curve that no attack may get below.

    A panel for each audit: curves that coincide cannot hide each other. The band holds the attack's whole curve with
    the audit's confidence (Dvoretzky, Kiefer, Wolfowitz, half of the risk for each rate).
    """
    columns = min(3, len(audits))
    count = math.ceil(len(audits) / columns)
    figure, grid = figure_of(3.6 * columns + 0.4, 3.5 * count + 0.9, count, columns, sharex=True, sharey=True)
    for axes in grid.flat[len(audits) :]:
        axes.set_visible(False)
    for axes, each in zip(grid.flat, audits, strict=False):
        roc = Roc.of(each.name, each.inside, each.outside)
        false, misses = roc.false_rates, 1 - roc.true_rates
        high, low = (
            math.sqrt(math.log(4 / (1 - each.confidence)) / (2 * len(values))) for values in (each.inside, each.outside)
        )
        attack, claim = METHOD_COLOURS["dp-sgd"], VERDICT_COLOURS["refuted" if each.refuted else "sound"]
        band = np.clip([misses - high, misses + high], 0, 1)
        edges = np.clip([false - low, false + low], 0, 1)
        whole = np.concatenate([edges[0], edges[1][::-1]]), np.concatenate([band[0], band[1][::-1]])
        spread = f"attack, {each.confidence:.0%} band"
        axes.fill(*whole, color=attack, alpha=0.18, linewidth=0, label=spread)
        axes.plot(false, misses, color=attack, linewidth=1.5, label="the attack")
        rates = np.linspace(0, 1, 500)
        label = "the claim, refuted" if each.refuted else "the claim"
        axes.plot(rates, _claimed_misses(each, rates), color=claim, linestyle="--", linewidth=1.8, label=label)
        axes.plot([0, 1], [1, 0], color=GREY, linewidth=0.8, label="guessing")
        axes.set_title(each.name, fontsize=9, wrap=True)
        axes.set_xlabel("false alarms: canary out, taken for in", fontsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel("misses: canary in, taken for out", fontsize=8)
    entries = {
        label: handle
        for axes in grid.flat[: len(audits)]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), fontsize=8, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("Trade-off curves: a sound claim lies below its attack", fontsize=11)
    return figure


def _claimed_misses(audit: Audit, false: np.ndarray) -> np.ndarray:
    """Return the smallest rate of misses that the claim allows at each rate of false alarms."""
    if audit.claim.mu is not None:
        return np.asarray(ndtr(ndtri(1 - false) - audit.claim.mu))
    epsilons, deltas = audit.claim.curve
    keep = np.isfinite(epsilons) & (epsilons < 700)
    growth, deltas = np.exp(epsilons[keep])[:, None], deltas[keep][:, None]
    lines = np.concatenate([1 - deltas - growth * false, (1 - deltas - false) / growth, np.zeros((1, len(false)))])
    return np.asarray(lines.max(0))


def plot_roc(attacks: Sequence[Roc]) -> Any:
    """Draw the attacks' curves on logarithmic axes: what counts happens at low false positive rates."""
    figure, axes = _figure(6.0, 5.2)
    lowest = min(1 / (2 * each.others) for each in attacks)
    for number, each in enumerate(attacks):
        shown = f"{each.name}: AUC {each.area:.3f}, TPR {each.true_rate():.2%} at 0.1 % FPR"
        floor = np.maximum(each.true_rates, lowest / 2)
        axes.plot(np.maximum(each.false_rates, lowest), floor, color=_COLOURS[number % len(_COLOURS)], label=shown)
    axes.plot([lowest, 1], [lowest, 1], color=GREY, linewidth=0.8, label="guessing")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("false positive rate (0 stands at the left edge)")
    axes.set_ylabel("true positive rate")
    axes.set_title("Membership inference against the released model")
    axes.legend(fontsize=8, loc="lower right")
    return figure


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure, axes = figure_of(width, height)
    return figure, axes[0][0]
