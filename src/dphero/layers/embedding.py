"""Embeddings: rows of a table, alone or in bags."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero.gradients.piece import Piece
from dphero.gradients.rows import Rows
from dphero.layers.call import LayerCall
from dphero.layers.registry import register


@register(nn.Embedding)
def embedding(call: LayerCall, input: Tensor) -> Tensor:
    """Tap an embedding; the padding row gets no gradient."""
    module = call.module
    assert isinstance(module, nn.Embedding)
    return _look_up(call, input, module.num_embeddings, module.padding_idx)


@register(nn.EmbeddingBag)
def embedding_bag(
    call: LayerCall, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> Tensor:
    """Tap bags of equal length: an embedding, then a sum, mean or maximum over each bag without its padding."""
    module, index = call.module, input
    assert isinstance(module, nn.EmbeddingBag)
    if index.dim() != 2 or offsets is not None:
        raise ValueError(
            f"{call.label}: bags given by offsets are not supported in private training; give indices of shape "
            "(batch, length), with padding_idx for shorter bags"
        )
    rows = _look_up(call, index, module.num_embeddings, module.padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    kept = torch.ones_like(index, dtype=torch.bool) if module.padding_idx is None else index != module.padding_idx
    kept = kept.unsqueeze(-1)
    if module.mode == "max":
        return rows.masked_fill(~kept, float("-inf")).amax(1).masked_fill(~kept.any(1), 0.0)
    total = rows.masked_fill(~kept, 0.0).sum(1)
    return total if module.mode == "sum" else total / kept.sum(1).clamp(min=1)


def _look_up(call: LayerCall, index: Tensor, rows: int, padding: int | None) -> Tensor:
    def make(delta: Tensor, index: Tensor) -> dict[str, Piece]:
        index = index.reshape(len(index), -1)
        delta = delta.reshape(len(delta), -1, delta.shape[-1])
        if padding is not None:
            delta = delta * (index != padding).unsqueeze(-1)
        return {"weight": Rows(index, delta, rows)}

    return call.tap(lambda: F.embedding(index, call["weight"], padding), make, index)
