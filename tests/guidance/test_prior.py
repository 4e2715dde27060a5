"""Guidance by synthetic images: exact moments, nothing private in them, the price of DP-SGD, resumed bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dphero
from dphero.guidance import Block, Prior, Released, resolve
from dphero.guidance.prior.layer_moments import of_batch
from dphero.mechanism.parameters import describe

SHAPE = (2, 8, 8)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    convolution = nn.Conv2d(2, 5, 3, stride=2, padding=1)
    return nn.Sequential(
        convolution, nn.Tanh(), nn.Dropout(), nn.Flatten(), nn.Linear(80, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def released(model: nn.Module, step: int = 0) -> Released:
    parameters = dict(model.named_parameters())
    templates = describe(model, parameters)
    blocks = [Block(name, value, **templates[name].for_guidance) for name, value in parameters.items()]
    return Released(step, tuple(blocks), 1.0)


def attached(guidance: Any, model: nn.Module, images: Tensor, **options: Any) -> tuple[Any, Any, Any]:
    engine, optimizer = dphero.PrivacyEngine(), torch.optim.SGD(model.parameters(), lr=0.5)
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=TensorDataset(images, torch.arange(len(images)) % 3),
        guidance=guidance,
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        sample_rate=0.2,
        expected_batch_size=8,
        seed=7,
        **options,
    )
    return engine, optimizer, loader


def train(engine: Any, optimizer: Any, loader: Any, model: nn.Module, until: int) -> None:
    while engine.steps < until:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if engine.steps == until:
                break


def test_moments_are_those_of_the_per_example_gradients_parts() -> None:
    """Each layer's weight gradient is the sum of delta a^T: the moments of both, position by position."""
    model, images = network().eval(), torch.randn(70, *SHAPE)  # more than run at a time
    labels = torch.randint(3, (70,))
    names = {id(value): name for name, value in model.named_parameters() if value.dim() > 1}
    seen: list[int] = []

    def loss(outputs: Tensor, random: torch.Generator) -> Tensor:
        start = sum(seen)
        seen.append(len(outputs))
        return F.cross_entropy(outputs, labels[start : start + len(outputs)], reduction="sum")

    found = of_batch(copy.deepcopy(model).requires_grad_(False), names, images, loss, torch.Generator()).found
    assert found == {}, "weights of another network are not of interest"
    seen.clear()
    twin = copy.deepcopy(model).requires_grad_(False)
    names = {id(value): name for name, value in twin.named_parameters() if value.dim() > 1}
    found = of_batch(twin, names, images, loss, torch.Generator()).found
    assert found.keys() == {"0.weight", "4.weight", "6.weight"}
    rows, columns = torch.zeros(5, 5), torch.zeros(18, 18)
    padded = F.pad(images, [1] * 4)
    for i in range(70):
        outputs = model[0](images[i : i + 1]).detach().requires_grad_()
        F.cross_entropy(model[1:](outputs), labels[i : i + 1]).backward()
        assert outputs.grad is not None
        for y in range(4):
            for x in range(4):
                a = padded[i, :, 2 * y : 2 * y + 3, 2 * x : 2 * x + 3].flatten()
                columns += torch.outer(a, a)
                rows += torch.outer(outputs.grad[0, :, y, x], outputs.grad[0, :, y, x])
    torch.testing.assert_close(found["0.weight"].columns, columns.double(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found["0.weight"].rows, rows.double(), rtol=1e-4, atol=1e-6)
    hidden = model[:6](images)
    torch.testing.assert_close(found["6.weight"].columns, (hidden.mT @ hidden).double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("exponent", [0.25, 0.5])
def test_the_geometry_is_the_power_of_the_moments(exponent: float) -> None:
    model, images = network(), torch.randn(40, *SHAPE)
    geometry = Prior(model, images, exponent=exponent, floor=0.2).geometry(released(model))
    assert geometry.keys() == {f"{layer}.{each}" for layer in (0, 4, 6) for each in ("weight", "bias")}
    inputs = model.eval()[:6](images).detach()
    moment = (inputs.mT @ inputs).double()
    values, basis = torch.linalg.eigh(moment)
    scales = (values / values.mean() + 0.2) ** exponent
    scales *= (len(scales) / scales.square().sum()).sqrt()
    weight = geometry["6.weight"]
    assert weight.right is not None and weight.left is not None
    expected = (basis * scales) @ basis.mT
    torch.testing.assert_close(weight.right.colour(torch.eye(6)).double(), expected, rtol=1e-4, atol=1e-4)
    assert geometry["6.bias"].left is weight.left
    assert weight.largest / weight.smallest > 1.5, "moments of a network are far from isotropic"


def test_sides_and_large_axes() -> None:
    model = network()
    right = Prior(model, SHAPE, side="right", examples=64).geometry(released(model))
    assert all(each.left is None for each in right.values()) and "4.bias" not in right
    left = Prior(model, SHAPE, side="left", examples=64).geometry(released(model))
    assert all(each.right is None for each in left.values()) and "4.bias" in left
    few = Prior(model, SHAPE, side="right", examples=64, exact_up_to=4, components=12).geometry(released(model))
    exact, leading = right["4.weight"].right, few["4.weight"].right
    assert exact is not None and leading is not None and type(leading).__name__ == "LowRank"
    assert leading.largest == pytest.approx(exact.largest, rel=0.05)
    noise = few["4.weight"].colour(torch.ones(6, 80))
    torch.testing.assert_close(few["4.weight"].whiten(noise), torch.ones(6, 80), rtol=1e-3, atol=1e-3)


def test_nothing_private_is_in_it() -> None:
    """Two trainings on different people's data: as long as the released weights are the same, so is the geometry."""
    shapes = []
    for seed in (1, 2):
        model = network()
        torch.manual_seed(seed)
        engine, optimizer, loader = attached(
            Prior(model, SHAPE, examples=32, refresh_every=1), model, torch.randn(40, *SHAPE)
        )
        train(engine, optimizer, loader, model, 3)
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), network().parameters(), strict=True):
                parameter.copy_(other)
        mechanism = engine._attached.mechanism
        mechanism.before_lot()
        shapes.append(mechanism.noise_geometry)
    for name, one in shapes[0].items():
        probe = torch.ones(one.shape)
        assert torch.equal(one.colour(probe), shapes[1][name].colour(probe))


