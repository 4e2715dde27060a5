"""Models under autocast: norms and sums are those of micro-batches of one, up to what bfloat16 rounds on the way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.oracle.micro_batches import compare, micro_batches, tapped
from tests.oracle.test_zoo import geometry_of, loss, make

NAMES = ["lenet", "conv2d", "conv2d_wide_on_few_pixels", "gpt", "gpt_tied_by_matmul", "lora", "linear_wide"]
NAMES += ["tied_linear_layers", "lstm", "huggingface_conv1d", "attention_across"]


def short(module: nn.Module, *inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(module, *inputs).float()


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("cores", [True, False], ids=["tensor cores", "widened"])
@pytest.mark.parametrize("kind", ["isotropic", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_micro_batches(
    name: str, kind: str, cores: bool, request: pytest.FixtureRequest
) -> None:
    if cores:
        request.getfixturevalue("short_products")
    module, batch = make(name, torch.float32)
    geometry = geometry_of(kind, module)
    # oneDNN's products of bfloat16 are broken on some virtual machines (AMX without permission): do without
    with torch.backends.mkldnn.flags(enabled=False):
        expected = micro_batches(module, batch, short)
        compare(expected, tapped(module, batch, short, geometry), geometry, tolerance=0.02)
