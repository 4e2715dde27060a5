"""The mechanism audit: it meets what the engine claims, does not beat it, and notices every planted fault."""

from __future__ import annotations

import math
import os
import secrets
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dphero.audit import EngineRelease, Settings, audit, audit_mechanism, claim_of_ledger
from dphero.audit.published import audit_published
from dphero.audit.threads import one_thread
from dphero.guidance import PCA, History
from dphero.noise import FastNoise
from tests.audit.faults import FAULTS

DELTA = 1e-5


def tiny() -> nn.Module:
    """The smallest network with a shape: for tests that need many releases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look into fewer releases: for tests that plant no fault which only many would show."""
    monkeypatch.setattr("dphero.audit.mechanism._FEWEST", 100)
    monkeypatch.setattr("dphero.audit.laws.white_box._PLAIN", 32)


SOUND: list[Settings] = [
    Settings(),
    Settings(guidance="isotropic"),
    Settings(guidance=PCA(exponent=1.0, floor=0.05, side="both", scope="model")),
    Settings(guidance=History(refresh_every=1, exponent=0.5)),
    Settings(mechanism="ball", guidance=PCA(exponent=0.5)),
    Settings(mechanism="ball", guidance=History.geoclip(refresh_every=5)),
    Settings(clipping="per_layer"),
    Settings(clipping="automatic"),
    Settings(clipping="adaptive"),
    Settings(sampling="shuffle"),
    Settings(secure=True),
    Settings(autocast=True),
]


def called(settings: Settings) -> str:
    return ", ".join(map(str, (settings.mechanism, settings.clipping, settings.sampling, settings.guidance)))[:60] + (
        ", secure" if settings.secure else ", autocast" if settings.autocast else ""
    )


OTHERWISE = (1, 2, 3, 4, 6, 7, 10, 11)  # these differ in what the attack below and the canary's tests look at too


