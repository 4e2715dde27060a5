"""The mechanism audit: what one release of an engine gives away, against what its ledger charges for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from dphero.accounting import claimed_by_paper
from dphero.accounting.curves import gaussian_epsilon
from dphero.audit.canary import Aim, has_bias
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
    """Audit what an engine with these settings releases, from several sides that hold together at the confidence.

    *release*: two lots of all the data. Sees noise that is too small, used in the next lot again, or weak in a
    direction; clipping that lets something through; a divisor that depends on who is there.
    *release, biases*: the same, with a canary in the biases of the layers.
    *sampling*: an epoch of two lots at rate 1/2, with little noise. Sees a record that is in lots more often than is
    priced, or in one of them for sure.

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
    name = "release" if settings.sampling == "poisson" else "shuffled epoch"
    sides: list[tuple[str, Settings, float, Aim]] = [(name, settings, 1.0, "weight")]
    if settings.mechanism != "published":  # its claim is wrong, and does not speak of sampling
        if settings.sampling == "poisson":
            sides.append(("sampling", replace(settings, noise_multiplier=_QUIET), 0.5, "weight"))
        if has_bias(model):
            sides.append((f"{name}, biases", settings, 1.0, "bias"))
    each = 1 - (1 - confidence) / len(sides)
    return [
        audit_engine(
            EngineRelease(audited, model, sample_rate=rate, steps=2, seed=seed + 1000 * number, aim=aim),
            name=name,
            releases=releases,
            delta=delta,
            confidence=each,
            seed=seed,
            report=after(2 * releases * number, report),
        )
        for number, (name, audited, rate, aim) in enumerate(sides)
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
    return replace(found, refuted=found.refuted or release.uncharged > 0, uncharged=release.uncharged)


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
