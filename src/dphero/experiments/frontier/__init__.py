"""The frontier: recipes of the best honest figures, the figures, and what was published."""

from __future__ import annotations

from dphero.experiments.frontier.recipes import NAMES, described, named
from dphero.experiments.frontier.table import Figure, Measured, figures

__all__ = ["NAMES", "Figure", "Measured", "described", "figures", "named"]
