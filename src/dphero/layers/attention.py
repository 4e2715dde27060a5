"""Multi-head attention: linear projections around a product that has no parameters."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero.gradients.outer import Outer
from dphero.gradients.piece import Explicit, Piece
from dphero.layers.call import LayerCall
from dphero.layers.registry import register
from dphero.numerics.precision import as_multiplied, widened


@register(nn.MultiheadAttention)
def multihead_attention(
    call: LayerCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Tap the input projections; the output projection is a linear layer of its own."""
    module = call.module
    assert isinstance(module, nn.MultiheadAttention)
    if query.dim() != 3 or module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            f"{call.label}: the query must have a batch axis, and neither add_bias_kv nor add_zero_attn is "
            "supported in private training"
        )
    q, k, v = _project(call, query, key, value)
    if not module.batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    n, length, width = q.shape
    heads, head = module.num_heads, width // module.num_heads
    q, k, v = (x.reshape(n, x.shape[1], heads, head).transpose(1, 2) for x in (q, k, v))
    mask = _merge_masks(q, k, attn_mask, key_padding_mask, heads)
    dropout = module.dropout if module.training else 0.0
    weights: Tensor | None = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) / head**0.5
        weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
        out = weights @ v
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal and mask is None
        )
    out = out.transpose(1, 2).reshape(n, length, width)
    out = module.out_proj(out if module.batch_first else out.transpose(0, 1))
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    return out, weights


def _project(call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    bias = call.get("in_proj_bias")
    width = query.shape[-1]
    if call.get("in_proj_weight") is not None:
        weight = call["in_proj_weight"]
        if query is key and key is value:
            query = as_multiplied(query)
            out = call.tap(
                lambda: F.linear(query, weight, bias),
                lambda delta, x: _pieces(call, "in_proj_weight", delta, x, (0, 0)),
                query,
            )
            return list(out.chunk(3, dim=-1))
        parts = weight.chunk(3)
        names = ["in_proj_weight"] * 3
    else:
        names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
        parts = tuple(call[name] for name in names)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    outs = []
    for i, (name, x) in enumerate(zip(names, map(as_multiplied, (query, key, value)), strict=True)):

        def make(delta: Tensor, x: Tensor, name: str = name, i: int = i) -> dict[str, Piece]:
            return _pieces(call, name, delta, x, (i * width, (2 - i) * width))

        compute = functools.partial(F.linear, x, parts[i], biases[i])
        outs.append(call.tap(compute, make, x, role="qkv"[i]))
    return outs


def _pieces(call: LayerCall, name: str, delta: Tensor, x: Tensor, pad: tuple[int, int]) -> dict[str, Piece]:
    """Pieces of one projection; ``pad`` says where its rows lie in the joint weight and bias."""
    joint = F.pad(delta, pad) if any(pad) else delta
    pieces: dict[str, Piece] = {name: Outer(joint if name == "in_proj_weight" else delta, x)}
    if call.wants("in_proj_bias"):
        pieces["in_proj_bias"] = Explicit(widened(joint).sum(1))
    return pieces


def _merge_masks(q: Tensor, k: Tensor, attn_mask: Tensor | None, padding: Tensor | None, heads: int) -> Tensor | None:
    """Return one additive mask that broadcasts over (n, heads, queries, keys)."""

    def additive(mask: Tensor) -> Tensor:
        if mask.dtype == torch.bool:
            return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))
        return mask.to(q.dtype)

    merged = None
    if attn_mask is not None:
        merged = additive(attn_mask)
        if merged.dim() == 3:
            merged = merged.view(-1, heads, *merged.shape[1:]) if len(merged) > 1 else merged.unsqueeze(0)
    if padding is not None:
        keys = additive(padding)[:, None, None, :]
        merged = keys if merged is None else merged + keys
    return merged
