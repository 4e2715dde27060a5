"""Draw docs/images/rooms.svg: the rooms of the package, who may import whom, and the way of one lot.

    python docs/make_rooms.py

The rooms and their order are read from the contract in pyproject.toml that ``make lint`` holds; rooms that do not exist
are left out. Needs nothing but Python.
"""

from __future__ import annotations

import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/rooms.svg"

SUBJECTS = {
    "cli": "commands",
    "audit": "attacks on claims",
    "federated": "many clients",
    "report": "pages for people",
    "explain": "what a model looks at",
    "experiments": "runs and their files, comparisons, the paper's figures",
    "methods": "the compared systems",
    "data": "data sets",
    "models": "networks",
    "integrations": "other libraries",
    "engine": "PrivacyEngine: puts the parts together",
    "run": "ties hooks, lots, mechanism, optimizers",
    "checkpoint": "saves and resumes",
    "checks": "model and loss: exact or refused",
    "cuda_graphs": "recorded passes",
    "hooks": "layers report as the loop runs",
    "mechanism": "clip, sum, add noise, write the ledger",
    "layers": "rule per layer",
    "functional": "rule per function",
    "row_form": "weights computed row by row",
    "guidance": "shape of the noise",
    "noise": "Gaussian sources",
    "sampling": "who is in a lot",
    "gradients": "per-example norms and sums",
    "batch_axis": "where the examples are",
    "geometry": "whiten, colour",
    "numerics": "precision, buffers",
    "accounting": "events, ledger, prices; no torch",
    "_checks": "numbers handed in",
    "_files": "atomic files",
    "_imports": "code named by text",
}
SEES = {  # what flows through a room
    "private": {
        "sampling",
        "hooks",
        "layers",
        "functional",
        "row_form",
        "gradients",
        "batch_axis",
        "checks",
        "cuda_graphs",
        "run",
    },
    "boundary": {"mechanism"},
    "released": {"guidance"},
}
COLOURS = {"private": "#fbe3d6", "boundary": "#f6c344", "released": "#d9ead3", "none": "#eef1f5"}
LEGEND = {
    "private": "sees single examples",
    "boundary": "turns them into a noisy sum",
    "released": "sees released things alone",
    "none": "no part in a step, or sees no data",
}
HOPS = {  # the hops of docs/architecture.md that lead through a room
    "sampling": "1",
    "checks": "2 4",
    "layers": "3",
    "hooks": "2 5 6",
    "gradients": "5",
    "run": "6 9",
    "mechanism": "7 8 10",
    "accounting": "8",
    "noise": "8",
    "geometry": "8",
    "guidance": "10",
}
WIDTH, HEIGHT, GAP, LEFT, TOP = 1000, 46, 10, 20, 60


def layers() -> list[list[str]]:
    """Return the rooms that exist, from the top, those beside each other together."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    package = ROOT / "src/dphero"
    rows = [line.replace("(", "").replace(")", "").replace(":", "|").split("|") for line in contract["layers"]]
    named = [[name.strip() for name in row] for row in rows]
    exist = [[name for name in row if (package / name).is_dir() or (package / f"{name}.py").exists()] for row in named]
    return [row for row in exist if row]


def colours(kind: str) -> str:
    """Return how a box of that kind is filled and framed."""
    return f'fill="{COLOURS[kind]}" stroke="#5b6b7b"'


def box(name: str, x: float, y: float, width: float) -> list[str]:
    """Return one room: its name, its subject, and the hops of the walk that lead through it."""
    kind = next((kind for kind, rooms in SEES.items() if name in rooms), "none")
    middle = x + width / 2
    shapes = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT}" rx="6" {colours(kind)}/>',
        f'<text x="{middle:g}" y="{y + 19:g}" class="name">{escape(name)}</text>',
        f'<text x="{middle:g}" y="{y + 36:g}" class="subject">{escape(SUBJECTS[name])}</text>',
    ]
    for number, hop in enumerate(reversed(HOPS.get(name, "").split())):
        at = x + width - 10 - 20 * number
        shapes.append(f'<circle cx="{at:g}" cy="{y + 2:g}" r="9" fill="#1f4e79"/>')
        shapes.append(f'<text x="{at:g}" y="{y + 6:g}" class="hop">{hop}</text>')
    return shapes


def picture() -> str:
    """Return the picture as SVG."""
    rows = layers()
    bottom = TOP + len(rows) * (HEIGHT + GAP)
    shapes = [
        '<text x="20" y="24" class="title">A room may import from the rooms below it, '
        "never from those above or beside it</text>",
        '<text x="20" y="44" class="subject start">Numbers: the ten hops of one lot, '
        "from the loader to the next geometry</text>",
    ]
    for number, row in enumerate(rows):
        width = (WIDTH - 2 * LEFT - GAP * (len(row) - 1)) / len(row)
        for place, name in enumerate(row):
            shapes += box(name, LEFT + place * (width + GAP), TOP + number * (HEIGHT + GAP), width)
    for place, (kind, words) in enumerate(LEGEND.items()):
        x = LEFT + place * 238
        shapes.append(f'<rect x="{x}" y="{bottom + 8}" width="16" height="16" {colours(kind)}/>')
        shapes.append(f'<text x="{x + 22}" y="{bottom + 21}" class="subject start">{words}</text>')
    style = (
        "text{font-family:system-ui,sans-serif;text-anchor:middle;fill:#1d2733}.name{font-size:15px;font-weight:600}"
        ".subject{font-size:12px;fill:#44505c}.title{font-size:16px;font-weight:600;text-anchor:start}"
        ".start{text-anchor:start}.hop{font-size:11px;font-weight:600;fill:#fff}"
    )
    size = f'width="{WIDTH}" height="{bottom + 36}" viewBox="0 0 {WIDTH} {bottom + 36}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{style}</style>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *shapes, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(f"wrote {PICTURE.relative_to(ROOT)}")
