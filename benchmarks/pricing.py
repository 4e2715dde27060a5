"""What it takes to price a ledger of many different releases, and how close the bound is to composing one by one.

Writes ``results/pricing.json`` and ``results/pricing.log``. CPU seconds of one thread; minutes in all, most of them for
the one-by-one compositions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dphero.accounting import Ledger, PoissonGaussian, price, privacy_loss
from dphero.accounting.numerics import many

RESULTS = Path(__file__).parent / "results"
DELTA = 1e-5


def schedule(different: int) -> Ledger:
    """Return steps whose noise multiplier moves from 0.8 to 1.6 at sample rate 0.01."""
    ledger = Ledger()
    for sigma in np.linspace(0.8, 1.6, different):
        ledger.record(PoissonGaussian(0.01, float(sigma)))
    return ledger


def federated(different: int) -> Ledger:
    """Return rounds with a rate and a noise multiplier of their own."""
    rng = np.random.default_rng(0)
    ledger = Ledger()
    for _ in range(different):
        ledger.record(PoissonGaussian(float(0.01 * np.exp(rng.uniform(-0.5, 0.5))), float(rng.uniform(0.8, 1.6))))
    return ledger


def timed(work: Callable[[], float]) -> tuple[float, float]:
    """Return what the work returns and the CPU seconds it took."""
    start = time.process_time()
    value = work()
    return value, time.process_time() - start


def one_by_one(ledger: Ledger) -> float:
    """Return the price by composing the releases one after another, as for few of them."""
    usual, privacy_loss._FEW = privacy_loss._FEW, 10**9
    try:
        return price(ledger, DELTA).epsilon
    finally:
        privacy_loss._FEW = usual


def main() -> None:
    """Measure, print and write."""
    rows = []
    for name, make in (("schedule", schedule), ("federated", federated)):
        for different in (100, 1_000, 10_000):
            ledger = make(different)
            many.remembered.clear()
            epsilon, seconds = timed(lambda ledger=ledger: price(ledger, DELTA).epsilon)
            longer = ledger.with_event(PoissonGaussian(0.01, 1.23456))
            _, appended = timed(lambda longer=longer: price(longer, DELTA).epsilon)
            renyi, renyi_seconds = timed(lambda ledger=ledger: price(ledger, DELTA, "rdp").epsilon)
            row = {"ledger": name, "different": different, "epsilon": epsilon, "seconds": round(seconds, 3)}
            row |= {
                "one_more_seconds": round(appended, 3),
                "rdp_epsilon": renyi,
                "rdp_seconds": round(renyi_seconds, 3),
            }
            if different == 100:
                sequential, slow = timed(lambda ledger=ledger: one_by_one(ledger))
                row |= {"one_by_one_epsilon": sequential, "one_by_one_seconds": round(slow, 3)}
                row |= {"above": epsilon / sequential - 1}
            rows.append(row)
            print(json.dumps(row), flush=True)
    (RESULTS / "pricing.json").write_text(json.dumps({"delta": DELTA, "rows": rows}, indent=2) + "\n")
    (RESULTS / "pricing.log").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
