"""Networks to train: those of the DP-Hero paper, those of the private training literature, or one of your own."""

from __future__ import annotations

from dphero.checks.rowwise import require_rowwise
from dphero.models.catalogue import MODELS, NAMES, Entry, build
from dphero.models.features import FeatureModel

__all__ = ["MODELS", "NAMES", "Entry", "FeatureModel", "build", "require_rowwise"]
