"""Whiten and colour: the linear maps that shape clipping and noise."""

from dphero.geometry.dense import Dense
from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Geometry, identity
from dphero.geometry.low_rank import LowRank

__all__ = ["Dense", "Diagonal", "Factor", "Geometry", "LowRank", "Scalar", "identity"]
