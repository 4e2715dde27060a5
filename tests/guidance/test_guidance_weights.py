"""Guidance by the weights: the formula, its variants, the fast solver against the exact one, refusals."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dphero.geometry.dense import Dense
from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Geometry, factor_from_state
from dphero.geometry.low_rank import LowRank
from dphero.guidance import PCA, Block, Released, noise_scales, spectrum
from dphero.guidance import pca as weights
from dphero.guidance import spectra as solvers
from dphero.guidance.pca import ALGORITHM_2, INVERSE, THEOREM_2


def weight(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(dtype) / columns**0.5


def trained(rows: int, columns: int, strong: int, seed: int = 0) -> Tensor:
    """A weight with a few strong directions above a random bulk, as training leaves it."""
    generator = torch.Generator().manual_seed(seed + 1)
    signal = torch.randn(rows, strong, generator=generator) @ torch.randn(strong, columns, generator=generator)
    return weight(rows, columns, seed) + 0.1 * signal / strong**0.5


def released(value: Tensor, **block: Any) -> Released:
    return Released(0, (Block("w", value, **block),), 1.0)


def only(guidance: PCA, value: Tensor, **block: Any) -> Geometry:
    return guidance.geometry(released(value, **block))["w"]


def formula(matrix: Tensor, exponent: float, floor: float) -> Tensor:
    """A, by the definition."""
    values, basis = torch.linalg.eigh((matrix @ matrix.T).double())
    v = (values / values.mean() + floor) ** exponent
    v = v * math.sqrt(len(v)) / v.norm()
    return basis @ v.diag() @ basis.T


def dense(factor: Factor | None) -> Tensor:
    assert factor is not None
    return factor.colour(torch.eye(factor.size, dtype=torch.float64))


@pytest.mark.parametrize("exponent", [0.25, THEOREM_2, ALGORITHM_2, INVERSE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_formula(exponent: float, dtype: torch.dtype) -> None:
    w = weight(12, 40, dtype=dtype)
    geometry = only(PCA(exponent, floor=0.1), w)
    assert geometry.right is None and geometry.flat is None and geometry.left is not None
    torch.testing.assert_close(dense(geometry.left), formula(w.double(), exponent, 0.1), rtol=1e-3, atol=1e-4)
    assert float(geometry.left.variance().sum()) == pytest.approx(12, rel=1e-5)
    assert geometry.left.dtype == dtype


def test_more_noise_where_the_weights_are_strong_and_less_for_the_inverse() -> None:
    w = torch.diag(torch.tensor([3.0, 1.0, 1.0]))
    for exponent, ordered in ((0.25, True), (-0.25, False)):
        variance = only(PCA(exponent), w).left.variance()  # type: ignore[union-attr]
        assert bool(variance[0] > variance[1]) == ordered


def test_exponent_zero_is_isotropic() -> None:
    assert PCA(0.0).geometry(Released(0, (Block("w", weight(4, 5)),), 1.0)) == {}


def test_sides_follow_the_feature_axis() -> None:
    w = weight(5, 30)
    left = formula(w, 0.25, 0.1)
    right = formula(w.T, 0.25, 0.1)
    cases: list[tuple[Any, Any, bool, bool]] = [
        ("left", "rows", True, False), ("right", "rows", False, True), ("both", "rows", True, True),
        ("left", "columns", False, True), ("right", "columns", True, False), ("both", "columns", True, True),
    ]  # fmt: skip
    for side, features, has_left, has_right in cases:
        geometry = only(PCA(side=side), w, features=features)
        assert (geometry.left is not None, geometry.right is not None) == (has_left, has_right)
        if has_left:
            torch.testing.assert_close(dense(geometry.left), left, rtol=1e-3, atol=1e-4)
        if has_right:
            torch.testing.assert_close(dense(geometry.right), right, rtol=1e-3, atol=1e-4)


def test_a_convolution_is_a_matrix_of_output_features() -> None:
    w = weight(6, 18).reshape(6, 2, 3, 3)
    torch.testing.assert_close(dense(only(PCA(), w).left), formula(w.reshape(6, 18), 0.25, 0.1), rtol=1e-3, atol=1e-4)


def test_biases_share_and_plain_blocks_stay_out() -> None:
    blocks = (
        Block("w", weight(6, 9)),
        Block("b", torch.zeros(6), shares="w"),
        Block("norm", torch.ones(6), plain=True),
        Block("scale", torch.tensor(1.0), plain=True),
        Block("plain2d", weight(3, 3), plain=True),
        Block("embedding", weight(20, 6), features="columns"),
        Block("tied", torch.zeros(20), shares="embedding"),
    )
    found = PCA().geometry(Released(3, blocks, 1.0))
    assert set(found) == {"w", "b", "embedding"}
    assert found["b"].left is found["w"].left and found["b"].shape == (6,)
    both = PCA(side="both").geometry(Released(3, blocks, 1.0))
    assert both["tied"].left is both["embedding"].left


def test_centring_removes_the_mean_of_the_columns() -> None:
    w = weight(6, 40) + torch.arange(6.0)[:, None]
    centred = w - w.mean(1, keepdim=True)
    left = dense(only(PCA(centred=True), w).left)
    torch.testing.assert_close(left, formula(centred, 0.25, 0.1), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(left, formula(w, 0.25, 0.1), atol=1e-1)


@pytest.mark.parametrize("solver", ["eigh", "subspace"])
def test_rank_gives_the_rest_the_floor(solver: Any) -> None:
    w = trained(40, 200, 3)
    factor = only(PCA(exponent=0.5, floor=0.2, rank=3, solver=solver), w).left
    assert isinstance(factor, LowRank) and factor.basis.shape == (40, 3)
    values = spectrum(w)
    v = (values / values.mean() + 0.2) ** 0.5
    v[3:] = 0.2**0.5
    v = v * math.sqrt(40) / v.norm()
    torch.testing.assert_close(factor.scales.double().sort(descending=True).values, v[:3], rtol=1e-3, atol=1e-3)
    assert factor.rest == pytest.approx(float(v[-1]), rel=1e-3)
    full = only(PCA(rank=40, solver=solver), w).left
    assert isinstance(full, Dense)


def test_one_normalisation_for_the_model() -> None:
    small, large = weight(5, 30), 3.0 * weight(8, 30, seed=1)
    blocks = (Block("small", small), Block("large", large))
    found = PCA(exponent=0.5, scope="model").geometry(Released(0, blocks, 1.0))
    values = torch.cat([spectrum(small), spectrum(large)])
    v = (values / values.mean() + 0.1) ** 0.5
    v = v * math.sqrt(13) / v.norm()
    got = torch.cat([torch.linalg.svdvals(dense(found[name].left)) for name in ("small", "large")])
    torch.testing.assert_close(got, v, rtol=1e-4, atol=1e-4)
    assert found["small"].left.largest < found["large"].left.smallest  # type: ignore[union-attr]


def test_single_rows_and_zero_weights_are_isotropic() -> None:
    assert PCA().geometry(Released(0, (Block("w", weight(1, 9)),), 1.0)) == {}
    for shape in ((4, 9), (300, 9)):
        factor = only(PCA(), torch.zeros(shape)).left
        assert factor is not None and factor.smallest == pytest.approx(1.0) == factor.largest


@pytest.mark.parametrize("exponent", [THEOREM_2, INVERSE])
def test_without_a_floor_rank_deficiency_is_an_error(exponent: float) -> None:
    for w in (weight(9, 4), weight(9, 4) @ weight(4, 30), torch.zeros(3, 5), weight(200, 30)):
        with pytest.raises(ValueError, match=r"'w' is rank deficient.*set floor > 0"):
            only(PCA(exponent, floor=0.0), w)
    with pytest.raises(ValueError, match="rank deficient"):
        only(PCA(exponent, floor=0.0, rank=2), weight(5, 30))
    with pytest.raises(ValueError, match="rank deficient"):
        only(PCA(exponent, floor=0.0, solver="subspace"), weight(200, 8))
    assert only(PCA(exponent, floor=0.0), weight(5, 30)).smallest > 0


def test_bare_directions_get_no_noise_and_cannot_be_whitened() -> None:
    w = weight(9, 4)
    found = only(PCA(THEOREM_2, floor=0.0, bare=True), w)
    assert found.smallest == 0.0
    noise = found.colour(torch.randn(9, 4, dtype=torch.float64))
    outside = torch.linalg.svd(w.double())[0][:, 4:]  # the directions that the weight lacks
    assert (outside.mT @ noise).abs().max() < 1e-6 < noise.abs().max()
    assert noise_scales(spectrum(w), THEOREM_2).min() == 0.0
    again = Geometry.from_state(found.state())
    torch.testing.assert_close(again.colour(torch.eye(9, 4)), found.colour(torch.eye(9, 4)))
    with pytest.raises(ValueError, match="no privacy"):
        found.whiten(torch.randn(9, 4))
    with pytest.raises(ValueError, match="rank deficient"):
        only(PCA(INVERSE, floor=0.0, bare=True), w)


def test_without_a_floor_small_eigenvalues_survive_float32_weights() -> None:
    # A square layer at initialisation: in float32 the smallest eigenvalue of W W^T would be rounding error.
    w = weight(150, 150, seed=4)
    geometry, v = only(PCA(THEOREM_2, floor=0.0), w), noise_scales(spectrum(w), THEOREM_2)
    assert geometry.smallest == pytest.approx(float(v.min()), rel=1e-4)
    assert geometry.smallest < 1e-3
    x = torch.randn(20, 150, 150, generator=torch.Generator().manual_seed(0))
    assert (geometry.whiten(geometry.colour(x)) - x).norm() / x.norm() < 1e-2  # limited by float32 in between


def test_raw_spectrum_and_published_scales() -> None:
    w = weight(9, 4)
    values = spectrum(w)
    assert values.dtype == torch.float64 and bool((values[:-1] >= values[1:]).all())
    assert int((values > 0).sum()) == 4 and float(values[-1]) == 0.0
    assert float(values.sum()) == pytest.approx(float(w.double().square().sum()), rel=1e-12)
    assert float(noise_scales(values, THEOREM_2).min()) == 0.0
    assert float(noise_scales(values, INVERSE).min()) == 0.0
    assert float(noise_scales(torch.zeros(3), THEOREM_2).min()) == 0.0
    assert float(spectrum(w, features="columns")[-1]) > 0.0
    assert float(spectrum(torch.ones(3, 50) * 0.1 + torch.arange(3.0)[:, None], centred=True).max()) == 0.0
    v = noise_scales(spectrum(weight(84, 120)), THEOREM_2)
    assert float(v.square().sum()) == pytest.approx(84)
    assert 0.01 < float(v.min()) < 0.04  # LeNet's 84 x 120 layer: 0.024 on average


@pytest.mark.parametrize("columns", [256, 2048])
def test_subspace_matches_eigh_with_the_tail_at_its_mean(columns: int) -> None:
    w = trained(512, columns, 16)
    guidance = PCA(solver="subspace")
    factor = only(guidance, w).left
    assert isinstance(factor, LowRank)
    values, basis = torch.linalg.eigh((w @ w.T).double())
    model = torch.cat([values[:-16].mean().expand(496), values[-16:]])
    v = (model / model.mean() + 0.1) ** 0.25
    v = v * math.sqrt(512) / v.norm()
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    predicted = x @ (basis / v) @ basis.T
    error = (factor.whiten(x) - predicted).norm() / predicted.norm()
    assert error < 1e-3
    isotropic = (x - predicted).norm() / predicted.norm()
    assert isotropic > 20 * error  # the test has power


def test_subspace_without_a_gap_still_finds_the_spectrum() -> None:
    w = weight(512, 2048)  # a random weight: nothing stands out
    factor = only(PCA(solver="subspace"), w).left
    assert isinstance(factor, LowRank)
    ((found, _),) = solvers.Search([solvers.Wanted(w, "w", 16)]).results()
    truth = spectrum(w)
    assert float((found.values / truth[:16]).min()) > 0.9 and float((found.values / truth[:16]).max()) < 1.0001
    assert found.rest == pytest.approx(float(truth[16:].mean()), rel=0.01)
    assert float(factor.variance().sum()) == pytest.approx(512, rel=1e-5)


def test_warm_starts_follow_moving_weights() -> None:
    w, guidance = trained(300, 400, 6), PCA(components=6)
    drift = 0.02 * weight(300, 400, seed=9)
    for step in range(4):
        factor = only(guidance, w + step * drift).left
    assert isinstance(factor, LowRank)
    basis = torch.linalg.eigh((w + 3 * drift) @ (w + 3 * drift).T)[1][:, -6:]
    overlap = torch.linalg.svdvals(basis.T @ factor.basis)
    assert float(overlap.min()) > 0.999


def test_deterministic_and_no_global_randomness() -> None:
    w = trained(200, 300, 4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = only(PCA(), w)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first.whiten(w), only(PCA(), w).whiten(w))


def test_state_resumes_bitwise() -> None:
    w, drift = trained(200, 300, 4), 0.1 * weight(200, 300, seed=3)
    guidance = PCA(side="both")
    only(guidance, w)
    buffer = io.BytesIO()
    torch.save(guidance.state_dict(), buffer)
    buffer.seek(0)
    again = PCA(side="both")
    again.load_state_dict(torch.load(buffer, weights_only=True))
    expected = only(guidance, w + drift).whiten(w)
    assert torch.equal(only(again, w + drift).whiten(w), expected)
    assert not torch.equal(only(PCA(side="both"), w + drift).whiten(w), expected)
    with pytest.raises(ValueError, match=r"exponent: saved 0\.25, here 1\.0"):
        PCA(THEOREM_2, side="both").load_state_dict(guidance.state_dict())


def test_a_state_of_an_older_version_starts_its_iterations_anew() -> None:
    w, guidance = trained(200, 300, 4), PCA()
    older = {"settings": guidance.state_dict()["settings"], "bases": {"w:rows": weight(200, 24)}}
    guidance.load_state_dict(older)
    assert torch.equal(only(guidance, w).whiten(w), only(PCA(), w).whiten(w))


@pytest.mark.parametrize("rows", [48, 150])
def test_factors_come_back_from_their_state_bit_for_bit(rows: int) -> None:
    # Whatever their condition: those on the verge of float64 stay on their side of it.
    w, found = trained(rows, 300, 4), set()
    for exponent in torch.linspace(0.5, 4.0, 36).tolist():
        factor = only(PCA(exponent), w).left
        assert factor is not None
        again = factor_from_state(factor.state())
        found.add(factor.dtype)
        assert vars(again).keys() == vars(factor).keys()
        for name, value in vars(factor).items():
            if isinstance(value, Tensor):
                assert value.dtype == vars(again)[name].dtype and torch.equal(value, vars(again)[name]), name
            elif name not in ("smallest", "largest"):
                assert value == vars(again)[name], name
    assert found == {torch.float32, torch.float64}


@pytest.mark.parametrize("side", ["left", "both"])
def test_what_was_prepared_is_the_next_geometry(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The geometry is that of the weights as they were a step before."""
    monkeypatch.setattr(weights, "_AHEAD", ("cpu",))
    before, after = trained(90, 200, 5), 2 * trained(90, 200, 7, seed=1)
    guidance, moving = PCA(side=side), before.clone()
    guidance.prepare(released(moving))
    moving.copy_(after)  # as an optimizer does, in place
    assert torch.equal(only(guidance, moving).whiten(before), only(PCA(side=side), before).whiten(before))
    assert not torch.equal(only(guidance, moving).whiten(before), only(PCA(side=side), before).whiten(before))


def test_low_precision_weights_are_decomposed_in_float32() -> None:
    geometry = only(PCA(), weight(20, 40).bfloat16())
    assert geometry.left is not None and geometry.left.dtype == torch.float32
    assert geometry.colour(torch.ones(20, 40, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_diverged_weights_are_named() -> None:
    for rows in (4, 300):
        w = weight(rows, 9)
        w[1, 2] = math.nan
        with pytest.raises(ValueError, match="'w' holds NaN"):
            only(PCA(), w)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_diverge_in_training_are_named(bad: float) -> None:
    """The iteration then starts from good columns."""
    guidance, w = PCA(), weight(300, 200)
    only(guidance, w)
    w[1, 2] = bad
    with pytest.raises(ValueError, match="'w' holds NaN"):
        only(guidance, w)


@pytest.mark.parametrize(
    "wrong",
    [{"side": "top"}, {"scope": "all"}, {"solver": "qr"}, {"floor": -1.0}, {"floor": math.nan}, {"rank": 0}],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PCA(**wrong)
