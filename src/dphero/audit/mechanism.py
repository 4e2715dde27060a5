"""The mechanism audit: what one release of an engine gives away, against what its ledger charges for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dphero.accounting import claimed_by_paper
from dphero.accounting.numerics.curves import gaussian_epsilon
from dphero.audit.bounds.claims import Claim, claim_of_ledger, claim_of_prices
from dphero.audit.bounds.two_sample import Audit, audit
from dphero.audit.canary import has_bias
from dphero.audit.engine_release import EngineRelease
from dphero.audit.laws.checks import Check, judge
from dphero.audit.laws.white_box import look_inside
from dphero.audit.settings import Settings, small_model
from dphero.audit.threads import one_thread

_QUIET = 0.25
"""σ of the audit of sampling: who is in a lot should be seen."""
_INSIDE = 0.2
"""Share of the error probability that the look inside has: its tests are strong, attacks need more."""
_FEWEST, _MOST = 300, 600
"""Releases that are looked into."""
_APART = 1000
"""Between the seeds of engines, each of which uses two: no noise of one comes back in another."""


@dataclass(frozen=True)
class MechanismAudit:
    """What was found about the mechanism of an engine.

    Attributes:
        audits: Attacks: how much releases give away, against the claim.
        checks: The parts that the claim rests on: noise, lots, geometry, ledger, price.
        noise_multiplier: σ that both were made at (*sampling* at a smaller one).
    """

    audits: Sequence[Audit]
    checks: Sequence[Check]
    noise_multiplier: float

    @property
    def refuted(self) -> bool:
        """Whether an attack or a check refutes the claim."""
        return any(each.refuted for each in self.audits) or any(each.refuted for each in self.checks)


@one_thread()
def audit_mechanism(
    settings: Settings | None = None,
    *,
    model: nn.Module | None = None,
    releases: int = 1000,
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int = 0,
    until_refuted: bool = False,
    report: Callable[[int], None] = lambda done: None,
) -> MechanismAudit:
    """Audit what an engine with these settings releases: attacks from several sides, and a look inside.

    *release*: two lots of all the data. Sees noise that is too small, used in the next lot again, or weak in a
    direction; clipping that lets something through; a divisor that depends on who is there.
    *release, biases*: the same, with a canary in the biases of the layers.
    *release, small neighbours*: the same, with a canary of a random direction, among examples whose gradients are small
    or zero. Sees clipping by anything but the example's own norm.
    *sampling*: an epoch of two lots at rate 1/2, with little noise. Sees a record that is in lots more often than is
    priced, or in one of them for sure.

    Each claim is what the engine's own ledger says; for ``published``, what the paper says.

    The *look inside* (:func:`~dphero.audit.laws.white_box.look_inside`) tests the noise, the lots, the geometry and the
    price themselves; ``published``, whose price is known to be wrong, goes without.

    Args:
        settings: What to audit.
        model: On which model; default a small one.
        releases: How many with, and how many without, the canary, for each side.
        delta: δ.
        confidence: For all sides and checks together.
        seed: Makes the audit repeatable.
        until_refuted: Stop after the first part that refutes a claim: the verdict is the same.
        report: Called with the number of releases done, now and then.
    """
    settings = settings or Settings()
    model = small_model() if model is None else model
    sides = _sides(settings, model, seed)
    looks, error = _looks(settings, releases), 1 - confidence
    each = 1 - error * (1 - _INSIDE * bool(looks)) / len(sides)
    found = MechanismAudit((), (), settings.noise_multiplier)
    if looks:
        inside_seed = 2 * (seed + _APART * len(sides))
        checks = look_inside(settings, model, releases=looks, delta=delta, seed=inside_seed, report=report)
        found = replace(found, checks=judge(checks, error * _INSIDE))
    for number, (name, release) in enumerate(sides):
        if until_refuted and found.refuted:
            break
        done = after(looks + 2 * releases * number, report)
        one = audit_engine(release, name=name, releases=releases, delta=delta, confidence=each, seed=seed, report=done)
        found = replace(found, audits=(*found.audits, one))
    return found


def releases_of(settings: Settings, model: nn.Module, releases: int) -> int:
    """Return how many releases the audit reports in all."""
    return 2 * releases * len(_sides(settings, model, 0)) + _looks(settings, releases)


def _looks(settings: Settings, releases: int) -> int:
    """Return how many releases are looked into."""
    return min(max(releases, _FEWEST), _MOST) if settings.mechanism != "published" else 0


def _sides(settings: Settings, model: nn.Module, seed: int) -> list[tuple[str, EngineRelease]]:
    """Return the attacks, by name: what is released."""
    shuffled = settings.sampling == "shuffle"
    name = "shuffled epoch" if shuffled else "release"
    made: list[tuple[str, dict[str, Any]]] = [(name, {})]
    if settings.mechanism != "published":  # its claim is wrong, and does not speak of sampling
        quiet = replace(settings, noise_multiplier=_QUIET)
        if not shuffled:
            made.append(("sampling", {"settings": quiet, "sample_rate": 0.5}))
            made.append((f"{name}, small neighbours", {"neighbours": "small", "direction": seed}))
        if has_bias(model):
            made.append((f"{name}, biases", {"aim": "bias"}))
    return [
        (
            name,
            EngineRelease(**{"settings": settings, "model": model, "steps": 2, "seed": seed + _APART * n, **changes}),
        )
        for n, (name, changes) in enumerate(made)
    ]


def audit_engine(
    release: EngineRelease,
    *,
    name: str,
    releases: int,
    delta: float,
    confidence: float,
    seed: int,
    report: Callable[[int], None],
) -> Audit:
    """Audit one way of releasing against what its ledger, or for the published recipe its paper, claims."""
    claim, true = engine_claim(release, delta)
    found = audit(
        release,
        claim,
        name=name,
        releases=releases,
        confidence=confidence,
        seed=seed,
        true_epsilon=true,
        report=report,
    )
    return replace(
        found,
        refuted=found.refuted or release.uncharged > 0,
        uncharged=release.uncharged,
        noise_multiplier=release.settings.noise_multiplier,
    )


def after(before: int, report: Callable[[int], None]) -> Callable[[int], None]:
    """Return a report for one of several audits: what was done before it counts too."""
    return lambda done: report(before + done)


def engine_claim(release: EngineRelease, delta: float) -> tuple[Callable[[], Claim], float | None]:
    """Return what the engine's ledger will claim; for the published recipe, what the paper does, and the truth."""
    settings = release.settings
    if settings.mechanism != "published":
        return lambda: claim_of_ledger(release.ledger(), delta), None
    sigma = settings.noise_multiplier
    claim = claim_of_prices(lambda each: claimed_by_paper([sigma] * release.steps, each).epsilon, delta)
    effective = sigma * release.weakest_scale()
    true = gaussian_epsilon(math.sqrt(release.steps) / effective, delta)
    return lambda: replace(claim, gaussian=release.sample_rate == 1), true
