"""Attacks on printed claims, before and after: each with its guard taken away, then as dphero is.

    python benchmarks/attacks.py [NAME ...]

The attacks lie in ``_attacks_*.py`` beside this file, each with a list ``ATTACKS``. Results: ``results/attacks.json``
and ``results/attacks.md``. Attacks that are named run alone, and the others keep their figures.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from _attack import Attack, Figures  # noqa: E402

RESULTS = HERE / "results" / "attacks.json"


def collect() -> list[Attack]:
    """Return all attacks, in the order of their files."""
    attacks: list[Attack] = []
    for path in sorted(HERE.glob("_attacks_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        attacks += module.ATTACKS
    return attacks


def words(figures: Figures) -> str:
    """Return figures as one cell of a table."""
    cells = [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name}: {value}" for name, value in figures.items()
    ]
    return "; ".join(cells).replace("|", "\\|")


def main(names: list[str]) -> None:
    """Run the attacks and write their table."""
    torch.set_num_threads(1)
    attacks = collect()
    unknown = set(names) - {attack.name for attack in attacks}
    if unknown:
        sys.exit(f"no such attack: {', '.join(sorted(unknown))}; there are {', '.join(a.name for a in attacks)}")
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = {}
    for attack in attacks:
        if names and attack.name not in names and attack.name in known:
            results[attack.name] = known[attack.name]
        elif not names or attack.name in names:
            results[attack.name] = {"what": attack.what, "before": attack.before(), "after": attack.after()}
            print(f"{attack.name}\n  without: {words(results[attack.name]['before'])}")
            print(f"  with:    {words(results[attack.name]['after'])}", flush=True)
    RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    lines = ["| attack | what a user does | guard taken away | as dphero is |", "|---|---|---|---|"]
    for name, row in results.items():
        lines.append(f"| {name} | {row['what']} | {words(row['before'])} | {words(row['after'])} |")
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
