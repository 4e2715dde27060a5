"""Row form: found where a function has it, and only there; norms by it are those of micro-batches, never too small."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphero.functional import pulled
from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.geometry import Geometry, identity
from dphero.row_form.norms import pulled_square_norms
from tests.oracle.micro_batches import micro_batches, tapped
from tests.oracle.test_zoo import loss
from tests.row_form.cases import MIXED, mixing

Function = Callable[[Tensor, Tensor], Tensor]
"""From a weight of shape (8, 8, 3, 3), or (8, 8), and numbers of shape (8, 1, …)."""
AXES = (1, 2, 3)


pytestmark = pytest.mark.usefixtures("in_parts")


def by_variance(w: Tensor, g: Tensor) -> Tensor:
    scale = torch.rsqrt(w.var(dim=AXES, keepdim=True, unbiased=False) * w[0].numel() + 1e-5)
    return (w - w.mean(dim=AXES, keepdim=True)) * scale


def by_var_mean(w: Tensor, g: Tensor) -> Tensor:
    variance, mean = torch.var_mean(w, dim=AXES, keepdim=True)
    return (w - mean) / (variance + 1e-4).sqrt() * g


def as_in_timm(w: Tensor, g: Tensor) -> Tensor:
    flat = F.batch_norm(w.reshape(1, 8, -1), None, None, weight=(g * 0.3).view(-1), training=True, momentum=0.0)
    return flat.reshape_as(w)


def length(w: Tensor) -> Tensor:
    return torch.linalg.vector_norm(w, dim=AXES, keepdim=True)


def in_place(w: Tensor, g: Tensor) -> Tensor:
    out = 2 * w
    flat = out.view(-1)
    flat.mul_(torch.arange(float(w.numel())).cos())
    return out


KEPT: dict[str, Function] = {
    "by variance": by_variance,
    "by var_mean": by_var_mean,
    "as in timm": as_in_timm,
    "by squares": lambda w, g: w * (w.pow(2).mean(AXES, keepdim=True) + 1e-3).rsqrt() * g.exp(),
    "flat": lambda w, g: ((w.flatten(1) - w.flatten(1).mean(1)[:, None]) / w.flatten(1).std(1)[:, None]).view_as(w),
    "normalised": lambda w, g: F.normalize(w.flatten(1), dim=1).reshape(w.shape),
    "weight norm": lambda w, g: torch._weight_norm(w, g, 0),
    "centred": lambda w, g: w - w.mean(AXES, keepdim=True).expand_as(w),
    "clipped norm": lambda w, g: w * (2.0 / length(w)).clamp(max=1.0),
    "a detached norm": lambda w, g: g * w / w.detach().norm(),
    "a constant mean": lambda w, g: -(1 - w / 3) * torch.arange(1.0, 9.0).view(8, 1, 1, 1).to(w),
}
LEFT: dict[str, Function] = {
    "exp": lambda w, g: w.exp() * 0.1,
    "softmax": lambda w, g: w.flatten(1).softmax(1).view_as(w) * g,
    "coupled rows": lambda w, g: (w.flatten(1) @ w.flatten(1).T @ w.flatten(1)).view_as(w) * 0.1,
    "a global mean": lambda w, g: w - w.mean(),
    "a mask": lambda w, g: w * (torch.arange(w.numel()).view(w.shape) % 3 > 0).to(w),
    "a detached copy": lambda w, g: (w + w.detach().cos()) / length(w + w.detach().cos()),
    "clamped": lambda w, g: w.clamp(-0.3, 0.3),
    "absolute mean": lambda w, g: w / w.abs().mean(AXES, keepdim=True),
    "another norm": lambda w, g: w / torch.linalg.vector_norm(w, 1, dim=AXES, keepdim=True),
    "columns": lambda w, g: w - w.mean((0, 2, 3), keepdim=True),
    "columns without axis": lambda w, g: w - w.mean((0, 2, 3)).view(8, 1, 1, 1),
    "turned": lambda w, g: w.transpose(0, 1) * g,
    "flipped in the row": lambda w, g: w + length(w.flip(3)) * w.flip(2),
    "cubes": lambda w, g: w.square() * w,
    "rows among each other": lambda w, g: w * length(w[[1, 0, 3, 2, 5, 4, 7, 6]]),
    "a constant of another kind": lambda w, g: w * torch.linspace(0.5, 1, 8).to(w).view(1, 8, 1, 1),
    "in place": in_place,
    "rounded": lambda w, g: torch.div(w, 0.01 + g * g, rounding_mode="trunc") * 0 + w * w.cos(),
}


class Own(nn.Module):
    def __init__(self, function: Function, positions: int) -> None:
        super().__init__()
        self.function, self.positions = function, positions
        self.weight = nn.Parameter(torch.randn(8, 8, 3, 3) * 0.2 + 0.05)
        self.gain = nn.Parameter(torch.rand(8, 1, 1, 1) + 0.5)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = F.conv2d(x, self.function(self.weight, self.gain), padding=1)
        return self.last(out.tanh().mean((2, 3)))


class Calls:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = pulled_square_norms

        def counted(*args: object) -> Tensor:
            self.count += 1
            return original(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(pulled, "pulled_square_norms", counted)


def compare(model: nn.Module, x: Tensor, geometry: Geometry | None = None) -> None:
    shapes = {} if geometry is None else {"weight": geometry}
    expected = micro_batches(model, (x,), loss)
    found = tapped(model, (x,), loss, shapes)
    assert set(expected) >= set(found.pieces)
    largest = max(float(each.flatten(1).norm(dim=1).amax()) for each in expected.values()) / len(x)
    tolerance, room = (1e-9, 1e-9) if x.dtype == torch.float64 else (2e-3, 1e-4)
    for name, norms in found.square_norms.items():
        one = shapes.get(name, identity(tuple(expected[name].shape[1:])))
        # the tapped loss is a mean over all examples
        true = torch.stack([one.square_norm(each / len(x)) for each in expected[name]]).sqrt()
        size = float(true.amax()) + 1e-12
        assert bool((norms.sqrt() >= true * (1 - 1e-5) - 1e-7 * size).all()), name
        assert bool((norms.sqrt() <= true * (1 + tolerance) + room * largest).all()), name
        weights = torch.arange(1.0, len(x) + 1, dtype=norms.dtype).cos()
        total = torch.einsum("n,n...->...", weights, expected[name] / len(x))
        torch.testing.assert_close(found.pieces[name].weighted_sum(weights), total, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("size", [2, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KEPT)
def test_norms_by_row_form(name: str, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At few positions (Gram) and at many (formed)."""
    torch.manual_seed(0)
    calls = Calls(monkeypatch)
    compare(Own(KEPT[name], size).to(dtype), torch.randn(5, 8, size, size, dtype=dtype))
    assert calls.count >= 1


