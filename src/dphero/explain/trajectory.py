"""How closely a private training tracks one without privacy that began with the same weights.

With w₀ where both began, w the private run and v the other after as many epochs:

``distance``  ‖w − v‖ / ‖v − w₀‖: 0 on the same path; 1 as far off as one that has not moved
``cosine``    of w − w₀ and v − w₀: whether it moves in the same direction, however far
``length``    ‖w − w₀‖ / ‖v − w₀‖: how far it moves
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dphero.explain.runs import ExplainedRun


def trajectories(runs: Sequence[ExplainedRun]) -> list[dict[str, Any]]:
    """Return the figures for each private run, each run without privacy that began alike, and each epoch of both."""
    found = []
    for reference in (run for run in runs if not run.is_private):
        for run in (each for each in runs if each.is_private):
            epochs = sorted(set(run.snapshots) & set(reference.snapshots))
            if not epochs or epochs[0] != 0.0:
                continue
            start = _vector(reference.snapshot(0.0).weights)
            own_start = _vector(run.snapshot(0.0).weights)
            if start.shape != own_start.shape or not torch.equal(start, own_start):
                continue
            for epoch in epochs[1:]:
                path, other = (_vector(each.snapshot(epoch).weights) for each in (run, reference))
                about = {"run": run.name, "group": run.group, "reference": reference.name, "epoch": epoch}
                found.append({**about, **compare_paths(start, path, other)})
    return found


def compare_paths(start: Tensor, path: Tensor, other: Tensor) -> dict[str, float | None]:
    """Return distance, cosine and length of one set of weights against another, from where both began."""
    mine, theirs = path - start, other - start
    length = float(theirs.norm())
    if length == 0:
        return {"distance": None, "cosine": None, "length": None}
    cosine = float(mine @ theirs) / (float(mine.norm()) * length) if float(mine.norm()) > 0 else None
    return {"distance": float((mine - theirs).norm()) / length, "cosine": cosine, "length": float(mine.norm()) / length}


def _vector(weights: Mapping[str, Tensor]) -> Tensor:
    """All weights as one vector, in the order of their names."""
    values = [value.double().flatten() for _, value in sorted(weights.items()) if value.is_floating_point()]
    return torch.cat(values)
