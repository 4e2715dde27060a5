"""Checks of noise, lots and price: right for what is sound, as often as they say, and each sees what it is for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from dphero.accounting import AdaptiveGaussian, Gaussian, Ledger, NoNoise, PoissonGaussian, ShuffledGaussian, price
from dphero.audit.laws.checks import Check, judge
from dphero.audit.laws.independent_price import independent_epsilon, price_check
from dphero.audit.laws.lots_law import poisson_checks, shuffle_checks
from dphero.audit.laws.noise_law import NoiseRecord, last_bits_check, noise_checks

DELTA = 1e-5
SHAPES = {"first": (12, 8), "bias": (12, 1), "second": (6, 12)}
Noise = dict[str, np.ndarray]


def seen(change: Callable[[list[Noise]], None] = lambda noise: None, *, seed: int = 0, releases: int = 200) -> set[str]:
    """Return the names of the checks that refute noise with a fault, at 1 % for all together."""
    random = np.random.default_rng(seed)
    noise = [{name: random.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(releases)]
    change(noise)
    record = NoiseRecord(SHAPES, seed)
    for each in noise:
        record.add(each)
    return {check.name for check in judge(noise_checks(record), 0.01) if check.refuted}


def test_sound_noise_is_refuted_no_more_often_than_the_checks_say() -> None:
    assert sum(bool(seen(seed=seed, releases=100)) for seed in range(100)) <= stats.binom.ppf(0.999, 100, 0.01)


def each_release(change: Callable[[Noise], None]) -> Callable[[list[Noise]], None]:
    return lambda noise: [change(each) for each in noise] and None


def weak(each: Noise) -> None:
    each["second"] *= 0.9


def bare_row(each: Noise) -> None:
    each["first"][3] = 0


def no_difference(each: Noise) -> None:
    """Two rows of one parameter always move together, each with all its noise."""
    each["first"][3] = each["first"][4]


def bare_direction(each: Noise) -> None:
    """A random direction among the rows of one parameter, where no single row is bare."""
    direction = np.full((12, 1), 12**-0.5)
    each["first"] -= direction @ (direction.T @ each["first"])


def shared(each: Noise) -> None:
    each["second"].ravel()[:12] = each["bias"].ravel()


def faintly_shared(noise: list[Noise]) -> None:
    """Each release keeps a quarter of the noise of the one three before it."""
    for place in range(len(noise) - 1, 2, -1):
        for name in SHAPES:
            noise[place][name] = np.sqrt(1 - 0.25**2) * noise[place][name] + 0.25 * noise[place - 3][name]


def once_again(noise: list[Noise]) -> None:
    noise[150] = {name: -values for name, values in noise[17].items()}


def of_one_length(each: Noise) -> None:
    length = np.sqrt(sum((values**2).sum() for values in each.values()))
    for values in each.values():
        values *= np.sqrt(180) / length


def cut(each: Noise) -> None:
    for values in each.values():
        np.clip(values, -3.5, None, out=values)
        values[values == -3.5] = 1.0


def light(each: Noise) -> None:
    for values in each.values():
        values[np.abs(values) > 2.5] *= 0.5


def rounded(each: Noise) -> None:
    for name, values in each.items():
        each[name] = values.astype(np.float16).astype(np.float64)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (each_release(weak), "noise: size by parameter"),
        (each_release(bare_row), "noise: size by row"),
        (each_release(bare_direction), "noise: weakest direction"),
        (each_release(no_difference), "noise: weakest direction"),
        (each_release(shared), "noise: numbers of one release"),
        (once_again, "noise: used again"),
        (faintly_shared, "noise: over releases"),
        (each_release(weak), "noise: normal"),
        (each_release(cut), "noise: ends of its range"),
        (each_release(light), "noise: tails"),
        (each_release(of_one_length), "noise: length"),
        (each_release(rounded), "noise: digits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_check_of_noise_sees_its_fault(fault: Callable[[list[Noise]], None], check: str) -> None:
    assert check in seen(fault)


def test_more_noise_than_charged_is_not_too_little() -> None:
    """It is not what is charged for, but nobody is less private by it: no check of its size refutes it."""

    def much(each: Noise) -> None:
        each["second"] *= 1.1

    assert not {"noise: size by parameter", "noise: size by row", "noise: weakest direction"} & seen(each_release(much))


def test_numbers_of_16_bits_end_in_zeros() -> None:
    random = np.random.default_rng(0)
    for dtype, refuted in ((np.float32, False), (np.float16, True)):
        bits = random.normal(size=5000).astype(dtype).astype(np.float32).view(np.int32)
        (check,) = judge([last_bits_check(int(((bits & 0xFF) == 0).sum()), 5000)], 1e-4)
        assert check.refuted == refuted


# -- lots ---------------------------------------------------------------------------------------------------------


def lots_seen(members: np.ndarray) -> set[str]:
    return {check.name for check in judge(poisson_checks(members, 0.25), 0.01) if check.refuted}


def test_sound_lots_are_refuted_no_more_often_than_the_checks_say() -> None:
    random = np.random.default_rng(1)
    refuted = sum(bool(lots_seen(random.random((100, 40)) < 0.25)) for _ in range(100))
    assert refuted <= stats.binom.ppf(0.999, 100, 0.01)


def test_each_check_of_lots_sees_its_fault() -> None:
    random = np.random.default_rng(2)
    coins = random.random((300, 64))
    assert "lots: rate" in lots_seen(coins < 0.3)
    often = coins < 0.25
    often[:, 7] = coins[:, 7] < 0.5
    assert "lots: rate of each record" in lots_seen(often)
    assert "lots: sizes" in lots_seen(coins.argsort(1).argsort(1) < 16)  # 16 records in each lot
    again = coins < 0.25
    again[200] = again[11]
    assert lots_seen(again) == {"lots: drawn again"}
    epochs = np.concatenate([np.arange(4)[:, None] == np.repeat(random.permutation(64) // 16, 4).reshape(64, 4).T] * 75)
    assert "lots: over time" in lots_seen(epochs)
    pairs = coins < 0.25
    pairs[:, 9] = pairs[:, 8]
    assert "lots: records apart" in lots_seen(pairs)
    assert not lots_seen(coins < 0.25)


def test_shuffled_epochs_hold_everybody_once() -> None:
    members = np.tile(np.eye(4, dtype=bool), (3, 1))
    assert not shuffle_checks(members, 4)[0].refuted
    members[1, 0] = True
    assert shuffle_checks(members, 4)[0].refuted


# -- price --------------------------------------------------------------------------------------------------------


def ledger(*events: object) -> Ledger:
    made = Ledger()
    for event in events:
        made.record(event)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize(
    "made",
    [
        ledger(Gaussian(2.0), Gaussian(2.0)),
        ledger(*[PoissonGaussian(0.1, 1.0)] * 100),
        ledger(*[PoissonGaussian(1.0, 5.0)] * 9, *[PoissonGaussian(0.5, 2.0)] * 9),
        ledger(*(ShuffledGaussian(3.0, epoch) for epoch in (0, 0, 0, 1, 1, 1))),
    ],
    ids=["gaussian", "poisson", "both", "shuffled"],
)
def test_the_second_opinion_on_a_price_agrees_and_sees_another_delta(made: Ledger) -> None:
    printed = price(made, DELTA).epsilon
    assert independent_epsilon(made, DELTA) == pytest.approx(printed, rel=2e-3)
    assert not price_check(made, DELTA, printed).refuted
    assert not price_check(made, DELTA, 1.2 * printed).refuted  # more is no broken promise
    for factor in (2, 10):
        assert price_check(made, DELTA, price(made, factor * DELTA).epsilon).refuted


def test_what_dp_accounting_has_no_price_for_is_not_compared() -> None:
    for made in (ledger(AdaptiveGaussian(0.1, 1.0)), ledger(NoNoise())):
        check = price_check(made, DELTA, 1.0)
        assert independent_epsilon(made, DELTA) is None and not check.refuted and "nothing to compare" in check.finding
    assert independent_epsilon(Ledger(), DELTA) == 0.0


def test_exact_answers_take_no_share_of_the_error_probability() -> None:
    checks = [Check("a", "", 0.02), Check("b", "", 1.0), Check.exactly("c", "", sound=True)]
    assert [each.level for each in judge(checks, 0.05)] == [0.025] * 3
    assert [each.refuted for each in judge(checks, 0.05)] == [True, False, False]
    assert judge([Check.exactly("d", "", sound=False)], 0.0)[0].refuted