@pytest.mark.parametrize("shapes", ["noise", "step", "both"])
def test_the_price_is_that_of_dp_sgd_and_a_run_resumes_bit_for_bit(shapes: Any, tmp_path: Any) -> None:
    images = torch.randn(40, *SHAPE, generator=torch.Generator().manual_seed(3))
    ends = []
    for stop in (None, 3):
        model = network()
        prior = Prior(model, SHAPE, examples=32, refresh_every=2, shapes=shapes)
        engine, optimizer, loader = attached(prior, model, images)
        if stop is not None:
            train(engine, optimizer, loader, model, stop)
            engine.save(tmp_path / "saved")
            model = network(5)
            prior = Prior(model, SHAPE, examples=32, refresh_every=2, shapes=shapes)
            engine, optimizer, loader = attached(prior, model, images)
            engine.load(tmp_path / "saved")
        train(engine, optimizer, loader, model, 6)
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
        plain = network()
        other, *rest = attached("isotropic", plain, images)
        train(other, *rest, plain, 6)
        assert engine.get_epsilon(1e-4) == other.get_epsilon(1e-4)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_step_alone_changes_the_step_alone() -> None:
    """Isotropic noise from the same seed: the optimizer gets A^-2 times what it would have got."""
    images = torch.randn(40, *SHAPE, generator=torch.Generator().manual_seed(3))
    gradients = []
    for use in (False, True):
        model = network()
        guidance = Prior(model, SHAPE, examples=32, shapes="step") if use else "isotropic"
        engine, _, loader = attached(guidance, model, images)
        x, y = next(iter(loader))
        torch.manual_seed(0)  # dropout
        F.cross_entropy(model(x), y).backward()
        assert engine._attached.mechanism.noise_geometry["4.weight"].is_identity
        gradients.append({name: value.grad for name, value in model.named_parameters()})
    shape = Prior(network(), SHAPE, examples=32).geometry(released(network()))["4.weight"]
    expected = shape.whiten(shape.whiten(gradients[0]["4.weight"]))
    torch.testing.assert_close(gradients[1]["4.weight"], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(gradients[1]["4.weight"], gradients[0]["4.weight"], rtol=0.1)


def test_what_cannot_be_is_refused() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"Prior\(model"):
        resolve("prior")
    with pytest.raises(ValueError, match="shape of one image"):
        Prior(model, (28, 28))
    with pytest.raises(ValueError, match="floor"):
        Prior(model, SHAPE, floor=0.0)
    with pytest.raises(ValueError, match=r"process.*'leaves'"):
        Prior(model, SHAPE, process="cats")
    with pytest.raises(ValueError, match=r"another network.*'0\.weight'"):
        Prior(nn.Linear(3, 3), (1, 1, 3)).geometry(released(model))
    with pytest.raises(ValueError, match="loss="):
        Prior(model[:2], SHAPE, examples=4).geometry(released(model[:2]))
    saved = Prior(model, SHAPE).state_dict()
    Prior(model, SHAPE).load_state_dict(saved)
    with pytest.raises(ValueError, match="inputs"):
        Prior(model, torch.zeros(4, *SHAPE)).load_state_dict(saved)
    with torch.no_grad():
        model[4].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="diverged"):
        Prior(model, SHAPE, examples=4).geometry(released(model))
