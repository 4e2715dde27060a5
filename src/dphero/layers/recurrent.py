"""Recurrent layers: the same equations as torch's own, step by step, with each projection tapped."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dphero.gradients.piece import Piece
from dphero.layers.call import LayerCall
from dphero.layers.linear import linear_pieces
from dphero.layers.registry import register


@register(nn.RNN, nn.GRU, nn.LSTM)
def recurrent(call: LayerCall, input: Tensor, hx: Any = None) -> Any:
    """Tap an RNN, GRU or LSTM: several layers, both directions, projections."""
    module, x, state = call.module, input, hx
    assert isinstance(module, nn.RNNBase)
    _require_batch(call, x, 3)
    if module.batch_first:
        x = x.transpose(0, 1)
    directions = 2 if module.bidirectional else 1
    lstm = isinstance(module, nn.LSTM)
    width = getattr(module, "proj_size", 0) or module.hidden_size
    if state is None:
        zeros = x.new_zeros(module.num_layers * directions, x.shape[1], width)
        cells = x.new_zeros(module.num_layers * directions, x.shape[1], module.hidden_size)
        state = (zeros, cells) if lstm else zeros
    hidden, cell = state if lstm else (state, None)
    last_hidden, last_cell = [], []
    for layer in range(module.num_layers):
        outs = []
        for direction in range(directions):
            suffix = f"_l{layer}" + ("_reverse" if direction else "")
            index = layer * directions + direction
            out, h, c = _direction(
                call, x, suffix, hidden[index], None if cell is None else cell[index], bool(direction)
            )
            outs.append(out)
            last_hidden.append(h)
            last_cell.append(c)
        x = torch.cat(outs, dim=-1) if directions > 1 else outs[0]
        if module.dropout and module.training and layer < module.num_layers - 1:
            x = F.dropout(x, module.dropout)
    out = x.transpose(0, 1) if module.batch_first else x
    h_n = torch.stack(last_hidden)
    return (out, (h_n, torch.stack(last_cell))) if lstm else (out, h_n)


def _direction(
    call: LayerCall, x: Tensor, suffix: str, hidden: Tensor, cell: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Any]:
    """Run one layer in one direction over (time, batch, features)."""
    module = call.module
    gates = _tapped_linear(call, x, "weight_ih" + suffix, "bias_ih" + suffix)
    outs: list[Tensor] = []
    for time in reversed(range(len(x))) if reverse else range(len(x)):
        inner = _tapped_linear(call, hidden, "weight_hh" + suffix, "bias_hh" + suffix)
        hidden, cell = _step(module, gates[time], inner, hidden, cell)
        if isinstance(module, nn.LSTM) and module.proj_size:
            hidden = _tapped_linear(call, hidden, "weight_hr" + suffix, None)
        outs.append(hidden)
    return torch.stack(outs[::-1] if reverse else outs), hidden, cell


def _step(module: nn.Module, outer: Tensor, inner: Tensor, hidden: Tensor, cell: Tensor | None) -> tuple[Tensor, Any]:
    """Return the next state from the projections of the input (outer) and of the hidden state (inner)."""
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        assert cell is not None
        i, f, g, o = (outer + inner).chunk(4, dim=-1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell
    if isinstance(module, nn.GRU | nn.GRUCell):
        (xr, xz, xn), (hr, hz, hn) = outer.chunk(3, dim=-1), inner.chunk(3, dim=-1)
        z = torch.sigmoid(xz + hz)
        return (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * hidden, None
    assert isinstance(module, nn.RNN | nn.RNNCell)
    return (torch.tanh if module.nonlinearity == "tanh" else torch.relu)(outer + inner), None


@register(nn.RNNCell, nn.GRUCell, nn.LSTMCell)
def recurrent_cell(call: LayerCall, input: Tensor, hx: Any = None) -> Any:
    """Tap one step of an RNN, GRU or LSTM."""
    module, x, state = call.module, input, hx
    assert isinstance(module, nn.RNNCellBase)
    _require_batch(call, x, 2)
    lstm = isinstance(module, nn.LSTMCell)
    if state is None:
        zeros = x.new_zeros(len(x), module.hidden_size)
        state = (zeros, zeros) if lstm else zeros
    hidden, cell = state if lstm else (state, None)
    outer = _tapped_linear(call, x, "weight_ih", "bias_ih")
    inner = _tapped_linear(call, hidden, "weight_hh", "bias_hh")
    hidden, cell = _step(module, outer, inner, hidden, cell)
    return (hidden, cell) if lstm else hidden


def _require_batch(call: LayerCall, x: Any, axes: int) -> None:
    if isinstance(x, PackedSequence):
        raise ValueError(
            f"{call.label}: packed sequences are not supported in private training; pad the sequences and mask the "
            "loss, or take each example's output at its own last position, out[torch.arange(len(out)), lengths - 1], "
            "which is what a packed layer of one direction ends with"
        )
    if x.dim() != axes:
        raise ValueError(f"{call.label}: the input must have a batch axis, got shape {tuple(x.shape)}")


def _tapped_linear(call: LayerCall, x: Tensor, weight: str, bias: str | None) -> Tensor:
    def make(delta: Tensor, x: Tensor) -> dict[str, Piece]:
        pieces = linear_pieces(delta, x, bias=bias is not None and call.wants(bias))
        return {weight if name == "weight" else str(bias): piece for name, piece in pieces.items()}

    return call.tap(lambda: F.linear(x, call[weight], call.get(bias) if bias else None), make, x, role=weight)
