"""A group norm's gradients, of its input and by example, from one run of torch's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from dphero import PrivacyEngine
from dphero.layers import group_norm

_N = 6


class _Counted(TorchDispatchMode):
    """Counts calls of the kernel."""

    calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += function is torch.ops.aten.native_group_norm_backward.default
        return function(*args, **(kwargs or {}))


class _Spy:
    """A function, and how often it was called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)


class _Net(nn.Module):
    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(4, 8, affine=affine)
        self.second = nn.GroupNorm(2, 8, affine=affine)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        return self.last(self.second(torch.relu(h)).mean((2, 3)))


def _net(*, affine: bool = True) -> _Net:
    torch.manual_seed(0)
    return _Net(affine).double()


def _data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(_N, 2, 5, 5, dtype=torch.float64), torch.randint(3, (_N,))


def _private(model: nn.Module, *, create_graph: bool = False) -> tuple[dict[str, Tensor], int]:
    """Return the sum of unclipped gradients over all rows, and how often the kernel ran in the second step."""
    x, y = _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = PrivacyEngine()
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=TensorDataset(x, y), noise_multiplier=1e-12,
        max_grad_norm=1e3, sampling="shuffle", expected_batch_size=_N, dataset_size="public", guidance="isotropic",
    )  # fmt: skip
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            with _Counted() as counted:
                loss.backward(create_graph=create_graph)
            optimizer.step()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    engine.detach()
    return found, counted.calls


def _plain(model: nn.Module) -> dict[str, Tensor]:
    x, y = _data()
    nn.functional.cross_entropy(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_are_autograds(create_graph: bool) -> None:
    found, _ = _private(_net(), create_graph=create_graph)
    for name, gradient in _plain(_net()).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7, msg=name)


def test_many_groups_are_taken_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_norm, "_MOST_GROUPS", 9)  # two examples of four groups
    found, calls = _private(_net())
    assert calls == -(-_N // 2) + -(-_N // 4)
    for name, gradient in _plain(_net()).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.gpu
def test_a_gpu_takes_more_groups_than_it_can_start() -> None:
    x, norm = torch.randn(5000, 32, 4, device="cuda", requires_grad=True), nn.GroupNorm(16, 32, device="cuda")
    delta = torch.randn_like(x)
    with torch.no_grad():
        _, mean, inverse = torch.native_group_norm(x, norm.weight, norm.bias, 5000, 32, 4, 16, norm.eps)
        saved = group_norm._Saved(x, mean, inverse, norm.weight)
        found = group_norm._backward(delta, saved, 16, (True, True, True))
    expected = torch.autograd.grad(norm(x), (x, norm.weight, norm.bias), delta)
    sums = (found[0], *(each.view(5000, 32).sum(0) for each in found[1:]))
    for one, other in zip(sums, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def _in_place(gradient: Tensor) -> Tensor:
    return gradient.mul_(2)


def _turned(gradient: Tensor) -> Tensor:
    return gradient.mT.contiguous().mT


@pytest.mark.parametrize(
    "change", [None, lambda gradient: 2 * gradient, _in_place, lambda gradient: gradient.flip(0), _turned]
)
def test_what_the_tap_found_is_used_for_the_very_same_output_gradient_alone(
    change: Callable[[Tensor], Tensor] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_norm, "_backward", counted := _Spy(group_norm._backward))
    torch.manual_seed(0)
    norm, kept = nn.GroupNorm(2, 4).double(), group_norm._Kept()
    x, start = torch.randn(3, 4, 5, 5, dtype=torch.float64, requires_grad=True), torch.randn(3, 4, 5, 5).double()
    reference = norm(x)
    if change is not None:
        reference.register_hook(change)
    (expected,) = torch.autograd.grad(reference, x, start.clone())
    out, mean, inverse = group_norm._GroupNorm.apply(x, norm.weight.detach(), None, norm, kept)

    def tap(delta: Tensor) -> None:
        saved = group_norm._Saved(x.detach(), mean, inverse, norm.weight.detach())
        kept.keep(delta, counted(delta, saved, 2, (True, True, True))[0])

    out.register_hook(tap)
    if change is not None:
        out.register_hook(change)
    (found,) = torch.autograd.grad(out, x, start.clone())
    torch.testing.assert_close(found, expected)
    assert counted.calls == (1 if change is None else 2)


@pytest.mark.parametrize("affine", [True, False])
def test_the_kernel_runs_once_for_each_norm(affine: bool) -> None:
    _, calls = _private(_net(affine=affine))
    assert calls == 2


def test_gradients_can_be_differentiated() -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True), nn.GroupNorm(2, 4).double()
    weight = torch.randn(4, dtype=torch.float64)

    def apply(x: Tensor) -> Tensor:
        out: Tensor = group_norm._GroupNorm.apply(x, weight, None, norm, group_norm._Kept())[0]
        return out

    assert torch.autograd.gradcheck(apply, (x,)) and torch.autograd.gradgradcheck(apply, (x,))


def test_where_gradients_are_differentiated_hooks_on_the_input_run_once_and_nothing_is_kept() -> None:
    torch.manual_seed(0)
    norm, kept, seen = nn.GroupNorm(2, 4).double(), group_norm._Kept(), list[Tensor]()
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True) * 1
    x.register_hook(seen.append)
    out = group_norm._GroupNorm.apply(x, norm.weight.detach(), None, norm, kept)[0]
    out.register_hook(lambda delta: kept.keep(delta, delta))
    torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert len(seen) == 1 and kept.found is None


def test_forward_mode_is_left_to_torch() -> None:
    """A tangent that no gradient goes through, say: a target."""

    class Target(_Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            with forward_ad.dual_level():
                out, change = forward_ad.unpack_dual(self.norm(forward_ad.make_dual(h, h.detach().square())))
                return self.last(self.second(torch.relu(out + change.detach())).mean((2, 3)))

    def net() -> nn.Module:
        torch.manual_seed(0)
        return Target().double()

    found, _ = _private(net())
    for name, gradient in _plain(net()).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7, msg=name)
