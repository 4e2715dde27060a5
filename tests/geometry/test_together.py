"""Factors made many at a time: bit for bit those of the constructors, and checked as strictly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dphero.geometry.basis import orthonormality_defect
from dphero.geometry.dense import Dense, Singular
from dphero.geometry.factor import Factor
from dphero.geometry.low_rank import LowRank
from dphero.geometry.together import Known, together
from dphero.numerics import products
from tests.guidance.far import DEVICE, Far, Orders

CPU = torch.device("cpu")


def basis(size: int, rank: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64))[0].to(dtype).contiguous()


def scales(size: int, seed: int, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread ** torch.rand(size, generator=generator, dtype=torch.float64)


def known(name: str, u: Tensor, v: Tensor, rest: float = 0.9, **other: Any) -> Known:
    return Known(name, u, v, rest, **{"defect": orthonormality_defect(u), "device": CPU, **other})


def several() -> list[Known]:
    """Both kinds and precisions, some alike; for some, float32 is too short; some are left to constructors."""
    steep = scales(64, 5, 1e7)
    return [
        known("dense", basis(10, 10, 0), scales(10, 0)),
        known("low rank", basis(64, 16, 1), scales(16, 1)),
        known("alike", basis(64, 16, 2), scales(16, 2)),
        known("weaker than the rest", basis(64, 16, 3), scales(16, 3), 1.5),
        known("alike again", basis(64, 16, 4), scales(16, 4)),
        known("steep", basis(64, 64, 5), steep),
        known("steep low rank", basis(64, 16, 6), scales(16, 6, 1e6)),
        known("double", basis(12, 12, 7, torch.float64), scales(12, 7)),
        known("of unknown defect", basis(12, 12, 8), scales(12, 8), defect=None),
        known("bare", basis(6, 6, 9), torch.tensor([0.0, 1, 2, 3, 4, 5], dtype=torch.float64), bare=True),
        known("odd", basis(27, 5, 10), scales(5, 10)),
        known("short", basis(8, 8, 11, torch.bfloat16), scales(8, 11), defect=2.0**-7),
    ]


def constructed(each: Known) -> Factor:
    if each.bare:
        return Singular(each.basis, each.scales)
    if each.basis.shape[0] == each.basis.shape[1]:
        return Dense(each.basis, each.scales, defect=each.defect)
    return LowRank(each.basis, each.scales, each.rest, defect=each.defect)


def assert_same(found: Factor, expected: Factor, near: bool = False) -> None:
    assert type(found) is type(expected) and vars(found).keys() == vars(expected).keys()
    for name, value in vars(expected).items():
        got = vars(found)[name]
        if isinstance(value, Tensor):
            got = got.near if near else got
            assert (got.dtype, got.shape) == (value.dtype, value.shape) and torch.equal(got, value), name
            assert name == "basis" or got.stride() == value.stride(), name  # else products may round otherwise
        else:
            assert got == value, name


@pytest.mark.parametrize("on_tensor_cores", [False, True])
def test_together_they_are_what_each_is_alone(on_tensor_cores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "on_tensor_cores", lambda x: on_tensor_cores)
    found = together(several())
    for each, factor in zip(several(), found, strict=True):
        assert_same(factor, constructed(each))
    assert {factor.dtype for factor in found} == {torch.float32, torch.float64}
    assert together([]) == []


def test_alike_ones_are_formed_together_on_a_gpu_and_all_numbers_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "on_tensor_cores", lambda x: True)
    expected = several()[1:5]
    # as an iteration leaves them: columns of something wider
    there = [each._replace(basis=Far(torch.cat([each.basis, each.basis], 1)), device=DEVICE) for each in expected]
    with Orders() as orders:
        found = together([each._replace(basis=each.basis[:, :16]) for each in there])
    for factor, each in zip(found, expected, strict=True):
        assert_same(factor, constructed(each), near=True)
    # Numbers; a stack, a product and six parts for the three that are alike; a product and six parts for the other.
    assert sum(orders.given.values()) == 1 + 8 + 7 and not orders.waits, orders.given


def test_bases_of_the_cpu_go_with_the_numbers() -> None:
    expected = several()[:8]
    with Orders() as orders:
        found = together([each._replace(device=DEVICE) for each in expected[:5]])
        together([expected[7]._replace(device=DEVICE)])
    for factor, each in zip(found, expected[:5], strict=True):
        assert_same(factor, constructed(each), near=True)
    assert orders.given["aten._to_copy"] == 2, orders.given  # float32, and float64


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e300])
@pytest.mark.parametrize("rank", [3, 8])
def test_a_bad_scale_is_refused_by_name(bad: float, rank: int) -> None:
    v = scales(rank, 0)
    v[1] = bad
    good = known("good", basis(8, 8, 0), scales(8, 0))
    with pytest.raises(ValueError, match=r"block 'bad': .*floor"):
        together([good, known("bad", basis(8, rank, 1), v)])
    if rank < 8:
        with pytest.raises(ValueError, match=r"block 'bad': .*floor"):
            together([good, known("bad", basis(8, rank, 1), scales(rank, 1), bad if bad < 1e300 else math.inf)])


@pytest.mark.parametrize("rank", [3, 8])
def test_a_bad_basis_is_refused_or_made_anew_whoever_makes_it(rank: int) -> None:
    with pytest.raises(ValueError, match=r"block 'bad': .*orthonormal"):
        together([known("bad", 2 * basis(8, rank, 0), scales(rank, 0))])
    with pytest.raises(ValueError, match=r"block 'bad': .*orthonormal"):
        together([known("bad", basis(8, rank, 0), scales(rank, 0), defect=math.nan)])
    poor = basis(8, rank, 0) + 1e-5
    found = together([known("poor", poor, scales(rank, 0, 1e4), 1.0)])[0]
    x = torch.randn(5, 8, dtype=torch.float64)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.whiten(found.colour(x)), x, rtol=1e-6, atol=1e-6)
