"""Which models of well-known libraries can be trained privately: a table.

    python benchmarks/models.py [PART OF A NAME ...]

Each model is tiny and has random weights. It is trained by the public interface for one lot, with next to no noise and
half of the examples clipped; *exact* means that what is released is the clipped sum of micro-batches of one. Results:
``results/models.json`` and ``results/models.md``. Models that are named run alone, and the others keep their rows.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tests.libraries.cases import CASES  # noqa: E402
from tests.libraries.verdict import TOLERANCE, examine  # noqa: E402

RESULTS = HERE / "results" / "models.json"
LIBRARIES = "torch", "transformers", "timm", "peft", "diffusers"
MOST_WORDS = 200
"""Letters of a reason that fit into a cell."""


def row(name: str) -> dict[str, Any]:
    """Examine one model."""
    verdict = examine(CASES[name])
    found: dict[str, Any] = {"parameters": verdict.parameters, "step_ms": round(1000 * verdict.step_seconds, 2)}
    if verdict.exact and not verdict.error <= TOLERANCE:
        return {"verdict": "WRONG", "difference": verdict.error, **found}
    if not verdict.exact:
        return {"verdict": "refused", "reason": verdict.reason, **found}
    return {
        "verdict": "exact",
        "difference": float(f"{verdict.error:.1e}"),
        **found,
        "first_batch_ms": round(1000 * verdict.first_seconds, 1),
        "first_batch_steps": round(verdict.first_seconds / verdict.step_seconds),
    }


def table(rows: dict[str, dict[str, Any]], versions: dict[str, str]) -> str:
    """Return the rows as Markdown."""
    counts = {kind: sum(each["verdict"] == kind for each in rows.values()) for kind in ("exact", "refused", "WRONG")}
    lines = [
        f"{len(rows)} models: {counts['exact']} exact, {counts['refused']} refused, {counts['WRONG']} wrong. "
        f"Versions: {', '.join(f'{name} {number}' for name, number in versions.items())}.",
        "",
        "*Difference*: the largest one between the private gradient (without noise) and that of micro-batches of one, "
        "relative to each parameter's largest entry; float32. *First batch*: the time of the first private step, in "
        "which the model is examined, and how many ordinary steps of 4 rows that is (these models are tiny; of a large "
        "one, the examination sees 5 and 7 rows).",
        "",
        "| library | model | parameters | verdict | difference | first batch |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in rows.items():
        library, _, model = name.partition("/")
        reason = each.get("reason", "").replace("|", "\\|")
        reason = reason if len(reason) <= MOST_WORDS else reason[:MOST_WORDS] + " …"
        verdict = each["verdict"] + (f": {reason}" if reason else "")
        difference = f"{each['difference']:.0e}" if "difference" in each else ""
        first = (
            f"{each['first_batch_ms']:.0f} ms, {each['first_batch_steps']} steps" if "first_batch_ms" in each else ""
        )
        lines.append(f"| {library} | {model} | {each['parameters']:,} | {verdict} | {difference} | {first} |")
    return "\n".join(lines) + "\n"


def installed(library: str) -> str | None:
    """Return the version of a library, if it is there."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def main(parts: list[str]) -> None:
    """Examine the models and write their table."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    versions = {library: found for library in LIBRARIES if (found := installed(library)) is not None}
    known = json.loads(RESULTS.read_text())["models"] if RESULTS.exists() else {}
    rows = {}
    for name in CASES:
        wanted = not parts or any(part in name for part in parts)
        if wanted and name.partition("/")[0] in versions:
            rows[name] = row(name)
            print(name, rows[name], flush=True)
        elif name in known:
            rows[name] = known[name]
    RESULTS.write_text(json.dumps({"versions": versions, "models": rows}, indent=1, ensure_ascii=False) + "\n")
    RESULTS.with_suffix(".md").write_text(table(rows, versions))


if __name__ == "__main__":
    main(sys.argv[1:])
