"""An attack: weights computed by random operations; no example may add more to a sum than its norm says."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero.functional import pulled, unbatched
from dphero.geometry import Dense, Geometry, LowRank, identity
from dphero.row_form.norms import pulled_square_norms
from tests.oracle.micro_batches import tapped

ROWS, COLUMNS, EXAMPLES, PROGRAMS = 6, 24, 5, 150
OPERATIONS: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [  # of a weight, a gain for each row, and a constant
    lambda w, g, b: w - w.mean(1, keepdim=True),
    lambda w, g, b: w - w.mean(0, keepdim=True),
    lambda w, g, b: w - w.mean(),
    lambda w, g, b: w / (w.var(1, keepdim=True) + 1e-3).sqrt(),
    lambda w, g, b: w / (w.norm(dim=1, keepdim=True) + 1e-2),
    lambda w, g, b: w / (w.norm() + 1e-2),
    lambda w, g, b: w / (w.square().mean(1, keepdim=True) + 0.1),
    lambda w, g, b: w / w.detach().norm(dim=1, keepdim=True),
    lambda w, g, b: F.normalize(w, dim=1),
    lambda w, g, b: F.normalize(w, dim=0),
    lambda w, g, b: F.batch_norm(w.view(1, ROWS, COLUMNS), None, None, weight=g, training=True).view(ROWS, COLUMNS),
    lambda w, g, b: w * g.view(-1, 1),
    lambda w, g, b: w * g.sum(),
    lambda w, g, b: w * (g / g.norm()).view(-1, 1),
    lambda w, g, b: w * b + g.view(-1, 1),
    lambda w, g, b: w * w.sum(1, keepdim=True).mul(0.1).exp(),
    lambda w, g, b: w - w.mean(1).mean(),
    lambda w, g, b: w - w[:, : COLUMNS // 2].mean(1, keepdim=True),
    lambda w, g, b: (w.view(2 * ROWS, -1) - w.view(2 * ROWS, -1).mean(1, keepdim=True)).view(ROWS, COLUMNS),
    lambda w, g, b: (w.t() - w.t().mean(1, keepdim=True)).t(),
    lambda w, g, b: (w * 1.0).sub_(w.mean(1, keepdim=True)),
    lambda w, g, b: w + 0.1 * (w @ w.t()) @ w,
    lambda w, g, b: w.roll(1, 0),
    lambda w, g, b: w.clamp(-1, 1),
    lambda w, g, b: w.tanh(),
]


class Computed(nn.Module):
    """A layer whose weight some operations make of another one."""

    def __init__(self, chosen: list[int], convolution: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS) + 0.3 * torch.randn(ROWS, 1))
        self.gain, self.head = nn.Parameter(1 + 0.3 * torch.randn(ROWS)), nn.Linear(ROWS, 3)
        self.register_buffer("constant", torch.randn(ROWS, 1))
        self.chosen, self.convolution = chosen, convolution

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        for number in self.chosen:
            weight = OPERATIONS[number](weight, self.gain, self.get_buffer("constant"))
        if self.convolution:
            return self.head(F.conv2d(x, weight.view(ROWS, 6, 2, 2)).mean((2, 3)).tanh())
        return self.head(F.linear(x, weight).tanh())


def mixing(chance: random.Random) -> Geometry:
    """Return noise of random shape, along combinations of rows or of columns."""
    side = chance.choice(["left", "right"])
    size = ROWS if side == "left" else COLUMNS
    basis = torch.linalg.qr(torch.randn(size, size))[0]
    scales = torch.logspace(-1, 1, size)
    factor = Dense(basis, scales) if chance.random() < 0.5 else LowRank(basis[:, :3], scales[::2][-3:], 1.0)
    return Geometry((ROWS, COLUMNS), **{side: factor})


def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("convolution", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_no_example_adds_more_than_its_norm(
    mixed: bool, convolution: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_by_row: list[int] = []

    def counted(*given: Any) -> Tensor:
        found_by_row.append(1)
        return pulled_square_norms(*given)

    monkeypatch.setattr(unbatched, "_LARGE", 0)
    monkeypatch.setattr(pulled, "pulled_square_norms", counted)
    torch.manual_seed(0)
    chance = random.Random(0)
    for _ in range(PROGRAMS):
        chosen = [chance.randrange(len(OPERATIONS)) for _ in range(chance.randint(1, 3))]
        model = Computed(chosen, convolution).to(dtype)
        shape = (6, chance.choice([3, 6]), 4) if convolution else (COLUMNS,)
        batch = (torch.randn(EXAMPLES, *shape, dtype=dtype), torch.randint(3, (EXAMPLES,)))
        geometry = {"weight": mixing(chance)} if mixed else {}
        found = tapped(model, batch, loss, geometry)
        whole = torch.stack([*found.square_norms.values()]).sum(0).sqrt()
        for name, piece in found.pieces.items():
            alone = torch.eye(EXAMPLES, dtype=dtype).unbind()
            one = geometry.get(name, identity(tuple(piece.shape)))
            true = piece.instantiate()  # pulled back, whatever the form
            sums = torch.stack([piece.weighted_sum(each) for each in alone])
            added = torch.stack([one.whiten(each).flatten(1).norm(dim=1) for each in (true, sums)]).amax(0)
            room = torch.finfo(dtype).eps * whole
            assert bool((added <= found.square_norms[name].sqrt() * (1 + 1e-4) + room).all()), (chosen, name)
    assert len(found_by_row) > PROGRAMS // 10
