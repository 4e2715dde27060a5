"""The best honest figures beside the best that were published, from logs that are kept with the project."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Measured:
    """An accuracy on test images.

    Attributes:
        accuracy: Mean over the seeds, in %.
        spread: Sample standard deviation.
        seeds: How many.
        recipe: By name, if there is one.
        log: Where it was kept, from the project's root.
    """

    accuracy: float
    spread: float
    seeds: int
    recipe: str | None
    log: str


@dataclass(frozen=True)
class Figure:
    """A place on the frontier, at δ = 1e-5.

    Attributes:
        data: Data set.
        epsilon: ε.
        prior: Whether features learned from synthetic images are allowed.
        published: The best published accuracy, in %.
        by: Whose that is.
        bar: What this project aims at.
        ours: The best that was measured here on test images, with an ε that holds; ``None`` if nothing was.
        validation: What the recipe of that name reached on training images that were held out, in one run of the search
            for its settings; it says what to expect, and is no figure to report.
        why: What a reader has to know.
    """

    data: str
    epsilon: float
    prior: bool
    published: float
    by: str
    bar: float
    ours: Measured | None
    validation: float | None
    why: str


@cache
def figures() -> tuple[Figure, ...]:
    """Return all places."""
    rows = json.loads((files(__package__) / "figures.json").read_text(encoding="utf-8"))
    return tuple(Figure(**{**row, "ours": None if row["ours"] is None else Measured(**row["ours"])}) for row in rows)