@pytest.mark.parametrize("size", [2, 12])
@pytest.mark.parametrize("name", ["as in timm", "by squares"])
@pytest.mark.parametrize("factor", [Scalar(8, 3.0), Diagonal(torch.arange(1.0, 9.0))], ids=["scalar", "diagonal"])
def test_scales_of_rows(factor: Diagonal | Scalar, name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    calls = Calls(monkeypatch)
    compare(Own(KEPT[name], size), torch.randn(5, 8, size, size), Geometry((8, 8, 3, 3), left=factor))
    assert calls.count >= 2


@pytest.mark.parametrize("size", [2, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["as in timm", "by squares", "weight norm", "centred"])
@pytest.mark.parametrize("kind", MIXED)
def test_geometries_that_mix_what_is_in_rows(
    kind: str, name: str, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    calls = Calls(monkeypatch)
    compare(
        Own(KEPT[name], size).to(dtype), torch.randn(5, 8, size, size, dtype=dtype), mixing(kind, (8, 8, 3, 3), dtype)
    )
    assert calls.count >= 1


@pytest.mark.parametrize("kind", ["low rank", "dense", "flat"])
@pytest.mark.parametrize("size", [2, 12])
def test_gains_whose_noise_has_a_shape(size: int, kind: str) -> None:
    torch.manual_seed(0)
    model, x = Own(KEPT["weight norm"], size), torch.randn(5, 8, size, size)
    geometry = mixing(kind, (8, 1, 1, 1))
    expected = micro_batches(model, (x,), loss)["gain"] / len(x)
    norms = tapped(model, (x,), loss, {"gain": geometry}).square_norms["gain"].sqrt()
    true = torch.stack([geometry.square_norm(each) for each in expected]).sqrt()
    assert bool((norms >= true * (1 - 1e-5)).all())
    torch.testing.assert_close(norms, true, rtol=1e-3, atol=1e-4 * float(true.amax()))


@pytest.mark.parametrize("name", LEFT)
def test_other_functions_are_pulled_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    calls = Calls(monkeypatch)
    compare(Own(LEFT[name], 4), torch.randn(5, 8, 4, 4))
    assert calls.count == 0


SQUARE: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "rows": (True, lambda w: w / w.norm(dim=1, keepdim=True)),
    "normalised": (True, lambda w: F.normalize(w, dim=1)),
    "columns": (False, lambda w: w / w.norm(dim=0, keepdim=True)),
    "normalised columns": (False, lambda w: F.normalize(w, dim=0)),
    "columns by broadcasting": (False, lambda w: w / w.norm(dim=1)),
    "columns, then rows": (False, lambda w: w / w.norm(dim=0)[:, None]),
    "turned": (False, lambda w: (w / w.norm(dim=1, keepdim=True)).T),
    "chosen rows": (False, lambda w: (w / w.norm(dim=1, keepdim=True))[torch.arange(16).flip(0)]),
    "twice": (True, lambda w: F.normalize(w / w.norm(dim=1, keepdim=True) + 0.1 * w.mean(1, keepdim=True))),
    "each with all": (False, lambda w: (w[:, :, None] * w.flip(1)[:, None, :]).sum(2)),
    "low rank": (False, lambda w: w[:, :4] @ w[:4] + w),
}


class Square(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.function(self.weight)).tanh()


@pytest.mark.parametrize("shape", [(5, 16), (5, 3, 16), (5, 20, 16)], ids=["one", "few", "many"])
@pytest.mark.parametrize("name", SQUARE)
def test_square_matrices(name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where shapes do not tell rows from columns."""
    torch.manual_seed(0)
    calls = Calls(monkeypatch)
    kept, function = SQUARE[name]
    compare(Square(function), torch.randn(shape))
    assert bool(calls.count) == kept
