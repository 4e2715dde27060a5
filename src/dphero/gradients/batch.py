"""The per-example gradients of one physical batch, as pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dphero.geometry.geometry import Geometry
from dphero.gradients.piece import Piece

PieceMaker = Callable[..., dict[str, Piece]]
"""``(output_gradient, *saved) -> {parameter name: piece}``, every tensor with the batch axis first."""


@dataclass
class GradientBatch:
    """The per-example gradients of one physical batch.

    Attributes:
        rows: Number of examples n.
        pieces: One piece for each parameter that the backward pass reached.
        square_norms: ‖A⁻¹ g_i‖² of each of them, of shape ``(n,)``.
        geometry: A, by name: the mapping in which these norms were taken.
        recorded: Whether they lie in the memory of a recording, which stays.
    """

    rows: int
    pieces: dict[str, Piece]
    square_norms: dict[str, Tensor]
    geometry: Mapping[str, Geometry] | None = None
    recorded: ClassVar[bool] = False

    def stacked_norms(self) -> Tensor:
        """Return the square norms of all parameters, in their order, of shape ``(parameters, n)``."""
        return torch.stack(list(self.square_norms.values()))

    def weighted_sums(
        self, weights: Mapping[str, Tensor], keep: Tensor | None, *, final: bool = False
    ) -> dict[str, Tensor]:
        """Return Σ_i weights_i g_i of each parameter, over the examples that ``keep`` names (``None``: over all).

        If these sums are ``final``, each piece is gone as soon as it is summed, and its memory is free for the next.
        """
        found = {}
        for name in list(self.pieces):
            piece = self.pieces.pop(name) if final else self.pieces[name]
            found[name] = (piece if keep is None else piece.take(keep)).weighted_sum(weights[name])
        return found
