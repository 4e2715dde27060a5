"""The canary: planted where it was meant to be, in the direction where the noise is weakest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dphero.audit.canary import Aim, Port, has_bias, plant, unreached, weakest
from dphero.audit.engine_release import EngineRelease
from dphero.audit.settings import Settings, small_model
from dphero.geometry.dense import Dense
from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.geometry import Geometry, identity
from dphero.geometry.low_rank import LowRank
from dphero.guidance import PCA, History


def basis(size: int, columns: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0][:, : columns or size]


SCALES = torch.tensor([2.0, 0.5, 1.0, 0.1, 3.0], dtype=torch.float64)
SHAPES = [
    Geometry((5, 4), left=Dense(basis(5), SCALES)),
    Geometry((4, 5), right=Dense(basis(5), SCALES)),
    Geometry((5, 5), left=Dense(basis(5), SCALES), right=Diagonal(SCALES.flip(0))),
    Geometry((5, 4), left=LowRank(basis(5, 2), SCALES[:2], 0.2)),
    Geometry((5, 4), left=LowRank(basis(5, 2), torch.tensor([0.1, 3.0], dtype=torch.float64), 0.2)),
    Geometry((5, 2, 2), flat=Diagonal(torch.arange(1.0, 21.0))),
    Geometry((5, 4), left=Scalar(5, 0.7)),
    identity((5, 4)),
]


@pytest.mark.parametrize("geometry", SHAPES)
def test_the_weakest_direction_is_the_weakest(geometry: Geometry) -> None:
    u, v, scale = weakest(geometry)
    assert float(u.norm()) == pytest.approx(1, abs=1e-5) and float(v.norm()) == pytest.approx(1, abs=1e-5)
    assert scale == pytest.approx(geometry.smallest, rel=1e-5)


def test_a_full_covariance_gets_the_nearest_product() -> None:
    geometry = Geometry((5, 4), flat=Dense(basis(20), torch.linspace(0.1, 2, 20, dtype=torch.float64)))
    assert geometry.smallest <= weakest(geometry)[2] < 2


LAYERS = [
    nn.Linear(7, 5),
    nn.Linear(7, 5, bias=False),
    nn.Conv2d(3, 5, 3),
    nn.Conv2d(3, 5, (3, 4), stride=2, padding=2),
    nn.Conv2d(3, 5, 3, stride=3, padding=1),
    nn.Conv2d(1, 5, 2, dilation=2, padding=(3, 0)),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_gradient_is_what_was_planted(layer: nn.Module) -> None:
    weight = dict(layer.named_parameters())["weight"]
    geometry = Geometry(tuple(weight.shape), left=Dense(basis(5), SCALES))
    u, v, _ = weakest(geometry)
    (made,) = plant(layer, {"weight": geometry}, clip_norm=0.25, shaped=False)
    (output,) = Port(layer, [made])(made.inputs)
    (gradient,) = torch.autograd.grad((output * made.readout).sum(), weight)
    torch.testing.assert_close(gradient.flatten(1), 25 * torch.outer(u, v), rtol=1e-4, atol=1e-4)


def test_under_an_ellipsoid_it_lies_in_every_layer_alike() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5))
    shapes = {"0.weight": SHAPES[0], "1.weight": identity((5, 5))}
    norms = {}
    for made in plant(model, shapes, clip_norm=2.0, shaped=True):
        name = f"{made.layer}.weight"
        (output,) = Port(model, [made])(made.inputs)
        (gradient,) = torch.autograd.grad((output * made.readout).sum(), model.get_parameter(name))
        norms[name] = float(shapes[name].square_norm(gradient.double())) ** 0.5
    assert norms["0.weight"] == pytest.approx(norms["1.weight"], rel=1e-4)
    assert norms["0.weight"] * 2**0.5 == pytest.approx(200, rel=1e-4)


@pytest.mark.parametrize("layer", [each for each in LAYERS if each.bias is not None], ids=str)
def test_a_canary_can_be_aimed_at_the_bias(layer: nn.Module) -> None:
    bias, weight = layer.get_parameter("bias"), layer.get_parameter("weight")
    geometry = Geometry(tuple(bias.shape), left=Dense(basis(5), SCALES))
    (made,) = plant(layer, {"bias": geometry}, clip_norm=0.25, shaped=False, aim="bias")
    (output,) = Port(layer, [made])(made.inputs)
    gradients = torch.autograd.grad((output * made.readout).sum(), [bias, weight])
    torch.testing.assert_close(gradients[0], 25 * weakest(geometry)[0], rtol=1e-4, atol=1e-4)
    assert float(gradients[1].norm()) == pytest.approx(2.5, rel=1e-4)


def test_parameters_that_no_canary_enters_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 1), nn.Conv2d(4, 2, 1), nn.Embedding(3, 4))
    assert unreached(model) == ["1.weight", "1.bias", "2.weight", "2.bias", "4.weight"]
    assert unreached(small_model()) == [] and unreached(nn.LayerNorm(3).requires_grad_(False)) == []
    assert has_bias(model) and not has_bias(nn.Sequential(nn.Linear(3, 3, bias=False), nn.LayerNorm(3)))


def test_a_model_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(ValueError, match="no trained linear or convolution layer"):
        plant(nn.LayerNorm(3), {"weight": identity((3,))}, clip_norm=1.0, shaped=True)


@pytest.mark.parametrize("aim", ["weight", "bias"])
@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(guidance="isotropic"),
        Settings(mechanism="ball", guidance=PCA(exponent=0.5)),
        Settings(guidance=History("full", refresh_every=1)),
        Settings(clipping="per_layer", max_grad_norm=0.3),
        Settings(clipping="automatic"),
        Settings(mechanism="published", guidance=PCA(exponent=1.0, floor=0.0)),
    ],
    ids=lambda each: f"{each.mechanism}, {each.clipping}, {str(each.guidance)[:24]}",
)
def test_the_engine_adds_what_the_attacker_expects(settings: Settings, aim: Aim) -> None:
    """Almost without noise: the canary moves the release, along its read-out, by μ, and its company takes that back."""
    quiet = Settings(**{**vars(settings), "noise_multiplier": 1e-3})
    release = EngineRelease(quiet, small_model(), steps=2, aim=aim)
    found = [release(canary_in, 0) for canary_in in (True, False)]
    mu = release._sides[True]._mu
    if settings.mechanism == "ellipsoid" and settings.clipping != "per_layer":
        assert mu == pytest.approx(1e3, rel=2e-3)  # all that clipping allows
    elif settings.mechanism == "ball":
        assert mu == pytest.approx(1e3, rel=0.02)  # some of it is spent on the other layers
    # Two lots, each μ y − μ²/2 with y within a few standard deviations of μ or 0; rounding of the company is larger.
    assert found[0] == pytest.approx(mu**2, rel=0.05)
    assert found[1] == pytest.approx(-(mu**2), rel=0.05)
