"""What a server accepts: updates of the right shape, finite, and not absurdly long. All else is rejected by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


def problem_with(update: Arrays, model: Arrays, weight: float, steps: int, *, max_norm: float) -> str | None:
    """Return why an update cannot be averaged, or ``None`` if it can.

    The rule looks at one update at a time, so one client cannot have another one rejected.

    Args:
        update: A client's model after its training.
        model: The global model that it began with.
        weight: Its weight in the average.
        steps: Of how many steps it is made.
        max_norm: The longest step away from the global model, in multiples of that model's length (at least 1).
    """
    if missing := sorted(model.keys() - update.keys()):
        return f"it lacks {', '.join(missing[:3])}"
    if unknown := sorted(update.keys() - model.keys()):
        return f"it has {', '.join(unknown[:3])}, which the model has not"
    for name, value in update.items():
        if value.shape != model[name].shape:
            return f"{name} has shape {value.shape} instead of {model[name].shape}"
        if value.dtype != model[name].dtype:
            return f"{name} has type {value.dtype} instead of {model[name].dtype}"
        if not np.isfinite(value).all():
            return f"{name} holds NaN or infinity"
    if not (isinstance(weight, int | float) and math.isfinite(weight) and weight > 0):
        return f"its weight is {weight!r}"
    if steps < 1:
        return f"it is made of {steps} steps"
    limit = max_norm * max(1.0, _norm(model.values()))
    length = _norm(value.astype(np.float64) - model[name].astype(np.float64) for name, value in update.items())
    if not length <= limit:
        return f"it moves the model by {length:.3g}, and at most {limit:.3g} is accepted"
    return None


def _norm(values: Iterable[NDArray[Any]]) -> float:
    return math.sqrt(sum(float(np.square(value.astype(np.float64)).sum()) for value in values))
