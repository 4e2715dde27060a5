"""Pieces, geometries and functions that tests of row form share."""

from __future__ import annotations

import torch
from torch import Tensor

from dphero.geometry.dense import Dense
from dphero.geometry.diagonal import Diagonal
from dphero.geometry.geometry import Geometry
from dphero.geometry.low_rank import LowRank
from dphero.gradients.convolution import conv_piece
from dphero.gradients.outer import Outer
from dphero.gradients.patches import convolution_arguments
from dphero.gradients.piece import Explicit, Piece

MIXED = ["low rank", "strong", "dense", "right", "both", "flat"]


def mixing(kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Geometry:
    """Return a geometry whose inverse does more than to scale rows."""
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    draw = torch.Generator().manual_seed(3)

    def basis(size: int) -> Tensor:
        return torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))[0]

    dense = Dense(basis(rows), torch.rand(rows, generator=draw) + 0.2)
    if kind == "low rank":
        made = Geometry(shape, left=LowRank(basis(rows)[:, :3], torch.tensor([3.0, 0.5, 2.0]), 1.0))
    elif kind == "strong":
        made = Geometry(shape, left=LowRank(basis(rows)[:, :3], torch.tensor([300.0, 20.0, 2.0]), 0.5))
    elif kind == "dense":
        made = Geometry(shape, left=dense)
    elif kind == "flat":
        made = Geometry(shape, flat=Diagonal(torch.rand(rows * columns, generator=draw) + 0.2))
    else:
        right = LowRank(basis(columns)[:, :4], torch.tensor([3.0, 0.5, 2.0, 7.0]), 1.0)
        made = Geometry(shape, left=dense if kind == "both" else None, right=right)
    return made.to(dtype=dtype)


def pieces(positions: int) -> dict[str, Piece]:
    torch.manual_seed(1)
    x, delta = torch.randn(6, 4, positions, positions), torch.randn(6, 8, positions, positions)
    weight = torch.empty(8, 4, 3, 3)
    convolution = conv_piece(x, delta, convolution_arguments(weight, 1, 1, 1, 1))
    outer = Outer(torch.randn(6, positions, 8), torch.randn(6, positions, 36))
    explicit = Explicit(torch.randn(6, 8, 4, 3, 3))
    return {"convolution": convolution, "outer": outer, "explicit": explicit}
