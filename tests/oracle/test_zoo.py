"""Every model of the zoo: norms and clipped sums are those of micro-batches of one, in every geometry."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

from dphero.geometry.diagonal import Diagonal
from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Geometry
from dphero.geometry.low_rank import LowRank
from dphero.guidance import PCA
from tests.oracle.micro_batches import Batch, Tapped, compare, guided, micro_batches, tapped, trained
from tests.oracle.zoo import CASES

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8}
PRECISIONS = pytest.mark.parametrize("dtype", TOLERANCE, ids=["single", "double"])

FEW = ["lenet", "conv2d", "conv2d_wide_on_few_pixels", "gpt", "gpt_tied_by_matmul", "lora", "linear_wide"]
FEW += ["tied_linear_layers", "lstm", "huggingface_conv1d", "attention_across", "wide_resnet_with_standardised_weights"]


def make(name: str, dtype: torch.dtype) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    return model.to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def loss(module: nn.Module, *inputs: Tensor) -> Tensor:
    """A mean over the examples of something that depends on every output in its own way."""
    out = module(*inputs).flatten(1)
    return torch.sin(out * torch.arange(1.0, out.shape[1] + 1, dtype=out.dtype).cos()).sum(1).mean()


@functools.cache
def expected(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return micro_batches(*make(name, dtype), loss)


def low_rank(size: int) -> Factor:
    if size < 3:
        return Diagonal(torch.rand(size, dtype=torch.float64) + 0.5)
    basis = torch.linalg.qr(torch.randn(size, 2, dtype=torch.float64))[0]
    return LowRank(basis, torch.tensor([0.5, 2.0]), 0.7)


def geometry_of(kind: str, module: nn.Module) -> dict[str, Geometry] | None:
    shapes = {name: tuple(parameter.shape) for name, parameter in trained(module).items()}
    if kind == "isotropic":
        return None
    if kind == "diagonal":
        return {n: Geometry(s, flat=Diagonal(0.3 + torch.rand(s).double().flatten())) for n, s in shapes.items()}
    if kind == "low_rank":
        matrices = {n: s for n, s in shapes.items() if len(s) > 1}
        columns = {n: torch.Size(s[1:]).numel() for n, s in matrices.items()}
        return {n: Geometry(s, low_rank(s[0]), low_rank(columns[n])) for n, s in matrices.items()}
    return guided(module, PCA(side=kind))


def check(name: str, dtype: torch.dtype, kind: str) -> None:
    module, batch = make(name, dtype)
    geometry = geometry_of(kind, module)
    compare(expected(name, dtype), tapped(module, batch, loss, geometry), geometry, TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@PRECISIONS
@pytest.mark.parametrize("kind", ["isotropic", "left"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_micro_batches(name: str, kind: str, dtype: torch.dtype) -> None:
    check(name, dtype, kind)


@PRECISIONS
@pytest.mark.parametrize("kind", ["right", "both", "diagonal", "low_rank"])
@pytest.mark.parametrize("name", FEW)
def test_other_geometries(name: str, kind: str, dtype: torch.dtype) -> None:
    check(name, dtype, kind)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_one_row(name: str) -> None:
    """Strides mean nothing along an axis of one: what is only nearly contiguous counts as contiguous then."""
    model, inputs = make(name, torch.float64)
    before = copy.deepcopy(model.state_dict())
    with Tapped(model, len(inputs[0])) as one:
        loss(model, *inputs).backward()
        model.load_state_dict(before)  # some models write buffers in each forward pass
        one.rows = 1
        loss(model, *(x[:1] for x in inputs)).backward()
    for parameter, gradients in expected(name, torch.float64).items():
        piece = one.found[1].pieces.get(parameter)
        found = torch.zeros_like(gradients[:1]) if piece is None else piece.instantiate().to_dense()
        torch.testing.assert_close(found, gradients[:1], rtol=1e-6, atol=1e-8)


def test_the_comparison_can_fail() -> None:
    module, batch = make("lenet", torch.float64)
    found = tapped(module, batch, loss)
    wrong = dict(expected("lenet", torch.float64))
    wrong["0.weight"] = wrong["0.weight"].roll(1, 0)
    with pytest.raises(AssertionError, match=r"0\.weight: off by"):
        compare(wrong, found)
