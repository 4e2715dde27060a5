"""A picture of the frontier."""

from __future__ import annotations

from pathlib import Path

from dphero.experiments.frontier.table import Figure, figures
from dphero.experiments.pictures import GREY, METHOD_COLOURS, figure_of
from dphero.experiments.plots import require_matplotlib


def draw(path: Path) -> None:
    """Draw the best figures measured here and those published, a panel for each data set; the suffix says the format.

    Raises:
        ImportError: If there is no matplotlib.
    """
    require_matplotlib()
    panels: dict[str, list[Figure]] = {}
    for each in figures():
        panels.setdefault(each.data + (", synthetic prior" if each.prior else ""), []).append(each)
    figure, axes = figure_of(3.2 * len(panels), 3.4, columns=len(panels))
    for axis, (name, rows) in zip(axes.flat, panels.items(), strict=True):
        published = [row.published for row in rows]
        axis.plot([row.epsilon for row in rows], published, "s--", color=GREY, label="best published")
        ours = [(row.epsilon, row.ours) for row in rows if row.ours is not None]
        axis.errorbar(
            [epsilon for epsilon, _ in ours],
            [found.accuracy for _, found in ours],
            yerr=[found.spread for _, found in ours],
            fmt="o",
            capsize=3,
            color=METHOD_COLOURS["dp-hero"],
            label="measured here",
        )
        axis.set_title(name)
        axis.set_xlabel("ε, δ = 1e-5")
        axis.set_xticks([row.epsilon for row in rows])
    axes.flat[0].set_ylabel("test accuracy in %")
    figure.legend(*axes.flat[-1].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path)
