"""The report's figures as plotly objects, for notebooks.

Each function takes what :func:`dphero.report.read` returns (or one run of it), and returns a
``plotly.graph_objects.Figure``; it raises ``ValueError`` where there is nothing to draw.

Example:
    >>> from dphero.report import figures, read  # doctest: +SKIP
    >>> figures.frontier(read(["comparisons/mnist"]))  # doctest: +SKIP
"""

from __future__ import annotations

import copy
from typing import Any

from dphero.report.figures import federated, outcomes, over_time, trials
from dphero.report.figures.drawing import Drawing
from dphero.report.reading.gather import Material
from dphero.report.reading.runs import Run

__all__ = [
    "accuracy", "budget", "claims", "clients", "diagnostics", "frontier", "gain", "partition", "seeds",
]  # fmt: skip


def gain(material: Material) -> Any:
    """Draw the best true-positive rate that any attack can have, at each false-positive rate."""
    return _figure(over_time.gain(material), "no run has a ledger that can be priced")


def budget(material: Material) -> Any:
    """Draw the privacy loss spent over the training."""
    return _figure(over_time.budget(material), "no private run was evaluated yet")


def accuracy(material: Material) -> Any:
    """Draw test accuracy over the training, means and spread over the seeds."""
    return _figure(over_time.accuracy(material), "no run was evaluated yet")


def diagnostics(material: Material) -> Any:
    """Draw training losses and clipped shares: private, they were computed without noise."""
    return _figure(over_time.diagnostics(material), "no run has a training loss on record")


def frontier(material: Material) -> Any:
    """Draw test accuracy against ε."""
    return _figure(outcomes.frontier(material), "a frontier takes two finished settings or more")


def seeds(material: Material) -> Any:
    """Draw the accuracy of every run beside the mean of its setting."""
    return _figure(
        outcomes.seeds(material), "it takes a setting with two finished runs or more, and at most 30 settings"
    )


def claims(material: Material) -> Any:
    """Draw claimed, true and audited ε."""
    return _figure(trials.claims(material), "no run was audited, and no method makes a claim of its own")


def partition(run: Run) -> Any:
    """Draw who holds what in a simulated federation."""
    return _figure(federated.partition(run), f"{run.path} is no simulated federated run")


def clients(run: Run) -> Any:
    """Draw what each client of a federated run has spent."""
    return _figure(federated.clients(run), f"{run.path} is no finished federated run")


def _figure(drawing: Drawing | None, missing: str) -> Any:
    """Return a plotly figure with a legend and a title of its own."""
    if drawing is None:
        raise ValueError(f"there is nothing to draw: {missing}")
    try:
        import plotly.graph_objects as graph_objects
    except ImportError as error:
        raise ImportError(f"figures need plotly ({error}): pip install 'dphero[report]'") from error
    spec = copy.deepcopy(drawing.spec)
    spec["layout"] |= {"title": {"text": drawing.title}, "height": drawing.height + 80, "template": "none"}
    spec["layout"]["margin"] |= {"t": 60}
    return graph_objects.Figure(spec)
