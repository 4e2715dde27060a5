"""Embeddings: rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from dphero.layers.registry import register
from dphero.pieces import Piece, Rows

if TYPE_CHECKING:
    from dphero.taps import Call

__all__ = ["embedding"]


@register(nn.Embedding)
def embedding(call: Call, index: Tensor) -> Tensor:
    """Tap an embedding; the padding row gets no gradient."""
    module = call.module
    assert isinstance(module, nn.Embedding)

    def make(delta: Tensor, index: Tensor) -> dict[str, Piece]:
        index = index.reshape(len(index), -1)
        delta = delta.reshape(len(delta), -1, delta.shape[-1])
        if module.padding_idx is not None:
            delta = delta * (index != module.padding_idx).unsqueeze(-1)
        return {"weight": Rows(index, delta, module.num_embeddings)}

    return call.tap(lambda: F.embedding(index, call["weight"], module.padding_idx), make, index)
