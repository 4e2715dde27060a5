"""Clip rules, and the clipped sum of a lot: no example adds more than C, whatever it holds."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dphero.geometry.geometry import identity
from dphero.gradients.batch import GradientBatch
from dphero.gradients.piece import Explicit
from dphero.mechanism.clipping import Adaptive, Clipping, make_clipping, total
from dphero.mechanism.lot_sum import LotSum
from tests.trainer import same, training

RULES = ["flat", "per_layer", "automatic", "adaptive"]
LAYERS = {"one.weight": "one", "one.bias": "one", "two.weight": "two"}
SHAPES = {"one.weight": (2, 3), "one.bias": (2,), "two.weight": (3,)}


def rule(kind: Any, norm: float = 1.0, lot: float = 10.0, noise_multiplier: float = 1.0) -> Clipping:
    return make_clipping(kind, norm, expected_lot=lot, noise_multiplier=noise_multiplier, layers=LAYERS)


def batch(gradients: dict[str, Tensor]) -> GradientBatch:
    pieces = {name: Explicit(values) for name, values in gradients.items()}
    squares = {name: piece.square_norms(identity(SHAPES[name])) for name, piece in pieces.items()}
    return GradientBatch(len(next(iter(gradients.values()))), dict(pieces), squares)


def gradients(rows: int, scale: float = 1.0, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(rows, *shape, generator=generator) for name, shape in SHAPES.items()}


def norm(sums: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in sums.values()))


# -- the bound -------------------------------------------------------------------------------------------------

sizes = st.one_of(st.just(0.0), st.floats(-18, 18).map(lambda power: 10.0**power))


@pytest.mark.parametrize("kind", RULES)
@given(bound=st.floats(1e-3, 1e3), scales=st.tuples(sizes, sizes, sizes), rows=st.integers(1, 64))
def test_one_example_never_adds_more_than_the_bound(
    kind: str, bound: float, scales: tuple[float, float, float], rows: int
) -> None:
    """Over all parameters together, at any size of the parts, as mean or as sum of the loss."""
    one = {name: scale * values / rows for scale, (name, values) in zip(scales, gradients(1).items(), strict=True)}
    added = LotSum(rule(kind, bound))
    added.add(batch(one), real=1, scale=rows)
    assert norm(added.sums) <= bound * (1 + 1e-5)
    assert added.diagnostics.nonfinite == 0 or max(scales) > 1e15


@pytest.mark.parametrize("kind", RULES)
def test_without_the_rule_the_bound_is_broken(kind: str) -> None:
    """The property test above has power: weights of one break it."""
    clipping = rule(kind)
    clipping.weights = lambda squares: {name: torch.ones_like(s) for name, s in squares.items()}  # type: ignore[method-assign]
    added = LotSum(clipping)
    added.add(batch(gradients(1, 10.0)), real=1, scale=1)
    assert norm(added.sums) > 10


@given(st.floats(1e-2, 10), st.lists(st.floats(0, 10), min_size=1, max_size=8))
def test_flat_clipping_leaves_small_gradients_alone(bound: float, norms: list[float]) -> None:
    squares = {"two.weight": torch.tensor(norms, dtype=torch.float64) ** 2}
    weights = rule("flat", bound).weights(squares)["two.weight"]
    expected = [1.0 if value <= bound else bound / value for value in norms]
    assert weights.tolist() == pytest.approx(expected)


def test_each_layer_has_its_share() -> None:
    squares = {name: torch.tensor([4.0]) for name in LAYERS}
    weights = rule("per_layer", 1.0).weights(squares)
    share = 1 / math.sqrt(2)
    assert float(weights["one.weight"]) == float(weights["one.bias"]) == pytest.approx(share / math.sqrt(8))
    assert float(weights["two.weight"]) == pytest.approx(share / 2)


def test_automatic_clipping_normalises() -> None:
    weights = rule("automatic", 2.0).weights({"two.weight": torch.tensor([0.0, 9.0])})["two.weight"]
    assert weights.tolist() == pytest.approx([2 / 0.01, 2 / 3.01])


# -- the adaptive bound ------------------------------------------------------------------------------------------


@given(st.floats(0.05, 50), st.floats(0.1, 1e5))
def test_gradient_and_count_together_cost_what_sigma_costs(noise_multiplier: float, lot: float) -> None:
    """The count is released at 2 sigma_b (it moves by a half), the gradient at what is left; never at nothing."""
    count_noise = rule("adaptive", lot=lot, noise_multiplier=noise_multiplier).count_noise
    assert count_noise is not None
    left = noise_multiplier**-2 - (2 * count_noise) ** -2
    assert left > 0
    assert left**-0.5 <= noise_multiplier * 2 / math.sqrt(3) * (1 + 1e-9)


@given(st.floats(0, 100), st.integers(0, 20))
def test_one_example_moves_the_count_by_a_half(size: float, others: int) -> None:
    clipping = rule("adaptive")
    with_it = clipping.observe({"a": torch.tensor([size**2] + [0.5] * others)})
    without = clipping.observe({"a": torch.tensor([0.5] * others)})
    assert with_it is not None and without is not None
    assert abs(float(with_it) - float(without)) == 0.5


@pytest.mark.parametrize("count", [1e9, -1e9])
def test_a_bound_stays_a_number_whatever_the_noise(count: float) -> None:
    clipping = rule("adaptive")
    for _ in range(200):
        clipping.adapt(count, 10.0)
    assert 1e-20 <= clipping.norm <= 1e20


def test_the_bound_follows_the_quantile() -> None:
    clipping = Adaptive(1.0, expected_lot=100.0, noise_multiplier=1.0, quantile=0.8, rate=0.5)
    clipping.adapt(100 * (0.3 - 0.5), 100.0)  # 30 % were below the bound
    assert clipping.norm == pytest.approx(math.exp(-0.5 * (0.3 - 0.8)))
    norms = torch.linspace(0.1, 10, 1000, dtype=torch.float64)
    for _ in range(200):
        below = clipping.observe({"a": norms**2})
        assert below is not None
        clipping.adapt(float(below), 1000.0)
    assert float((norms <= clipping.norm).double().mean()) == pytest.approx(0.8, abs=0.02)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5))
def test_the_count_is_over_the_whole_lot(parts: list[int]) -> None:
    """Not over the last physical batch; and an empty lot has a count too, of zero."""
    whole, split = LotSum(rule("adaptive", 2.0)), LotSum(rule("adaptive", 2.0))
    everything = gradients(sum(parts) + 1, seed=1)  # one row of padding
    whole.add(batch(everything), sum(parts), 1)
    start = 0
    for part in parts:
        rows = {name: values[start : start + max(1, part)] for name, values in everything.items()}
        split.add(batch(rows), part, 1)
        start += part
    assert whole.count is not None and split.count is not None
    assert float(whole.count) == float(split.count)
    assert whole.diagnostics.examples == split.diagnostics.examples == sum(parts)
    if not sum(parts):
        assert float(whole.count) == 0 and not whole.sums


@pytest.mark.parametrize("kind", ["flat", "per_layer", "automatic"])
def test_other_rules_release_no_count(kind: str) -> None:
    added = LotSum(rule(kind))
    added.add(batch(gradients(3)), 3, 1)
    assert added.count is None and rule(kind).count_noise is None


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RULES)
def test_a_rule_continues_from_its_state(kind: str) -> None:
    clipping, other = rule(kind), rule(kind)
    clipping.norm = 0.3
    other.load_state_dict(clipping.state_dict())
    squares = {name: torch.tensor([4.0, 0.01]) for name in LAYERS}
    assert other.norm == 0.3  # the noise follows this bound, and so do the weights
    assert same(dict(other.weights(squares)), dict(clipping.weights(squares)))
    assert norm({name: other.weights(squares)[name][0] * 2 for name in LAYERS}) <= 0.3 * (1 + 1e-6)


@pytest.mark.parametrize(
    "other, match", [(rule("flat", 2.0), "max_grad_norm"), (rule("automatic"), "kind"), (rule("adaptive"), "kind")]
)
def test_a_rule_refuses_the_state_of_another(other: Clipping, match: str) -> None:
    before = other.norm
    with pytest.raises(ValueError, match=f"{match}.*same arguments"):
        other.load_state_dict(rule("flat").state_dict())
    assert other.norm == before


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, "1", None, True])
def test_impossible_bounds_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="max_grad_norm must be a positive number"):
        rule("flat", bad)


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="clipping must be one of 'flat', 'per_layer', 'automatic', 'adaptive'"):
        rule("flaat")


# -- the sum ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("scale", [1, 5])
def test_the_sum_is_the_sum_of_what_each_example_adds(kind: str, scale: int) -> None:
    everything = gradients(5, 2 / scale)
    together = LotSum(rule(kind, 3.0))
    together.add(batch(everything), 5, scale)
    for name in SHAPES:
        apart = torch.zeros(SHAPES[name])
        for i in range(5):
            one = LotSum(rule(kind, 3.0))
            one.add(batch({n: v[i : i + 1] for n, v in everything.items()}), 1, scale)
            apart += one.sums[name]
        torch.testing.assert_close(together.sums[name], apart)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_an_example_that_is_not_finite_adds_nothing_and_is_counted(kind: str, poison: float) -> None:
    clean = gradients(4)
    poisoned = {name: torch.cat([values[:1], values]) for name, values in clean.items()}
    poisoned["one.bias"][0, 1] = poison
    expected, found = LotSum(rule(kind)), LotSum(rule(kind))
    expected.add(batch(clean), 4, 1)
    found.add(batch(poisoned), 5, 1)
    for name in SHAPES:
        torch.testing.assert_close(found.sums[name], expected.sums[name])
    assert found.count == expected.count
    assert found.diagnostics.nonfinite == 1 and expected.diagnostics.nonfinite == 0
    assert found.diagnostics.examples == 5
    assert found.diagnostics.mean_norm == pytest.approx(expected.diagnostics.mean_norm)


@pytest.mark.parametrize("kind", RULES)
def test_a_square_below_zero_by_rounding_destroys_nothing(kind: str) -> None:
    rounded = batch(gradients(3))
    rounded.square_norms["two.weight"][1] = -100.0
    added = LotSum(rule(kind))
    added.add(rounded, 3, 1)
    assert math.isfinite(norm(added.sums)) and added.diagnostics.nonfinite == 0


def test_pieces_are_gone_once_they_are_summed() -> None:
    clean, poisoned = batch(gradients(3)), batch(gradients(3))
    pieces = [weakref.ref(piece) for piece in clean.pieces.values()]
    added = LotSum(rule("flat"))
    added.add(clean, 3, 1)
    assert all(piece() is None for piece in pieces)
    poisoned.square_norms["two.weight"][1] = math.nan
    added.add(poisoned, 3, 1)
    assert len(poisoned.pieces) == len(SHAPES)  # they are summed anew, without that example
    assert added.diagnostics.nonfinite == 1 and not poisoned.pieces


def test_a_lot_of_nothing_but_poison_adds_nothing() -> None:
    added = LotSum(rule("flat"))
    added.add(batch({name: values * math.nan for name, values in gradients(2).items()}), 2, 1)
    assert norm(added.sums) == 0
    assert added.diagnostics.nonfinite == 2 and added.diagnostics.mean_norm == 0


PLACES = {name: torch.zeros(shape) for name, shape in SHAPES.items()}


class Recorded(GradientBatch):
    """Leaves its sums in the same places as any other does."""

    recorded = True

    def weighted_sums(
        self, weights: Mapping[str, Tensor], keep: Tensor | None, *, final: bool = False
    ) -> dict[str, Tensor]:
        for name, part in super().weighted_sums(weights, keep).items():
            PLACES[name].copy_(part)
        return {name: place.view(place.shape) for name, place in PLACES.items()}


def recorded(rows: int, seed: int) -> GradientBatch:
    it = batch(gradients(rows, seed=seed))
    return Recorded(it.rows, it.pieces, it.square_norms, {name: identity(shape) for name, shape in SHAPES.items()})


def test_sums_of_a_recorded_pass_are_copied_before_another_one_writes_there() -> None:
    expected, found = LotSum(rule("flat", 3.0)), LotSum(rule("flat", 3.0))
    parts = [recorded(4, seed) for seed in range(3)]
    for part in parts:
        part.geometry = parts[0].geometry
        expected.add(GradientBatch(part.rows, dict(part.pieces), part.square_norms, part.geometry), 4, 1)
        found.settle()
        found.add(part, 4, 1)
    sums = found.finish().sums
    for name, part in expected.finish().sums.items():
        assert torch.equal(sums[name], part) and not same_memory(sums[name], PLACES[name])


def test_sums_of_a_lot_in_one_recorded_pass_are_given_away_where_they_lie() -> None:
    lot, looked_at = LotSum(rule("flat")), LotSum(rule("flat"))
    lot.add(recorded(4, 0), 4, 1)
    sums = lot.finish().sums
    assert sums and all(same_memory(sums[name], PLACES[name]) for name in sums)
    assert not lot.sums  # who looks later does not see what others wrote there
    looked_at.add(recorded(4, 0), 4, 1)
    for sums in (looked_at.sums, looked_at.finish().sums):
        assert sums and not any(same_memory(sums[name], PLACES[name]) for name in sums)


def same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_padding_adds_nothing() -> None:
    padded, plain = LotSum(rule("flat")), LotSum(rule("flat"))
    everything = gradients(6)
    padded.add(batch(everything), 4, 1)
    plain.add(batch({name: values[:4] for name, values in everything.items()}), 4, 1)
    for name in SHAPES:
        torch.testing.assert_close(padded.sums[name], plain.sums[name])
    empty = LotSum(rule("flat"))
    empty.add(batch(everything), 0, 1)
    assert not empty.sums and empty.diagnostics.examples == 0


def test_room_is_left_for_the_rounding_of_short_formats() -> None:
    exact, rounded = LotSum(rule("flat")), LotSum(rule("flat"))
    one, other = batch(gradients(1, 10.0)), batch(gradients(1, 10.0))
    other.pieces["one.bias"].rounding = 0.01
    exact.add(one, 1, 1)
    rounded.add(other, 1, 1)
    assert norm(exact.sums) == pytest.approx(1.0, rel=1e-5)
    assert norm(rounded.sums) == pytest.approx(1 / 1.01, rel=1e-5)


def test_another_number_of_rows_is_refused() -> None:
    """A model that was called on half of the batch, or on two augmentations of it."""
    for rows in (2, 8):
        wrong = batch(gradients(rows))
        wrong.rows = 4
        added = LotSum(rule("flat"))
        with pytest.raises(RuntimeError, match=f"gradients of {rows} rows, but the private loader handed out 4"):
            added.add(wrong, 4, 1)
        assert not added.sums


def test_diagnostics() -> None:
    squares = {"two.weight": torch.tensor([[3.0, 0, 0], [0, 0.5, 0], [0, 0, 4.0]])}
    added = LotSum(rule("flat", 1.0))
    added.add(batch(squares), 3, 1)
    assert (added.diagnostics.examples, added.diagnostics.clipped) == (3, 2)
    assert added.diagnostics.mean_norm == pytest.approx(2.5)
    added.add(batch(squares), 3, 2)  # the next physical batch of the lot, from a mean loss over two rows
    assert (added.diagnostics.examples, added.diagnostics.clipped) == (6, 4)
    assert added.diagnostics.mean_norm == pytest.approx((7.5 + 15) / 6)
    added.clear()
    added.add(batch(squares), 1, 1)
    assert (added.diagnostics.examples, added.diagnostics.mean_norm) == (7, pytest.approx(3.0))


def test_total() -> None:
    assert total({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}).tolist() == [4, 6]


# -- rules of the user's own -----------------------------------------------------------------------------------


class Halved(Clipping):
    """Half of what flat clipping does, times a factor that a test may change later."""

    factor = 0.5

    def weights(self, square_norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        norms = total(square_norms).sqrt().clamp(min=1e-30)
        return dict.fromkeys(square_norms, self.factor * (self.norm / norms).clamp(max=1.0))


class OfTheLongest(Halved):
    """Within the bound, but the longest gradient of the batch decides the weight of all."""

    def weights(self, square_norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        norms = total(square_norms).sqrt()
        return dict.fromkeys(square_norms, (self.norm / norms.max().clamp(min=self.norm)).expand_as(norms))


class Divided(Halved):
    """C / norm, which is infinite at 0."""

    def weights(self, square_norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return dict.fromkeys(square_norms, self.norm / total(square_norms).sqrt())


class Counting(Halved):
    count_noise = 1.0


def test_an_own_rule_clips_and_the_statement_names_it() -> None:
    own, flat = training(clipping=Halved(1.0), seed=1), training(clipping="flat", seed=1)
    for each in (own, flat):
        each.steps(2)
    assert own.engine.diagnostics.clipped == own.engine.diagnostics.examples > 0
    assert own.engine.get_epsilon(1e-5) == flat.engine.get_epsilon(1e-5)
    text = " ".join(own.engine.statement(1e-5).text.split())
    assert f"your own rule {__name__}.Halved; its promise is not proven by dphero" in text
    assert "your own" not in flat.engine.statement(1e-5).text


def test_an_own_rule_that_lets_too_much_through_is_stopped_before_the_release() -> None:
    own = Halved(1.0)
    run = training(clipping=own)
    run.steps(1)
    own.factor = 1.001  # well-behaved until now
    before = run.engine.get_epsilon(1e-5)
    with pytest.raises(ValueError, match=r"Halved breaks its promise.*more than max_grad_norm 1"):
        run.steps(1)
    assert run.engine.steps == 1 and run.engine.get_epsilon(1e-5) == before


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (OfTheLongest(1.0), "change when other examples are left out"),
        (Divided(1.0), "negative or not finite"),
        (Counting(1.0), "releases a count"),
        (Halved(2.0), "its norm is 2.0, max_grad_norm 1.0"),
        (Halved, r"pass clipping=Halved\(1\)"),
        (rule("automatic"), "built in: pass its name, clipping='automatic'"),
    ],
)
def test_own_rules_that_cannot_be_used_are_refused_at_once(wrong: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rule(wrong)


def test_an_own_rule_does_not_mind_gradients_that_are_not_finite() -> None:
    found = rule(Halved(1.0)).weights({"two.weight": torch.tensor([4.0, math.inf, math.nan, 0.0])})["two.weight"]
    assert found[0] == pytest.approx(0.25) and found[3] == 0.5


def test_only_the_same_own_rule_resumes(tmp_path: Path) -> None:
    run = training(clipping=Halved(1.0), seed=1)
    run.steps(1)
    run.engine.save(tmp_path / "saved")
    for other in ("flat", type("Another", (Halved,), {})(1.0)):
        with pytest.raises(ValueError, match=r"clipping kind '.*\.Halved', this engine has"):
            training(clipping=other, seed=1).engine.load(tmp_path / "saved")
    resumed = training(clipping=Halved(1.0), seed=1)
    resumed.engine.load(tmp_path / "saved")
    assert same(run.steps(1)[0], resumed.steps(1)[0])
