"""What can be reproduced: the paper's table, its figures, and analyses behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dphero._checks import closest
from dphero.experiments.comparison.plan import Planned
from dphero.experiments.comparison.sweep import Outcome
from dphero.experiments.reproduction.figures import (
    boxes,
    convergence,
    heterogeneity,
    linear,
    sigma,
    spectra,
    table1,
)
from dphero.experiments.reproduction.figures.curves import Curves
from dphero.experiments.reproduction.report import Report
from dphero.experiments.reproduction.settings import Size


@dataclass(frozen=True)
class Item:
    """Something in the paper that can be reproduced.

    Attributes:
        name: On the command line.
        title: In a few words.
        paper: Which table, figure or section it is there.
        shows: What ours shows, in one line of a terminal.
        minutes: How long it takes, in words, by size.
        plan: Returns the runs it needs.
        present: Draws, and returns what was found: ``present(outcomes, size, directory)``.
    """

    name: str
    title: str
    paper: str
    shows: str
    minutes: Mapping[str, str]
    plan: Callable[[Size], list[Planned]]
    present: Callable[[Sequence[Outcome], Size, Path], Report]


def _curves(made: Curves, paper: str, shows: str, quick: str, full: str) -> Item:
    return Item(made.name, made.title, paper, shows, {"quick": quick, "full": full}, made.plan, made.present)


_LINES = "SGD, DP-SGD, sound DP-Hero, published recipe"

ITEMS: Mapping[str, Item] = {
    item.name: item
    for item in (
        Item(
            "table1",
            "Accuracy beside the other systems (the paper's Table 1)",
            "Table 1",
            "each system and DP-Hero at one honest ε, beside the printed figures",
            {"quick": "5 minutes", "full": "hours; a GPU helps"},
            table1.plan,
            table1.present,
        ),
        _curves(convergence.ITERATIONS, "Figure 1", f"the first iterations: {_LINES}", "2 minutes", "half an hour"),
        _curves(convergence.EPOCHS, "Figure 2", f"accuracy by epoch: {_LINES}", "3 minutes", "hours; a GPU helps"),
        _curves(convergence.CIFAR_EPOCHS, "Figure 3", f"CIFAR-10 from scratch: {_LINES}", "3 minutes", "needs a GPU"),
        Item(
            "epsilon-boxes",
            "Test accuracy at several ε (the paper's Figure 4)",
            "Figure 4",
            "accuracies over seeds at equal honest ε",
            {"quick": "4 minutes", "full": "hours; a GPU helps"},
            boxes.plan,
            boxes.present,
        ),
        _curves(convergence.LOT_SIZES, "Figure 5", f"lots of 10 to 400: {_LINES}", "3 minutes", "an hour"),
        _curves(convergence.LEARNING_RATES, "Figure 6", f"η = 0.1 and 0.2: {_LINES}", "2 minutes", "an hour"),
        Item(
            "linear-analysis",
            "Which noise a linear classifier bears best (the paper's linear layer analysis)",
            "Linear Layer Analysis",
            "what the shape of noise does to a linear classifier, exactly",
            {"quick": "seconds", "full": "seconds"},
            linear.plan,
            linear.present,
        ),
        Item(
            "noise-spectra",
            "The shape of the noise, and what its weakest direction costs (the paper's Theorem 2)",
            "Theorem 2, Algorithm 2",
            "noise along each principal direction of the layers, and its price",
            {"quick": "1 minute", "full": "an hour"},
            spectra.plan,
            spectra.present,
        ),
        Item(
            "heterogeneity",
            "How uneven the noise may be: exponent of the rule, and scope (layer or whole model)",
            "Theorem 2, whole model",
            "accuracy over seeds at equal honest ε, by exponent and scope",
            {"quick": "4 minutes", "full": "two hours"},
            heterogeneity.plan,
            heterogeneity.present,
        ),
        Item(
            "sigma-per-iteration",
            "σ of every direction at every iteration (the paper's practical view of its parameters)",
            "Privacy Parameters",
            "the matrix of σ over directions and iterations, for each layer",
            {"quick": "1 minute", "full": "minutes on a GPU"},
            sigma.plan,
            sigma.present,
        ),
    )
}
"""Every item by its name, in the order of the paper."""


def find(name: str) -> Item:
    """Return an item.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in ITEMS:
        hint = closest(name, ITEMS, f"there are {', '.join(ITEMS)}, and all")
        raise ValueError(f"there is nothing called {name!r} to reproduce; {hint}")
    return ITEMS[name]
