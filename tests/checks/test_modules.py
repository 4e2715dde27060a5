"""Models that cannot be made private are refused with their replacement; `fix` puts it in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from dphero import fix
from dphero._checks import one_of, positive, whole
from dphero.checks.modules import require_private_modules, trained_parameters
from tests.trainer import network, same, training


class MyNorm(nn.BatchNorm2d):
    """A subclass under another name."""


def frozen(norm: nn.Module) -> nn.Module:
    for p in norm.parameters():
        p.requires_grad_(False)
    return norm.eval()


NORMS: dict[str, nn.Module] = {
    "plain": nn.BatchNorm1d(8),
    "2d": nn.BatchNorm2d(8),
    "3d": nn.BatchNorm3d(8),
    "affine-free": nn.BatchNorm1d(8, affine=False),
    "without statistics": nn.BatchNorm1d(8, track_running_stats=False),
    "frozen": frozen(nn.BatchNorm1d(8)),
    "subclass": MyNorm(8),
    "synchronised": nn.SyncBatchNorm(8),
    "lazy": nn.LazyBatchNorm1d(),
}


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_of_every_kind_is_refused(name: str) -> None:
    """Frozen and affine-free ones too: other libraries let these through, and publish the data's statistics."""
    norm = NORMS[name]
    kind = type(norm).__name__
    with pytest.raises(ValueError, match=rf"(?s)2 \({kind}\): it normalises each example by the others.*dphero.fix"):
        require_private_modules(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), norm))
    with pytest.raises(ValueError, match=rf"the model \({kind}\)"):
        require_private_modules(norm)


