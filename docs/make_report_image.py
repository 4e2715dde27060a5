"""Photograph the page about the committed comparison on MNIST: docs/images/report.png.

    pip install playwright pillow
    python docs/make_report_image.py

Needs Chromium (Debian's, or the one that DPHERO_CHROMIUM names). A desktop's first screens, and a phone's beside them.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from dphero.report import build, read, write

HERE = Path(__file__).parent
COMPARISON = HERE.parent / "benchmarks" / "results" / "mnist-comparison"
GAP = 24
SCREENS = ((1120, 1800, "light"), (390, 1800, "dark"))  # width, height, colours


def main() -> None:
    """Write the picture."""
    shots = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        page_file = Path(folder, "page.html")
        os.chdir(COMPARISON.parent)
        write(build(read([COMPARISON.name])), page_file)
        program = os.environ.get("DPHERO_CHROMIUM") or shutil.which("chromium")
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for width, height, scheme in SCREENS:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-ready]")
            page.evaluate("document.getElementById('promise').style.display = 'none'")  # long, and words alone
            shots.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
        browser.close()
    whole = Image.new("RGB", (sum(each.width for each in shots) + GAP, shots[0].height), "white")
    whole.paste(shots[0], (0, 0))
    whole.paste(shots[1], (shots[0].width + GAP, 0))
    whole.quantize(256, Image.Quantize.FASTOCTREE).save(HERE / "images" / "report.png", optimize=True)


if __name__ == "__main__":
    main()
