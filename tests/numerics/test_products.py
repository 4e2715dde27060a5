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


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("at_a_time", [1, 1 << 24])
def test_a_square_product_of_parted_numbers(
    dropped: bool, at_a_time: int, short_products: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its symmetric part is right, even if what multiplies drops all but 11 bits, as TF32 does."""
    monkeypatch.setattr(products, "_SOME", at_a_time)  # 64 columns, or all of them
    multiply, add = torch.bmm, torch.Tensor.baddbmm_

    def kept(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        return (x.view(torch.int32).bitwise_and(-(1 << 13)).view(torch.float32) if dropped else x).double()

    monkeypatch.setattr(torch, "bmm", lambda a, b: multiply(kept(a), kept(b)))
    monkeypatch.setattr(torch.Tensor, "baddbmm_", lambda x, a, b, alpha=1: add(x, kept(a), kept(b), alpha=alpha))
    torch.manual_seed(0)
    for x in (torch.randn(3, 17, 60), torch.rand(3, 17, 60) + 1e-3, torch.full((1, 4, 300), 1 / 3)):
        found, true = products.square_product(x).double(), x.double() @ x.double().mT
        lengths = x.double().norm(dim=2)
        gap = ((found + found.mT) / 2 - true).abs()
        assert bool((gap <= products.PARTING_ERROR * lengths[:, :, None] * lengths[:, None]).all())
        assert bool(((found - found.mT).abs() / 2 <= 2.0**-9 * lengths[:, :, None] * lengths[:, None]).all())
    if dropped:  # and one product of numbers so short would not be
        assert bool(((multiply(kept(x), kept(x).mT) - true).abs() > 1e-4 * lengths[:, :, None] ** 2).any())


@pytest.mark.gpu
def test_on_a_gpu_only_the_addition_rounds() -> None:
    torch.manual_seed(0)
    for size in (768, 4096, 50257):
        for kind in ("plain", "cancelling", "of one sign"):
            a, b = torch.randn(64, size, device="cuda"), torch.randn(size, 96, device="cuda")
            if kind == "of one sign":
                a, b = a.abs(), b.abs()
            if kind == "cancelling":
                half = size // 2
                a[:, half : 2 * half], b[half : 2 * half] = -a[:, :half], b[:half]
            for x, y in ((a.bfloat16(), b.bfloat16()), (a, b)):
                gap = (products.product(x, y) - x.double() @ y.double()).abs()
                assert bool((gap <= 1e-6 * size**0.25 * (x.double().abs() @ y.double().abs())).all())
        x = a[None]
        found, lengths = products.square_product(x).double(), x.double().norm(dim=2)
        gap = ((found + found.mT) / 2 - x.double() @ x.double().mT).abs()
        bound = products.PARTING_ERROR + 4e-7 * size**0.25
        assert bool((gap <= bound * lengths[:, :, None] * lengths[:, None]).all())


@pytest.mark.gpu
def test_on_a_gpu_sizes_need_not_be_aligned() -> None:
    torch.manual_seed(0)
    for shape in ((3, 197, 768), (2, 49, 33), (1, 7, 5), (2, 1, 9)):
        x = torch.randn(shape, device="cuda").bfloat16()
        y = torch.randn(shape[0], shape[2], shape[1] + 3, device="cuda").bfloat16()
        for a, b in ((x, x.mT), (x, y), (y.mT, x.mT), (x[:1].expand(shape), y)):
            torch.testing.assert_close(products.product(a, b).double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)
    x = torch.randn(3, 13, device="cuda").bfloat16()
    assert torch.equal(products.aligned(x), x) and products.aligned(x).stride() == (16, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_without_tensor_cores_numbers_are_widened(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(20, 30).to(dtype), torch.randn(30, 10).to(dtype)
    found = products.product(a, b)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    assert products.short_parts(torch.randn(3, 2)) is None
