"""Whiten and colour: the linear maps that shape clipping and noise."""

from dphero.geometry.factors import Dense, Diagonal, Factor, LowRank, Scalar
from dphero.geometry.geometry import Geometry, identity

__all__ = ["Dense", "Diagonal", "Factor", "Geometry", "LowRank", "Scalar", "identity"]
