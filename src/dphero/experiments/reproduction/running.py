"""Reproduces one item: trains what is missing, then draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dphero.experiments.comparison.grid import check
from dphero.experiments.comparison.plan import Planned, load_plan
from dphero.experiments.comparison.sweep import Outcome, Standing, sweep
from dphero.experiments.plots import require_matplotlib
from dphero.experiments.reproduction.items import find
from dphero.experiments.reproduction.report import Report, save
from dphero.experiments.reproduction.settings import Size


@dataclass(frozen=True)
class Reproduced:
    """What was done.

    Attributes:
        item: Its name.
        size: How large.
        report: What was found.
        files: What was written.
        failed: Why runs failed, by their names.
    """

    item: str
    size: Size
    report: Report
    files: tuple[Path, ...]
    failed: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "item": self.item,
            "size": self.size,
            "files": [str(path) for path in self.files],
            "failed": self.failed,
            "rows": [dict(row) for row in self.report.rows],
            "notes": list(self.report.notes),
        }


def reproduce(
    name: str,
    out: Path,
    *,
    size: Size = "quick",
    runs: Path | None = None,
    workers: int | None = None,
    report: Callable[[Standing], None] = lambda standing: None,
) -> Reproduced:
    """Reproduce one item of the paper.

    Its runs are ordinary run directories under ``RUNS/ITEM-SIZE/``: started again, finished ones are kept and the
    others go on. Pictures, tables and the data behind them are written to ``out``.

    Args:
        name: The item, one of :data:`~dphero.experiments.reproduction.items.ITEMS`.
        out: Where pictures and tables go.
        size: How large.
        runs: Where the runs are kept; ``out/runs`` unless given.
        workers: Runs at a time; by cores and GPU unless given.
        report: Told where things stand.

    Raises:
        ValueError: If there is no such item, its data is missing, or the runs' directory holds another plan.
        Interrupted: If the process was asked to stop. All runs were saved.
        ImportError: If matplotlib is missing; nothing was trained then.
    """
    item = find(name)
    require_matplotlib()
    plan = item.plan(size)
    found: list[Outcome] = []
    if plan:
        check(plan)
        folder = (runs or out / "runs") / f"{name}-{size}"
        _require_same(plan, folder)
        found = sweep(plan, folder, workers=workers, report=report)
    out.mkdir(parents=True, exist_ok=True)
    made = item.present(found, size, out)
    about = {"item": name, "title": item.title, "paper": item.paper, "shows": item.shows, "size": size}
    save(made, about, out, name)
    files = tuple(path for kind in ("png", "svg", "csv", "json", "md") if (path := out / f"{name}.{kind}").exists())
    return Reproduced(name, size, made, files, {o.planned.name: o.error for o in found if o.error is not None})


def _require_same(plan: list[Planned], folder: Path) -> None:
    """Refuse to go on with runs that were planned differently."""
    if (folder / "plan.json").exists() and load_plan(folder) != plan:
        raise ValueError(f"{folder} holds runs that an earlier version planned otherwise: move it away, or give --runs")
