"""What `dphero demo` reaches: its accuracy on held-out digits over seeds.

python benchmarks/demo.py [--seeds 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from dphero.experiments import demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = [demo.train(seed=seed) for seed in range(arguments.seeds)]
    accuracies = [round(100 * result.accuracy, 2) for result in results]
    record = {
        "epsilon": max(result.statement.price.epsilon for result in results),
        "delta": demo.DELTA,
        "accuracies": accuracies,
        "mean": round(statistics.mean(accuracies), 2),
        "spread (sample sd)": round(statistics.stdev(accuracies), 2),
    }
    print(json.dumps(record, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
