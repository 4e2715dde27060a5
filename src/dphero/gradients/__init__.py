"""Per-example gradients that are not formed unless that is cheaper: their norms and weighted sums."""

from dphero.gradients.outer import Bias, Outer
from dphero.gradients.piece import Explicit, Piece
from dphero.gradients.rows import Rows

__all__ = ["Bias", "Explicit", "Outer", "Piece", "Rows"]
