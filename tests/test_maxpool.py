"""Max pooling of pairs gives what torch's gives, and only private passes use it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from dphero import PrivacyEngine
from dphero.maxpool import _Halved, halves, max_pool


def never(x):
    pytest.fail("the fast way was not taken")


def both(x, gradient):
    results = []
    for pool in (lambda x: max_pool(x, never), lambda x: F.max_pool2d(x, 2)):
        leaf = x.clone().requires_grad_()
        out = pool(leaf)
        out.backward(gradient)
        results.append((out.detach(), leaf.grad))
    return results


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    levels=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_it_is_torchs_pooling_ties_included(shape, levels, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    n, channels, height, width = shape
    x = torch.randint(levels, (n, channels, 2 * height, 2 * width), generator=random).to(dtype)  # many are equal
    gradient = torch.randn(n, channels, height, width, generator=random, dtype=dtype)
    (out, found), (expected, right) = both(x, gradient)
    assert torch.equal(out, expected) and torch.equal(found, right)


def test_nan_and_infinity_come_through():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    x[0, 0, 0, 1], x[0, 0, 2, 2], x[0, 0, 3, 0] = torch.nan, torch.inf, -torch.inf
    out, expected = max_pool(x, never), F.max_pool2d(x, 2)
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.nan_to_num(0), expected.nan_to_num(0))


@pytest.mark.parametrize(
    "x",
    [
        torch.rand(2, 3, 5, 4),
        torch.rand(2, 3, 4, 5),
        torch.rand(3, 4, 4),
        torch.rand(0, 3, 4, 4),
        torch.rand(2, 4, 4, 3).permute(0, 3, 1, 2),
        torch.rand(2, 3, 4, 4).bfloat16(),
        nn.Parameter(torch.rand(2, 3, 4, 4)),
    ],
    ids=["odd height", "odd width", "no batch", "empty", "channels last", "bfloat16", "not a plain tensor"],
)
def test_other_tensors_go_torchs_way(x, monkeypatch):
    monkeypatch.setattr(_Halved, "apply", lambda x: pytest.fail("the fast way was taken"))
    assert torch.equal(max_pool(x, lambda x: F.max_pool2d(x, 2)), F.max_pool2d(x, 2))


def test_only_plain_pooling_of_pairs_is_replaced():
    assert halves(nn.MaxPool2d(2)) and halves(nn.MaxPool2d((2, 2), (2, 2)))
    others = [nn.MaxPool2d(3), nn.MaxPool2d(2, 1), nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, dilation=2)]
    others += [nn.MaxPool2d(2, return_indices=True), nn.MaxPool2d(2, ceil_mode=True), nn.AvgPool2d(2), nn.MaxPool1d(2)]

    class Own(nn.MaxPool2d):
        pass

    assert not any(halves(module) for module in [*others, Own(2)])


def test_a_private_pass_uses_it_and_no_other(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 3))
    plain, x, y = copy.deepcopy(model), torch.rand(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    calls, apply = [], _Halved.apply
    monkeypatch.setattr(_Halved, "apply", lambda x: calls.append(len(x)) or apply(x))
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=TensorDataset(x, y),
        noise_multiplier=1e-6,
        max_grad_norm=100.0,
        guidance="isotropic",
        sample_rate=1.0,
        expected_batch_size=6,
        seed=0,
    )
    inputs, labels = next(iter(loader))
    F.cross_entropy(model(inputs), labels).backward()
    assert 6 in calls
    F.cross_entropy(plain(inputs), labels).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-3)
    calls.clear()
    with torch.no_grad():
        model(inputs)
    model.eval()(inputs)
    engine.detach()
    model.train()(inputs)
    assert not calls and "forward" not in vars(model[2])
