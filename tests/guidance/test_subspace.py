"""Subspace iteration: right values, orthonormal bases, the safe way where needed, few orders and waits for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dphero.geometry.factor import Factor
from dphero.geometry.low_rank import LowRank
from dphero.guidance import PCA, Block, Released, spectrum, subspace
from dphero.guidance.subspace import Iterations, Ritz, Start
from tests.guidance.far import Far, Orders


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight with four strong directions above a random bulk."""
    strong = randn(rows, 4, seed=seed + 100) @ randn(4, columns, seed=seed + 200)
    return ((randn(rows, columns, seed=seed) + strong) / columns**0.5).to(dtype)


def iterated(matrices: Sequence[Tensor], starts: Sequence[Start | None] | None = None, kept: int = 16) -> list[Ritz]:
    iterations = Iterations(matrices, starts or [None] * len(matrices), [kept] * len(matrices))
    return iterations.results(iterations.solve())


def defect(basis: Tensor) -> float:
    wide = basis.double()
    return float((wide.mT @ wide - torch.eye(wide.shape[1])).abs().max())


def ritz_values(matrix: Tensor, basis: Tensor) -> Tensor:
    """The values that belong to the span of a basis, by the definition."""
    inner = torch.linalg.qr(basis.double())[0].mT @ matrix.double()
    return torch.linalg.eigvalsh(inner @ inner.mT).flip(0)


