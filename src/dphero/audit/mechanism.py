"""The mechanism audit: what one release of an engine gives away, against what its ledger charges for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from dphero.accounting import claimed_by_paper
from dphero.accounting.curves import gaussian_epsilon
from dphero.audit.claims import Claim, claim_of_ledger, claim_of_prices
from dphero.audit.engine_release import EngineRelease, Settings, small_model
from dphero.audit.threads import one_thread
from dphero.audit.two_sample import Audit, audit

__all__ = ["audit_mechanism", "engine_claim"]

_QUIET = 0.25
"""σ of the audit of sampling: who is in a lot should be seen."""


@one_thread()
def audit_mechanism(
    settings: Settings | None = None,
    *,
    model: nn.Module | None = None,
    releases: int = 1000,
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> list[Audit]:
    """Audit what an engine with these settings releases, from two sides that hold together at the confidence.

    *release*: two lots of all the data. Sees noise that is too small, used twice, or weak in a direction; clipping
    that lets something through; a divisor that depends on who is there.
    *sampling*: an epoch of two lots at rate 1/2, with little noise. Sees lots that are not drawn as they are priced.

    Each claim is what the engine's own ledger says; for ``published``, what the paper says.

    Args:
        settings: What to audit.
        model: On which model; default a small one.
        releases: How many with, and how many without, the canary, for each side.
        delta: δ.
        confidence: For all sides together.
        seed: Makes the audit repeatable.
        report: Called with the number of releases done, now and then.
    """
    settings = settings or Settings()
    model = small_model() if model is None else model
    sides = [("release", settings, 1.0)]
    if settings.sampling == "shuffle":
        sides = [("shuffled epoch", settings, 1.0)]
    elif settings.mechanism != "published":  # its claim does not speak of sampling
        sides.append(("sampling", replace(settings, noise_multiplier=_QUIET), 0.5))
    each = 1 - (1 - confidence) / len(sides)
    return [
        audit_engine(
            EngineRelease(audited, model, sample_rate=rate, steps=2, seed=seed + 1000 * number),
            name=name,
            releases=releases,
            delta=delta,
            confidence=each,
            seed=seed,
            report=after(2 * releases * number, report),
        )
        for number, (name, audited, rate) in enumerate(sides)
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
    return audit(
        release,
        claim,
        name=name,
        releases=releases,
        confidence=confidence,
        seed=seed,
        true_epsilon=true,
        report=report,
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
