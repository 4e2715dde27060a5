"""A comparison: a sweep, its table and its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from dphero.experiments.comparison.plan import Planned
from dphero.experiments.comparison.sweep import Outcome, Report, outcomes, sweep
from dphero.experiments.comparison.table import Row, save_table, tabulate
from dphero.experiments.plots import plot_accuracy, plot_curves, require_matplotlib
from dphero.experiments.stopping import Interrupted


def compare(
    plan: Sequence[Planned],
    directory: str | PathLike[str],
    *,
    workers: int | None = None,
    ray: str | None = None,
    report: Report = lambda standing: None,
) -> list[Row]:
    """Train all runs of a plan, write table and pictures, return rows.

    See :func:`~dphero.experiments.comparison.sweep.sweep`.

    Raises:
        ValueError: If the directory holds another plan, or somebody else works on it.
        OSError: If it cannot be written.
        Interrupted: If the process was asked to stop; table and pictures of what is finished were written.
        ImportError: If matplotlib is missing; nothing was trained then.
    """
    require_matplotlib()
    directory = Path(directory)
    try:
        found = sweep(plan, directory, workers=workers, ray=ray, report=report)
    except Interrupted:
        summarise(outcomes(plan, directory), directory)
        raise
    return summarise(found, directory)


def summarise(found: Sequence[Outcome], directory: Path) -> list[Row]:
    """Write table and pictures of what is finished, and return the table's rows."""
    rows = tabulate(found)
    save_table(rows, directory)
    plot_accuracy(rows, directory)
    plot_curves(found, directory)
    return rows
