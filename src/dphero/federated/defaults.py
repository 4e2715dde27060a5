"""Settings that work for clients, for each data set; they lie over those of centralised training.

A client holds a fraction of the data, so its lots are smaller, and its momentum begins anew in every round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "digits": {"lot": 32, "lr": 0.5, "momentum": 0.0},
    "mnist": {"lot": 256, "lr": 4.0, "momentum": 0.8},
    "fashion-mnist": {"lot": 256, "lr": 2.0, "momentum": 0.8},
    "cifar10": {"lot": 256, "lr": 1.0, "momentum": 0.5},
}
"""By data set."""