@pytest.mark.parametrize(
    "settings",
    [pytest.param(s, id=called(s), marks=[pytest.mark.slow] * (i in OTHERWISE)) for i, s in enumerate(SOUND)],
)
def test_sound_engines_are_not_refuted(settings: Settings, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting's noise, lots, geometry and price are what the audit expects.

    100 releases of 344 numbers know the noise's size to 0.4 %; how often a sound engine is refuted is a matter of the
    benchmark's 200 audits.
    """
    fixed = np.random.default_rng(7)  # in place of the system's randomness: a test must not fail by chance
    monkeypatch.setattr(os, "urandom", fixed.bytes)
    monkeypatch.setattr(secrets, "token_bytes", fixed.bytes)
    monkeypatch.setattr(secrets, "randbits", lambda bits: int.from_bytes(fixed.bytes(bits // 8)))
    many = 60 if settings.sampling == "shuffle" else 20  # in an epoch's batches the canary weighs less than the noise
    made = audit_mechanism(settings, releases=many, seed=1)
    assert not any(check.refuted for check in made.checks), made.checks
    for found in made.audits:
        assert not found.refuted
        bound = found.epsilon_any if found.name == "sampling" else found.audited_epsilon  # the fit takes seconds there
        assert bound <= found.claim.epsilon
        assert found.inside.mean() > found.outside.mean() + 0.3  # it did see the canary


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("guidance", ["isotropic", "pca"])
def test_sound_engines_on_a_gpu_are_not_refuted(guidance: str, autocast: bool, few: None) -> None:
    made = audit_mechanism(Settings(guidance=guidance, device="cuda", autocast=autocast), releases=60, seed=1)
    assert not made.refuted, made
    assert all(found.inside.mean() > found.outside.mean() + 0.3 for found in made.audits)


@pytest.mark.parametrize(
    "settings",
    [pytest.param(s, id=called(s), marks=[pytest.mark.slow] * (i not in (1, 2))) for i, s in enumerate(SOUND[:5])],
)
def test_the_attack_is_the_best_there_is(settings: Settings) -> None:
    """What it sees has the law of the claimed likelihood ratio, N(±μ²/2, μ²): nothing is left on the table."""
    release = EngineRelease(settings, steps=2, seed=3)
    inside, outside = (np.array([release(canary_in, 0) for _ in range(100)]) for canary_in in (True, False))
    mu = claim_of_ledger(release.ledger(), DELTA).mu
    assert mu == pytest.approx(math.sqrt(2))
    for sample, side in ((inside, 1), (outside, -1)):
        score = (sample.mean() - side * mu**2 / 2) * math.sqrt(len(sample)) / mu
        assert abs(score) < 4
        assert abs(sample.std() / mu - 1) < 0.3


@pytest.mark.slow
def test_it_reaches_most_of_the_true_epsilon() -> None:
    """One unsampled release, σ = 1, ε = 4.38: at least 80 % of that, and not more than all of it."""
    release = EngineRelease(Settings(), tiny(), seed=0)
    found = audit(release, lambda: claim_of_ledger(release.ledger(), DELTA), name="release", releases=3000)
    assert found.claim.epsilon == pytest.approx(4.377, abs=1e-3)
    assert 0.8 * found.claim.epsilon <= found.audited_epsilon <= found.claim.epsilon
    assert not found.refuted and 0 < found.epsilon_any < found.audited_epsilon


@pytest.mark.slow  # the same of drawn numbers: test_statistics.py
def test_its_bounds_hold_as_often_as_they_say() -> None:
    """200 audits of the sound engine: at most 5 % may end above the claim, give or take what chance allows."""
    release, above = EngineRelease(Settings(), tiny(), seed=5), 0
    for repetition in range(200):
        found = audit(
            release, lambda: claim_of_ledger(release.ledger(), DELTA), name="release", releases=20, seed=repetition
        )
        above += found.refuted or found.audited_epsilon > found.claim.epsilon
    assert above <= stats.binom.ppf(0.999, 200, 0.05)


FAST = (  # one for each part of the audit; the others are slow tests
    "0.8 of the noise in one layer",
    "noise used again 2 releases later",
    "noise in float16",
    "clipping by the lot's mean norm",
    "geometry from raw sums",
    "lots of a fixed size",
    "priced at 10 δ",
)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in FAULTS if name != "none"],
)
def test_planted_faults_are_noticed(fault: str) -> None:
    planted = FAULTS[fault]
    with planted():
        found = audit_mechanism(planted.settings, releases=60, seed=2, until_refuted=True)
    assert found.refuted, found


@pytest.mark.slow
def test_sides_share_the_error_probability_and_models_without_a_bias_have_fewer(few: None) -> None:
    found = audit_mechanism(Settings(), model=tiny(), releases=20)
    sides = ["release", "sampling", "release, small neighbours", "release, biases"]
    assert [each.name for each in found.audits] == sides
    assert all(each.confidence == pytest.approx(1 - 0.04 / 4) for each in found.audits)
    uncertain = [each for each in found.checks if not each.exact]
    assert all(each.level == pytest.approx(0.01 / len(uncertain)) for each in uncertain)
    found = audit_mechanism(Settings(), model=nn.Sequential(nn.Linear(6, 4, bias=False)), releases=20)
    assert [each.name for each in found.audits] == sides[:3]


def test_releases_off_the_ledger_are_counted(few: None) -> None:
    """The claim of the first release is sound: what comes after it was never charged."""
    with FAULTS["lots left off the ledger"]():
        found = audit_mechanism(Settings(), model=tiny(), releases=20)
    assert [each.uncharged for each in found.audits] == [2 * (2 * 20 - 4)] * 4
    assert all(each.refuted and each.as_dict()["uncharged_releases"] == 72 for each in found.audits)


def test_faults_end_with_their_block(few: None) -> None:
    before = FastNoise.__dict__["_draw"]
    with FAULTS["half the noise"]():
        assert FastNoise.__dict__["_draw"] is not before
    assert FastNoise.__dict__["_draw"] is before
    assert not audit_mechanism(Settings(), model=tiny(), releases=20, seed=2).refuted


@pytest.mark.slow  # the same of fewer releases, by the command: test_audit_command.py
def test_the_published_recipe_breaks_its_claim_and_the_ellipsoid_keeps_its_own() -> None:
    published, ellipsoid = audit_published(releases=120)
    assert published.claim.epsilon == pytest.approx(2.525, abs=1e-3)
    assert published.refuted and published.epsilon_any > published.claim.epsilon  # without any assumption
    assert published.true_epsilon is not None
    assert published.claim.epsilon < published.audited_epsilon < published.true_epsilon
    assert not ellipsoid.refuted and ellipsoid.audited_epsilon <= ellipsoid.claim.epsilon
    assert ellipsoid.claim.epsilon == pytest.approx(1.993, abs=1e-2)


@pytest.mark.slow
def test_the_published_recipe_is_refuted_on_the_small_network_too() -> None:
    settings = Settings("published", PCA(exponent=1.0, floor=0.0), noise_multiplier=2.0)
    (found,) = audit_mechanism(settings, releases=150).audits
    assert found.refuted and found.true_epsilon is not None and found.true_epsilon > 2 * found.claim.epsilon


def test_an_audit_is_repeatable_and_seeds_differ() -> None:
    def observed(seed: int) -> Any:
        release = EngineRelease(Settings(), tiny(), seed=seed)
        return [release(True, 0) for _ in range(5)]

    assert observed(4) == observed(4) != observed(5)


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_nothing_is_claimed_before_something_is_released() -> None:
    with pytest.raises(RuntimeError, match="nothing was released yet"):
        EngineRelease(Settings(), tiny()).ledger()
