"""What the audit is worth: how often it notices planted faults, how often it cries wolf, how close it comes to ε.

    python benchmarks/audit.py --out benchmarks/results/audit-cpu.json

*Power*: audits of a broken engine that refute its claim (each stops at the first part that does). *False alarms*: whole
audits of the sound engine that refute it, which may happen to 5 %. *Validity*: single attacks on it whose bound ends
above the claim. *Tightness*: audited over true ε of one unsampled release. *Methods*: every
method of the comparison, by small trainings. *GPU*: the sound engine on a GPU, in float32 and in bf16 autocast, with
passes recorded by default. Everything is seeded.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dphero.accounting import Ledger, PoissonGaussian
from dphero.audit import Claim, EngineRelease, Settings, audit, audit_mechanism, audit_method, claim_of_ledger
from dphero.audit.published import audit_published
from dphero.methods import METHODS

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.audit.faults import FAULTS

DELTA = 1e-5


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4))


def one_release(sigma: float, rate: float, releases: int, seed: int, release: EngineRelease | None = None) -> Any:
    release = release or EngineRelease(Settings(noise_multiplier=sigma), tiny(), sample_rate=rate, seed=seed)
    ledger = Ledger().with_event(PoissonGaussian(rate, sigma))
    found = audit(release, claim(ledger), name="release", releases=releases)
    assert release.ledger() == ledger  # what the engine charged is what was tested
    return found


@cache
def claim_of(text: str) -> Claim:
    return claim_of_ledger(Ledger.from_json(text), DELTA)


def claim(ledger: Ledger) -> Claim:
    return claim_of(ledger.to_json())


def validity(repetitions: int, releases: int) -> list[dict[str, Any]]:
    """One engine goes on and on; every repetition sees releases of its own."""
    rows = []
    for sigma, rate in ((1.0, 1.0), (1.0, 0.5)):
        release = EngineRelease(Settings(noise_multiplier=sigma), tiny(), sample_rate=rate, seed=11)
        found = [one_release(sigma, rate, releases, 0, release) for _ in range(repetitions)]
        above = sum(each.refuted or each.audited_epsilon > each.claim.epsilon for each in found)
        rows.append(
            {
                "noise_multiplier": sigma,
                "sample_rate": rate,
                "releases": releases,
                "repetitions": repetitions,
                "above_claim": above,
                "share": above / repetitions,
                "claimed_epsilon": found[0].claim.epsilon,
                "mean_epsilon_any": sum(each.epsilon_any for each in found) / repetitions,
                "mean_epsilon_fitted": sum(each.epsilon_fitted or 0.0 for each in found) / repetitions,
            }
        )
        print(rows[-1], flush=True)
    return rows


def power(first: int, seeds: int, releases: int) -> list[dict[str, Any]]:
    """Seed by seed, all faults: what is there when it is interrupted is a table of fewer seeds."""
    refuted, by = Counter[str](), {name: Counter[str]() for name in FAULTS}
    for seed in range(first, first + seeds):
        for name, fault in FAULTS.items():
            with fault():
                found = audit_mechanism(fault.settings, releases=releases, delta=DELTA, seed=seed, until_refuted=True)
            refuted[name] += found.refuted
            by[name].update(each.name for each in (*found.checks, *found.audits) if each.refuted)
        missed = {name: refuted[name] for name in FAULTS if refuted[name] <= seed - first}
        print(f"after {seed - first + 1} seeds, refuted less often than that: {missed}", flush=True)
    rows = [{"fault": name, "seeds": seeds, "releases": releases, "refuted": refuted[name]} for name in FAULTS]
    return [{**row, "by": dict(by[str(row["fault"])].most_common())} for row in rows]


def false_alarms(first: int, seeds: int, releases: int) -> dict[str, Any]:
    """The whole quick audit of the sound engine, again and again: how often does any part of it cry wolf?"""
    refuted, by, above = 0, Counter[str](), 0
    started = time.process_time()
    for seed in range(seeds):
        found = audit_mechanism(Settings(), releases=releases, delta=DELTA, seed=10_000 + first + seed)
        refuted += found.refuted
        above += any(each.epsilon_any > each.claim.epsilon for each in found.audits)
        by.update(each.name for each in (*found.checks, *found.audits) if each.refuted)
        if seed % 20 == 19:
            print(f"{refuted} of {seed + 1} audits of the sound engine cry wolf: {dict(by)}", flush=True)
    seconds = (time.process_time() - started) / seeds
    row = {"seeds": seeds, "releases": releases, "refuted": refuted, "by": dict(by), "above_claim": above}
    return {**row, "cpu_seconds_each": round(seconds, 1)}


def tightness(seeds: int) -> list[dict[str, Any]]:
    rows = []
    for releases in (3_000, 10_000):
        for seed in range(seeds):
            found = one_release(1.0, 1.0, releases, seed)
            rows.append({**found.as_dict(), "seed": seed, "share": found.audited_epsilon / found.claim.epsilon})
            print(f"{releases} releases, seed {seed}: {rows[-1]['share']:.1%} of the true ε", flush=True)
    return rows


def methods(releases: int) -> list[dict[str, Any]]:
    rows = []
    for name in METHODS:
        started = time.perf_counter()
        try:
            found = audit_method(name, releases=releases, delta=DELTA).as_dict()
        except ValueError as error:
            found = {"mechanism": name, "error": str(error)}
        rows.append({**found, "seconds": round(time.perf_counter() - started, 1)})
        print(rows[-1], flush=True)
    return rows


def on_gpu(releases: int, device: str = "cuda") -> list[dict[str, Any]]:
    """The engine where it trains real models: claims, what was audited, and what refutes them (nothing should)."""
    rows = []
    for autocast in (False, True):
        for guidance in ("isotropic", "pca"):
            settings = Settings(guidance=guidance, device=device, autocast=autocast)
            found = audit_mechanism(settings, releases=releases, delta=DELTA)
            row: dict[str, Any] = {"precision": "bf16 autocast" if autocast else "float32", "guidance": guidance}
            row["claimed and audited epsilon"] = {
                each.name: [each.claim.epsilon, each.audited_epsilon] for each in found.audits
            }
            row["refuted by"] = [each.name for each in (*found.checks, *found.audits) if each.refuted]
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--repetitions", type=int, default=200, help="audits of the sound engine")
    parser.add_argument("--seeds", type=int, default=10, help="quick audits for each fault")
    parser.add_argument("--first", type=int, default=0, help="the first of these seeds")
    parser.add_argument("--releases", type=int, default=60, help="of each attack, with and without the canary")
    parser.add_argument("--trainings", type=int, default=300, help="of each method, with and without the canary")
    parser.add_argument(
        "--parts", nargs="*", help="only these: published power false_alarms validity tightness methods gpu"
    )
    chosen = parser.parse_args()
    figures: dict[str, Any] = {"torch": torch.__version__, "platform": platform.platform(), "delta": DELTA}
    parts: dict[str, Callable[[], Any]] = {
        "published": lambda: [each.as_dict() for each in audit_published(releases=500)],
        "power": lambda: power(chosen.first, chosen.seeds, chosen.releases),
        "false_alarms": lambda: false_alarms(chosen.first, chosen.repetitions, chosen.releases),
        "validity": lambda: validity(chosen.repetitions, 100),
        "tightness": lambda: tightness(5),
        "methods": lambda: methods(chosen.trainings),
    }
    if torch.cuda.is_available():
        parts["gpu"] = lambda: on_gpu(chosen.releases)
    if chosen.out and chosen.out.exists():
        figures = {**json.loads(chosen.out.read_text()), **figures}
    for name in chosen.parts or parts:
        part, started = parts[name], time.perf_counter()
        figures[name] = part()
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        if chosen.out:  # after every part: what is done is not lost
            chosen.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(
        json.dumps({name: figures.get(name) for name in ("published", "power", "false_alarms", "validity")}, indent=1)
    )


if __name__ == "__main__":
    main()
