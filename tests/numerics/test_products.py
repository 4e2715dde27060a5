"""Products of bfloat16 numbers: exact but for the addition, on tensor cores as without them."""

from __future__ import annotations

import pytest
import torch

from dphero.numerics import products


def short(*shape: int) -> torch.Tensor:
    """Numbers in bfloat16 of all sizes, in which products overlap with nothing by chance."""
    return (torch.randn(shape) * 2.0 ** torch.randint(-20, 20, shape)).bfloat16()


def test_products_are_exact(short_products: None) -> None:
    torch.manual_seed(0)
    a, b = short(3, 40, 1), short(3, 1, 30)  # a single term each: nothing is added
    assert torch.equal(products.product(a, b).double(), a.double() @ b.double())
    assert torch.equal(products.product(a[0], b[0]).double(), a[0].double() @ b[0].double())
    long = products.product(short(50, 300), short(300, 20))
    assert long.dtype == torch.float32


def test_a_weighted_number_is_held_exactly(short_products: None) -> None:
    torch.manual_seed(0)
    x, weights = short(50, 7, 11), torch.rand(50)
    near, rest = products.weighted_in_two(x, weights)
    kept = products.rounded_weights(weights)
    assert torch.equal(near.double() - rest.double(), x.double() * kept.double().view(-1, 1, 1))
    assert bool((kept <= weights * (1 + products.WEIGHT_ROUNDING)).all())
    assert near.dtype == rest.dtype == torch.bfloat16
    assert not torch.equal(near.double(), x.double() * kept.double().view(-1, 1, 1))  # one number is not enough


def test_a_narrow_matrix_is_split_without_a_rest(short_products: None) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(60, 5)
    parts = products.short_parts(matrix)
    assert parts is not None
    assert torch.equal(parts.double().unflatten(1, (3, 5)).sum(1), matrix.double())
    x = short(4, 9, 60)
    found, true = products.thin_product(x, matrix, parts), x.double() @ matrix.double()
    assert bool(((found - true).abs() <= 2e-6 * x.double().abs() @ matrix.double().abs()).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_without_tensor_cores_numbers_are_widened(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(20, 30).to(dtype), torch.randn(30, 10).to(dtype)
    found = products.product(a, b)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    assert products.short_parts(torch.randn(3, 2)) is None
