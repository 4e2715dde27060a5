"""Auditing: a lower bound on ε, with its confidence, beside the ε that is claimed.

The way through the modules: ``statistics`` (from samples to bounds), ``claims`` (what is tested), ``two_sample`` (any
release, with and without a canary), ``canary`` and ``engine_release`` (one release of the engine), ``checks``,
``noise_law``, ``lots_law``, ``independent_price`` and ``white_box`` (a look inside), ``mechanism`` (all of that),
``training``, ``many_runs``, ``one_run`` and ``membership`` (whole trainings), ``published`` (the paper's recipe on
trial), ``run_ledger``, ``runs`` and ``report`` (all of it, for a run directory).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dphero.audit.checks import Check
    from dphero.audit.claims import Claim, claim_of_ledger, claim_of_prices
    from dphero.audit.engine_release import EngineRelease, Settings
    from dphero.audit.many_runs import audit_method
    from dphero.audit.mechanism import MechanismAudit, audit_mechanism
    from dphero.audit.membership import Roc, lira, loss_attack
    from dphero.audit.one_run import GradientCanaries, InputCanaries, OneRun, audit_one_run
    from dphero.audit.published import audit_published
    from dphero.audit.report import Report
    from dphero.audit.runs import audit_recipe, audit_run
    from dphero.audit.two_sample import Audit, Release, audit

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
    "checks": ("Check",),
    "claims": ("Claim", "claim_of_ledger", "claim_of_prices"),
    "many_runs": ("audit_method",),
    "engine_release": ("EngineRelease", "Settings"),
    "mechanism": ("MechanismAudit", "audit_mechanism"),
    "membership": ("Roc", "lira", "loss_attack"),
    "one_run": ("GradientCanaries", "InputCanaries", "OneRun", "audit_one_run"),
    "published": ("audit_published",),
    "report": ("Report",),
    "runs": ("audit_recipe", "audit_run"),
    "two_sample": ("Audit", "Release", "audit"),
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: the audit of an engine needs no data sets and no methods."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"dphero.audit.{home}"), name)
    raise AttributeError(f"module 'dphero.audit' has no attribute {name!r}")
