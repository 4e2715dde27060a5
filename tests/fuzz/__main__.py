"""``make fuzz``: thousands of odd command lines and damaged files, and what became of them."""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from pathlib import Path

from tests.fuzz import command_lines, corruptions

LOG = Path(__file__).parents[2] / "benchmarks" / "results" / "fuzz.log"


def main() -> int:
    """Run all parts, write the log, and return 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--checkpoints", type=int, default=1100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=LOG)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = [
            lambda: corruptions.fuzz_checkpoints(given.checkpoints, given.seed, folder / "library"),
            lambda: corruptions.fuzz_runs(given.runs, given.seed, folder / "runs"),
            lambda: command_lines.fuzz(given.lines, given.seed, folder / "runs" / "finished", folder / "lines"),
        ]
        faults = 0
        log = [f"seed {given.seed}"]
        for part in parts:
            findings = part()
            faults += len(findings.faults)
            log += [findings.summary(), *findings.faults]
            print("\n".join([findings.summary(), *findings.faults]), flush=True)
    given.log.write_text("\n".join(log) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
