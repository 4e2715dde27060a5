"""The rule from spectra to factors, for many spectra at once: what each is alone, in few operations."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dphero.geometry.diagonal import Diagonal
from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Digests, Geometry
from dphero.guidance import PCA, Block, Released
from dphero.guidance import pca as weights
from dphero.guidance.rule import factors
from dphero.guidance.spectra import Search, Spectrum, Wanted
from tests.guidance.far import Far, Orders

SHAPES = [(12, 15), (12, 40), (10, 30), (96, 200), (96, 96)]


def layers(shapes: list[tuple[int, int]]) -> list[Tensor]:
    return [
        torch.randn(s, generator=torch.Generator().manual_seed(n)) / s[1] ** 0.5 * (n + 1) for n, s in enumerate(shapes)
    ]


def spectra() -> list[Spectrum]:
    """Of both kinds, one all zeros, and two along the coordinate axes."""
    matrices = [*layers(SHAPES), torch.zeros(6, 7)]
    wanted = [Wanted(m, str(n), 16 if len(m) > 64 else None) for n, m in enumerate(matrices)]
    axes = [
        torch.rand(9, dtype=dtype, generator=torch.Generator().manual_seed(1))
        for dtype in (torch.float32, torch.float64)
    ]
    return [
        *(spectrum for spectrum, _ in Search(wanted).results()),
        *(Spectrum("axes", values, None, len(values), float(values.sum())) for values in axes),
    ]


def by_definition(found: list[Spectrum], exponent: float, floor: float) -> list[Tensor]:
    """v, for spectra that are normalised together; the last one is that of directions not resolved."""
    whole = [torch.cat([s.values.double(), torch.full((s.size - len(s.values),), s.rest).double()]) for s in found]
    count = sum(map(len, whole))
    mean = sum(float(each.sum()) for each in whole) / count
    raised = [((each / mean if mean > 0 else torch.ones_like(each)) + floor) ** exponent for each in whole]
    unit = (count / sum(float(each.square().sum()) for each in raised)) ** 0.5
    return [each * unit for each in raised]


def made(factor: Factor, like: Tensor) -> Tensor:
    assert isinstance(getattr(factor, "scales", None), Tensor)
    rest = torch.full((factor.size - len(factor.scales),), getattr(factor, "rest", 0.0))  # type: ignore[attr-defined]
    return torch.cat([factor.scales, rest]).to(like)  # type: ignore[attr-defined]


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("exponent", [0.25, 0.5, 0.3, 1.0, -1.0])
def test_many_follow_the_definition(scope: str, exponent: float) -> None:
    found = spectra()
    groups = [found] if scope == "model" else [[each] for each in found]
    expected = [v for group in groups for v in by_definition(group, exponent, 0.1)]
    for factor, v in zip(factors(found, exponent, 0.1, scope=scope), expected, strict=True):
        torch.testing.assert_close(made(factor, v), v, rtol=1e-5, atol=0)
    assert factors([], exponent, 0.1, scope=scope) == []


@pytest.mark.parametrize("exponent", [0.25, 0.3])
def test_a_layer_gets_the_same_in_any_company(exponent: float) -> None:
    found = spectra()
    for factor, each in zip(factors(found, exponent, 0.1), found, strict=True):
        (alone,) = factors([each], exponent, 0.1)
        assert type(factor) is type(alone)
        for name, value in alone.state().items():
            if name != "kind":
                torch.testing.assert_close(factor.state()[name], value, rtol=1e-6, atol=0)
    kept = [each.values.clone() for each in found]
    factors(found, exponent, 0.1)
    assert all(torch.equal(each.values, before) for each, before in zip(found, kept, strict=True))


def test_scales_along_the_axes_keep_their_precision() -> None:
    single, double = factors(spectra(), 0.25, 0.1)[-2:]
    assert isinstance(single, Diagonal) and (single.dtype, double.dtype) == (torch.float32, torch.float64)


class Operations(TorchDispatchMode):
    """Counts all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def finishing(shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns how many operations finish a renewal, and find its digest, once the spectra are known."""
    monkeypatch.setattr(weights, "_AHEAD", ("cpu",))
    guidance, moving, operations = PCA(), layers(shapes), Operations()
    blocks = tuple(Block(str(n), w) for n, w in enumerate(moving))
    for _ in range(2):
        guidance.prepare(Released(0, blocks, 1.0))
        for search in guidance._begun.values():
            assert search._solved is not None
            search._solved.result()
        operations = Operations()
        with operations:
            found = guidance.geometry(Released(0, blocks, 1.0))
            Digests([*found.values()]).found()
    return operations.count.total()


def test_a_layer_more_costs_few_operations_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    few, exact, iterated = (finishing(SHAPES + 4 * more, monkeypatch) for more in ([], [(12, 40)], [(96, 200)]))
    # A third of them are the factor's products and views, a third the digest's looks at its tensors.
    assert exact - few <= 4 * 28, (few, exact)
    assert iterated - few <= 4 * 31, (few, iterated)


def test_a_gpu_is_sent_two_pieces_a_renewal_and_none_a_layer() -> None:
    """What is decomposed in float64, and all that is to be had in float32."""
    for more in ([], [(12, 40), (10, 30), (96, 96), (96, 200)]):
        far = [Far(w) for w in layers(SHAPES + more)]
        guidance, sent = PCA(), Counter[str]()
        for _ in range(3):
            with Orders() as orders:
                found = guidance.geometry(Released(0, tuple(Block(str(n), w) for n, w in enumerate(far)), 1.0))
            sent = orders.given
            assert all(isinstance(geometry, Geometry) for geometry in found.values())
        casts = 1 + 1  # of what is iterated, to float64 and back, for all of a size at once
        right = sum(len(w) > 64 for w in far) * (
            guidance._starts["3:rows"].side == "right"
        )  # what they start from next
        assert sent["aten._to_copy"] == 2 + 2 + casts + right, sent  # sent, fetched