def broken(kind: str) -> Tensor:
    if kind == "low rank":
        return (randn(100, 5) @ randn(5, 200)).float()
    if kind == "narrow":
        return randn(100, 9).float()
    if kind == "zero":
        return torch.zeros(100, 200)
    if kind == "steep":  # the columns of M M^T Q point all along the first directions
        return ((torch.linalg.qr(randn(100, 100))[0] * torch.arange(1, 101) ** -4.0) @ randn(100, 200, seed=1)).float()
    raise ValueError(kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_bases_and_the_claimed_defect(dtype: torch.dtype) -> None:
    shapes = [(100, 200), (150, 90), (100, 200), (100, 300)]  # three of them are stacked
    weights = [layer(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    found, wide = iterated(weights), dtype == torch.float64
    for side in ("right", "left", "right", "left"):  # warm, and moving
        weights = [w + 0.02 * w.std() * randn(*w.shape, seed=9).to(dtype) for w in weights]
        starts = [each.start for each in found]
        found = iterated(weights, starts)
        for w, start, each in zip(weights, starts, found, strict=True):
            assert start.side == side and defect(start.columns) < (1e-11 if wide else 3e-6)
            assert each.basis.shape == (len(w), 24) and each.basis.dtype == dtype
            assert each.defect is not None and defect(each.basis) <= each.defect < (1e-10 if wide else 6e-7)
            precision = {"rtol": 0, "atol": torch.finfo(dtype).eps * 20 * float(each.values[0])}
            own = w if side == "left" else w.mT
            torch.testing.assert_close(each.values, ritz_values(own, start.columns), **precision)
            assert bool((each.values <= ritz_values(w, each.basis) + precision["atol"]).all())
            assert each.total == pytest.approx(float(w.double().square().sum()), rel=1e-6)
            assert torch.allclose(each.values[:4], spectrum(w)[:4], rtol=1e-3)
            assert float(each.values.sum()) <= each.total


def test_going_to_and_fro_converges() -> None:
    """Each iteration starts where the one before ended; after some, nothing is left but rounding."""
    w = layer(100, 200, seed=4)
    (found,) = iterated([w])
    exact, errors = spectrum(w)[:16], []
    for _ in range(24):
        errors.append(float((found.values[:16] / exact - 1).abs().max()))
        (found,) = iterated([w], [found.start])
    assert errors[0] > 1e-3 > 1e-4 > errors[-1] and errors == sorted(errors, reverse=True)


def test_it_goes_as_far_as_the_classic_iteration_with_half_the_products() -> None:
    """Two iterations have the span of M M^T Q."""
    w = layer(100, 200, seed=4)
    (first,) = iterated([w])
    (second,) = iterated([w], [first.start])
    swept = torch.linalg.qr(w.double() @ (w.double().mT @ first.basis.double()))[0]
    overlap = torch.linalg.svdvals(swept.mT @ second.basis.double())
    assert float(overlap.min()) > 1 - 1e-6


def test_a_matrix_finds_the_same_alone_and_in_company() -> None:
    weights = [layer(100, 200, seed) for seed in range(3)]
    for w, each in zip(weights, iterated(weights), strict=True):
        (alone,) = iterated([w])
        torch.testing.assert_close(alone.values, each.values, rtol=1e-5, atol=0)
        assert torch.allclose(alone.basis @ alone.basis.mT, each.basis @ each.basis.mT, atol=1e-4)


@pytest.mark.parametrize("kind", ["low rank", "narrow", "zero", "steep"])
def test_dependent_columns_take_the_safe_way(kind: str) -> None:
    bad, good = broken(kind), layer(100, 200, seed=3)
    starts, safely = None, []
    for _ in range(5):
        low, full = iterated([bad, good], starts)
        starts = [low.start, full.start]
        safely.append(low.defect is None)
        assert full.defect is not None and defect(full.basis) <= full.defect
        assert defect(low.basis) <= (1e-5 if low.defect is None else low.defect)
        top = float(low.values[0])
        torch.testing.assert_close(low.values, ritz_values(bad, low.basis), rtol=0, atol=1e-5 * top)
        assert torch.allclose(full.values[:4], spectrum(good)[:4], rtol=1e-3)
    assert safely == [False, True, False, True, False], safely


def test_tiny_weights_are_as_good_as_any() -> None:
    w = layer(100, 200, seed=5)
    for factor in (2.0**-40, 2.0**40):
        starts = {1.0: None, factor: None}
        for _ in range(3):
            usual, other = (iterated([w * scale], start)[0] for scale, start in starts.items())
            torch.testing.assert_close(other.values, usual.values * factor**2, rtol=1e-6, atol=0)
            torch.testing.assert_close(other.basis @ other.basis.mT, usual.basis @ usual.basis.mT, rtol=0, atol=1e-5)
            starts = {1.0: [usual.start], factor: [other.start]}


def test_nearly_equal_columns_are_not_trusted() -> None:
    w = layer(100, 200, seed=0)
    (first,) = iterated([w])
    columns = first.basis.clone()
    columns[:, 1] = columns[:, 0] + 1e-3 * columns[:, 1]  # as no iteration returns it
    (found,) = iterated([w], [Start("left", columns)])
    assert found.defect is None and defect(found.basis) < 1e-5
    torch.testing.assert_close(found.values, ritz_values(w, found.basis), rtol=0, atol=1e-5 * float(found.values[0]))


def test_values_that_are_not_finite_are_told() -> None:
    bad, good = layer(100, 200, seed=0), layer(100, 200, seed=1)
    bad[3, 4] = torch.inf
    spoilt, sound = iterated([bad, good])
    assert not torch.tensor(spoilt.total).isfinite() and torch.tensor(sound.total).isfinite()
    assert sound.values.isfinite().all() and sound.basis.isfinite().all()


# -- on a GPU -----------------------------------------------------------------------------------------

SHAPES = [(10, 40), (32, 90), (32, 90), (64, 100), (100, 64), (100, 200), (100, 200), (150, 100), (150, 300)]


def refreshed(guidance: PCA, weights: Sequence[Tensor]) -> list[Factor]:
    blocks = tuple(Block(f"w{number}", w) for number, w in enumerate(weights))
    lefts = [geometry.left for geometry in guidance.geometry(Released(0, blocks, 1.0)).values()]
    return [left for left in lefts if left is not None]


def test_a_renewal_gives_a_gpu_few_orders_and_waits_for_it_thrice() -> None:
    near = [layer(*shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    far = [Far(w.clone()) for w in near]
    here, there, orders = PCA(), PCA(), Orders()
    for _ in range(2):
        expected = refreshed(here, near)
        orders = Orders()
        with orders:
            found = refreshed(there, far)
        for number, (w, other) in enumerate(zip(near, far, strict=True)):
            other.near.copy_(w.add_(0.01 * randn(*w.shape, seed=50 + number).float()))
    for mine, theirs in zip(found, expected, strict=True):
        for name, value in vars(theirs).items():  # a GPU is asked for what the CPU does
            got = vars(mine)[name]
            if isinstance(value, Tensor):  # but for memory that lies otherwise, which may change the last bits
                torch.testing.assert_close(got.near, value, rtol=0, atol=1e-6 * float(value.abs().max()), msg=name)
            else:
                assert got == pytest.approx(value, rel=1e-6) if isinstance(value, float) else got == value, name
    assert sum(isinstance(factor, LowRank) for factor in found) == 5
    assert sum(orders.waits.values()) <= 3, orders.waits  # exact grams; float32 and float64 of the iterations
    # An exact one takes four (gram, scales, two products), one by iteration six (four, scales, product).
    assert sum(orders.given.values()) <= 4 * 4 + 6 * 5 + 16, orders.given


def test_a_low_rank_weight_on_a_gpu_takes_the_safe_way() -> None:
    near = [broken("low rank"), layer(100, 200, seed=3)]
    far, start = [Far(w) for w in near], iterated(near)[0].start
    with Orders() as orders:
        first = iterated(far)
        cold = orders.waits["aten.linalg_qr"]
        low, full = iterated(far, [each.start for each in first])
    assert low.defect is None and full.defect is not None
    assert cold == 2 * subspace._COLD_SWEEPS and orders.waits["aten.linalg_qr"] == cold + 1
    torch.testing.assert_close(low.values[:5], iterated(near[:1], [start])[0].values[:5], rtol=1e-5, atol=0)
