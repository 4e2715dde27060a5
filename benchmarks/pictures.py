"""Set the committed pictures beside those of an older commit: what was mended can be seen.

    .venv/bin/python benchmarks/pictures.py

Pictures of an audit are drawn anew by both, from an audit of a minute each; all others are those that are committed.
Writes ``results/pictures/NAME.png`` and ``results/pictures.md``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _before import COMMIT, ROOT, older_code
from PIL import Image

RESULTS = Path("benchmarks", "results")
WIDTH, GAP = 760, 16

PICTURES = {
    "reproduction/iterations": "subtitles lay over the titles of the panels",
    "reproduction/epochs": "subtitles lay over the titles of the panels",
    "reproduction/learning-rates": "subtitles lay over the titles of the panels",
    "reproduction/lots": "subtitles lay over the titles of the panels",
    "reproduction/noise-spectra": "the paper's claim and cifar-cnn had colours of verdicts and methods",
    "reproduction/cifar": "curves at 8 to 26 % on an axis from 0 to 100",
    "reproduction/epsilon-boxes": "colours of its own for methods; the note ran over the sides",
    "mnist-methods/accuracy": "16 lines in seven colours: now the best are coloured and all are named at their ends",
    "audit/epsilons": "the claim's bar crossed out numbers; a verdict had another colour in each picture",
    "audit/trade-off": "no confidence band; lines vanished in the legend",
}


def audit(source: Path, folder: Path) -> Path:
    """Audit the published recipe by the code under ``source``, and return where its pictures are."""
    command = [sys.executable, "-m", "dphero.cli", "audit", "published", "--releases", "200", "--out", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(source / "src")}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def beside(before: Path, after: Path, to: Path) -> None:
    """Write two pictures beside each other, of one width, in few colours."""
    drawn = []
    for path in (before, after):
        with Image.open(path) as picture:
            height = round(picture.height * WIDTH / picture.width)
            drawn.append(picture.convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS))
    both = Image.new("RGB", (2 * WIDTH + GAP, max(each.height for each in drawn)), "white")
    both.paste("#888888", (WIDTH + GAP // 2 - 1, 0, WIDTH + GAP // 2 + 1, both.height))
    for number, each in enumerate(drawn):
        both.paste(each, (number * (WIDTH + GAP), 0))
    to.parent.mkdir(exist_ok=True)
    both.quantize(256, Image.Quantize.FASTOCTREE).save(to, optimize=True)


def main() -> None:
    """Write all pairs, and a page that shows them."""
    lines = ["# Pictures, before and after", ""]
    lines += [f"Written by `benchmarks/pictures.py`. Left: commit {COMMIT}; right: today.", ""]
    with older_code() as before, tempfile.TemporaryDirectory() as folder:
        audits = {source: audit(source, Path(folder, str(number))) for number, source in enumerate((before, ROOT))}
        for name, what in PICTURES.items():
            kind, _, file = name.partition("/")
            sides = [
                (audits[source] if kind == "audit" else source / RESULTS / kind) / f"{file}.png"
                for source in (before, ROOT)
            ]
            to = ROOT / RESULTS / "pictures" / f"{name.replace('/', '-')}.png"
            beside(*sides, to)
            lines += [f"## {name}: {what}", "", f"![{name}, before and after](pictures/{to.name})", ""]
    (ROOT / RESULTS / "pictures.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
