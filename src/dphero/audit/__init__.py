"""Auditing: a lower bound on ε, with its confidence, beside the ε that is claimed.

The way through the rooms: ``bounds`` (from samples to bounds, and the claims they are compared with), ``canary`` and
``engine_release`` (one release of the engine), ``laws`` (a look inside: noise, lots, price), ``mechanism`` (all of
that), ``trainings`` (whole trainings), ``published`` (the paper's recipe on trial), ``run_ledger``, ``runs`` and
``report`` (all of it, for a run directory).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dphero.audit.bounds.claims import Claim, claim_of_ledger, claim_of_prices
    from dphero.audit.bounds.two_sample import Audit, Release, audit
    from dphero.audit.engine_release import EngineRelease
    from dphero.audit.laws.checks import Check
    from dphero.audit.mechanism import MechanismAudit, audit_mechanism
    from dphero.audit.published import audit_published
    from dphero.audit.report import Report
    from dphero.audit.runs import audit_recipe, audit_run
    from dphero.audit.settings import Settings
    from dphero.audit.trainings.gradient_canaries import GradientCanaries
    from dphero.audit.trainings.input_canaries import InputCanaries
    from dphero.audit.trainings.many_runs import audit_method
    from dphero.audit.trainings.membership import Roc, lira, loss_attack
    from dphero.audit.trainings.one_run import OneRun, audit_one_run

__all__ = [
    "Audit",
    "Check",
    "Claim",
    "EngineRelease",
    "GradientCanaries",
    "InputCanaries",
    "MechanismAudit",
    "OneRun",
    "Release",
    "Report",
    "Roc",
    "Settings",
    "audit",
    "audit_mechanism",
    "audit_method",
    "audit_one_run",
    "audit_published",
    "audit_recipe",
    "audit_run",
    "claim_of_ledger",
    "claim_of_prices",
    "lira",
    "loss_attack",
]

_HOMES = {
    "laws.checks": ("Check",),
    "bounds.claims": ("Claim", "claim_of_ledger", "claim_of_prices"),
    "trainings.many_runs": ("audit_method",),
    "engine_release": ("EngineRelease",),
    "settings": ("Settings",),
    "mechanism": ("MechanismAudit", "audit_mechanism"),
    "trainings.membership": ("Roc", "lira", "loss_attack"),
    "trainings.one_run": ("OneRun", "audit_one_run"),
    "trainings.gradient_canaries": ("GradientCanaries",),
    "trainings.input_canaries": ("InputCanaries",),
    "published": ("audit_published",),
    "report": ("Report",),
    "runs": ("audit_recipe", "audit_run"),
    "bounds.two_sample": ("Audit", "Release", "audit"),
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: the audit of an engine needs no data sets and no methods."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"dphero.audit.{home}"), name)
    raise AttributeError(f"module 'dphero.audit' has no attribute {name!r}")