@pytest.mark.parametrize(
    "layer, match",
    [
        (nn.InstanceNorm1d(8, track_running_stats=True), "running statistics hold the data"),
        (nn.Embedding(5, 8, max_norm=1.0), "max_norm rewrites the rows"),
        (nn.Embedding(5, 8, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.EmbeddingBag(5, 8, max_norm=1.0), "max_norm"),
    ],
)
def test_layers_that_store_data_are_refused_and_fixed(layer: nn.Module, match: str) -> None:
    module = nn.Sequential(layer)
    with pytest.raises(ValueError, match=match):
        require_private_modules(module)
    require_private_modules(fix(module))
    require_private_modules(fix(layer))
    with pytest.raises(ValueError):
        require_private_modules(module)  # fix made a copy


def test_every_problem_is_named_at_once() -> None:
    module = nn.Sequential(nn.BatchNorm1d(8), nn.Sequential(nn.BatchNorm1d(8), nn.Embedding(5, 8, max_norm=1.0)))
    with pytest.raises(ValueError) as caught:
        require_private_modules(module)
    assert all(name in str(caught.value) for name in ("0 (BatchNorm1d)", "1.0 (BatchNorm1d)", "1.1 (Embedding)"))


def test_modules_whose_layers_cannot_be_followed_are_refused() -> None:
    inside = nn.Linear(3, 3)
    compiled = nn.Linear(3, 3)
    compiled.compile()
    for module, match in [
        (nn.DataParallel(inside), "give the model inside it"),
        (torch.jit.script(inside), "give the Python module"),
        (torch.compile(nn.Linear(3, 3)), "before torch.compile"),
        (compiled, "before torch.compile"),
    ]:
        with pytest.raises(ValueError, match=match) as caught:
            require_private_modules(module)
        assert "dphero.fix" not in str(caught.value)
    with pytest.raises(ValueError, match=r"must be a torch.nn.Module, got str"):
        require_private_modules("model")  # type: ignore[arg-type]


def test_harmless_layers_pass() -> None:
    require_private_modules(
        nn.Sequential(nn.GroupNorm(2, 8), nn.LayerNorm(8), nn.InstanceNorm1d(8), nn.Dropout(), nn.Embedding(3, 8))
    )


# -- fix ---------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """One batch norm in two places, and one that is used by two parents."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(16)
        self.child = nn.Sequential(nn.Linear(16, 16), self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.child(self.first(x)))


def test_fix_replaces_every_batch_norm() -> None:
    for name, norm in NORMS.items():
        if name == "lazy":
            continue
        fixed = fix(nn.Sequential(copy.deepcopy(norm)))
        require_private_modules(fixed)
        assert isinstance(fixed[0], nn.GroupNorm)  # type: ignore[index]
    twice = fix(Twice())
    require_private_modules(twice)
    assert twice.first is twice.second is twice.child[1]  # type: ignore[index]
    assert isinstance(fix(nn.BatchNorm2d(8)), nn.GroupNorm)


@pytest.mark.parametrize("channels", [1, 3, 6, 7, 8, 16, 24, 64, 100, 512])
def test_fix_keeps_channels_weights_and_mode(channels: int) -> None:
    norm = nn.BatchNorm2d(channels, eps=1e-3).double().eval()
    with torch.no_grad():
        norm.weight.copy_(torch.rand(channels))
        norm.bias.copy_(torch.rand(channels))
    norm.bias.requires_grad_(False)
    group = fix(norm)
    assert isinstance(group, nn.GroupNorm)
    assert group.num_channels == channels and group.num_groups <= 32 and group.eps == 1e-3
    assert channels // group.num_groups >= min(8, channels)
    assert torch.equal(group.weight, norm.weight) and torch.equal(group.bias, norm.bias)
    assert group.weight.dtype == torch.float64 and not group.training
    assert group.weight.requires_grad and not group.bias.requires_grad
    assert group(torch.randn(2, channels, 3, 3, dtype=torch.float64)).shape == (2, channels, 3, 3)


def test_a_fixed_model_trains() -> None:
    model = network(0, nn.BatchNorm1d(8))
    with pytest.raises(ValueError, match="BatchNorm1d"):
        training(model)
    run = training(fix(model))
    run.steps(2)
    assert run.engine.steps == 2
    assert isinstance(model[2], nn.BatchNorm1d)  # the original is as it was


# -- parameters ---------------------------------------------------------------------------------------------------


def test_the_trained_parameters_are_those_that_require_gradients() -> None:
    module = network()
    module[0].weight.requires_grad_(False)
    names = list(trained_parameters(module, [SGD(module.parameters(), lr=0.1)]))
    assert names == ["0.bias", "2.weight", "2.bias"]
    several = [SGD(module[2].parameters(), lr=0.1), SGD([module[0].bias], lr=0.1)]
    assert list(trained_parameters(module, several)) == names


def test_tied_weights_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.out.weight = self.embed.weight

    module = Tied()
    assert list(trained_parameters(module, [SGD(module.parameters(), lr=0.1)])) == ["embed.weight"]


def optimizers(module: nn.Sequential) -> dict[str, tuple[Any, str]]:
    outside = nn.Parameter(torch.zeros(3))
    return {
        "foreign": ([SGD([*module.parameters(), outside], lr=0.1)], r"shape \(3,\) that is not the module's"),
        "copied": ([SGD(copy.deepcopy(module).parameters(), lr=0.1)], "not the module's"),
        "twice": ([SGD(module.parameters(), lr=0.1), SGD(module[0].parameters(), lr=0.1)], "two optimizers hold"),
        "loose": (
            [SGD(module[2].parameters(), lr=0.1)],
            r"no optimizer holds '0.bias', '0.weight'.*optimizer=\[a, b\]",
        ),
        "none": ([], "must be a torch optimizer"),
        "a string": (["adam"], "must be a torch optimizer"),
        "a class": ([SGD], "must be a torch optimizer"),
    }


@pytest.mark.parametrize("name", optimizers(network()))
def test_parameters_that_would_be_trained_without_privacy_are_refused(name: str) -> None:
    module = network()
    given, match = optimizers(module)[name]
    with pytest.raises(ValueError, match=match):
        trained_parameters(module, given)


def test_parameters_that_cannot_be_trained_are_refused() -> None:
    module = network()
    for p in module.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing would be trained"):
        trained_parameters(module, [SGD(module.parameters(), lr=0.1)])
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet"):
        trained_parameters(lazy, [SGD(lazy.parameters(), lr=0.1)])
    turned = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"complex64; only real floating-point"):
        trained_parameters(turned, [SGD(turned.parameters(), lr=0.1)])
    half = nn.Linear(2, 2, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"is float16, .*float32 .*or bfloat16"):
        trained_parameters(half, [SGD(half.parameters(), lr=0.1)])


@pytest.mark.parametrize("name", [*optimizers(network()), "norm"])
def test_a_failed_make_private_changes_nothing(name: str) -> None:
    module = network(0, nn.BatchNorm1d(8)) if name == "norm" else network()
    given = [SGD(module.parameters(), lr=0.1)] if name == "norm" else optimizers(module)[name][0]
    state = {key: value.clone() for key, value in module.state_dict().items()}
    attributes = {path: set(vars(child)) for path, child in module.named_modules()}
    with pytest.raises(ValueError):
        training(module, optimizer=lambda _: given)
    assert same(state, dict(module.state_dict()))
    assert attributes == {path: set(vars(child)) for path, child in module.named_modules()}
    assert not any(p._backward_hooks for p in module.parameters()) and not module._forward_hooks
    for optimizer in given:
        if isinstance(optimizer, SGD):
            assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers() -> None:
    assert positive("x", 3) == 3.0
    assert whole("n", 3) == 3
    one_of("kind", "a", ("a", "b"))
    for bad in (0, -1, float("nan"), float("inf"), "3", None, True, [1]):
        with pytest.raises(ValueError, match="x must be a positive number, got"):
            positive("x", bad)
    for bad in (0, -1, 1.5, "3", None, True):
        with pytest.raises(ValueError, match="n must be a whole number of at least 1, got"):
            whole("n", bad)
    with pytest.raises(ValueError, match="kind must be one of 'a', 'b', got 'c'"):
        one_of("kind", "c", ("a", "b"))
