"""Per-example gradients that are not formed unless that is cheaper: their norms and weighted sums."""

from dphero.gradients.pieces import Bias, Explicit, Outer, Piece, Rows

__all__ = ["Bias", "Explicit", "Outer", "Piece", "Rows"]
