"""Drawings of a federated run: who holds what, and what each client spent."""

from __future__ import annotations

from dphero.experiments.pictures import GREY, METHOD_COLOURS
from dphero.report.figures.drawing import Drawing, layout, safe
from dphero.report.reading.runs import Run
from dphero.report.words import epsilon as shown_epsilon

_MOST_CLIENTS = 200


def partition(run: Run) -> Drawing | None:
    """Who holds what: examples of each class at each client."""
    if run.partition is None or not run.partition.clients:
        return None
    held = run.partition
    names, counts = held.clients[:_MOST_CLIENTS], held.counts[:_MOST_CLIENTS]
    heat = {
        "type": "heatmap",
        "x": [safe(f"{name}") for name in held.classes],
        "y": [f"client {name}" for name in names],
        "z": [list(row) for row in counts],
        "colorscale": [[0, "#f0f5fb"], [1, "#1f5fa8"]],
        "colorbar": {"title": {"text": "examples"}, "thickness": 12},
        "hovertemplate": "%{y}, class %{x}: %{z} examples<extra></extra>",
    }
    if len(names) * len(held.classes) <= 200:
        heat |= {"texttemplate": "%{z}"}
    drawn = layout("class", "")
    drawn["xaxis"] |= {"type": "category", "showgrid": False}
    drawn["yaxis"] |= {"type": "category", "showgrid": False, "autorange": "reversed", "title": {"text": ""}}
    lines = [[f"client {name}", *map(str, row), str(sum(row))] for name, row in zip(names, counts, strict=True)]
    return Drawing(
        f"partition-{run.name}",
        f"Who holds what: {run.name}",
        "A grid of how many examples of each class each client holds; darker is more.",
        {"data": [heat], "layout": drawn},
        ("client", *held.classes, "all"),
        lines,
        height=120 + max(20, min(30, 1200 // len(names))) * len(names),
    )


def clients(run: Run) -> Drawing | None:
    """What each client of a federated run has spent."""
    spent = (run.result or {}).get("clients")
    if not isinstance(spent, dict) or not spent:
        return None
    names = sorted(spent, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))[:_MOST_CLIENTS]
    worst = (run.result or {}).get("worst_client")
    values = [float(value) if isinstance(value := spent[name], int | float) else None for name in names]
    bars = {
        "type": "bar",
        "x": [safe(f"client {name}") for name in names],
        "y": values,
        "marker": {"color": [METHOD_COLOURS["dp-sgd"] if name == worst else GREY for name in names]},
        "hovertemplate": "%{x}: ε = %{y:.4~g}<extra></extra>",
    }
    drawn = layout("", "ε spent by the client")
    drawn["xaxis"] |= {"type": "category", "title": {"text": ""}}
    return Drawing(
        f"clients-{run.name}",
        f"What each client spent: {run.name}",
        "Bars of the privacy loss ε of each client; the one whose ε is the run's is blue, the others are grey.",
        {"data": [bars], "layout": drawn},
        ("client", "ε"),
        [[name, "∞" if value is None else shown_epsilon(value)] for name, value in zip(names, values, strict=True)],
        height=320,
        note="Blue: the worst client, whose ε is the run's." if worst in names else "",
    )
