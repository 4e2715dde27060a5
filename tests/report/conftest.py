"""What to report about: a small real comparison, trained once, and copies of logs; and a browser to look with."""

import json
import os
import shutil
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CIFAR = RESULTS / "cifar10-runs" / "feature-dp-epsilon-3-seed-0"


class Here:
    """A pool without processes."""

    def __init__(self, state, size):
        self.state = state

    def run(self, asked_to_stop):
        from dphero.experiments.comparison.worker import train_run

        while self.state.waiting:
            planned = self.state.begin()
            self.state.end(planned, train_run(str(self.state.path(planned)), planned.recipe.as_dict()))


@pytest.fixture(scope="session")
def comparison(tmp_path_factory):
    """Digits by four methods, two seeds of one; nothing in it may be changed."""
    pytest.importorskip("sklearn")
    pytest.importorskip("safetensors")
    from dphero.experiments.comparison import sweep
    from dphero.experiments.comparison.plan import Planned
    from dphero.experiments.defaults import resolve

    plan = []
    for method, epsilon in (("sgd", None), ("dp-sgd", 3.0), ("dp-hero", 8.0), ("dp-hero-published", None)):
        for seed in (0, 1) if method == "dp-hero" else (2,):
            given = {"data": "digits", "method": method, "epsilon": epsilon, "seed": seed, "epochs": 2.0}
            given["lot"] = 512
            if method == "dp-hero-published":
                given["noise_multiplier"] = 3.0
            recipe = resolve({name: value for name, value in given.items() if value is not None})
            plan.append(Planned(f"{method}_seed{seed}", recipe, 3.0 if method == "dp-hero-published" else None))
    place = tmp_path_factory.mktemp("comparison") / "digits"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "Pool", Here)
        found = sweep.sweep(plan, place, workers=1)
    assert all(outcome.result is not None for outcome in found), [outcome.error for outcome in found]
    return place


@pytest.fixture
def log(tmp_path):
    """Return a function that copies a log of a run on CIFAR-10 and changes it."""

    def copied(name, files=(), **settings):
        place = tmp_path / name
        shutil.copytree(CIFAR, place)
        lines = (place / "recipe.toml").read_text().splitlines()
        for key, value in settings.items():
            lines = [line for line in lines if not line.startswith(f"{key} =")]
            lines.insert(0, f"{key} = {json.dumps(value)}")
        (place / "recipe.toml").write_text("\n".join(lines) + "\n")
        for file, text in dict(files).items():
            (place / file).unlink() if text is None else (place / file).write_text(text)
        return place

    return copied


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium; tests that need one are skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("DPHERO_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("there is no Chromium to open reports in: make browser, or apt-get install chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def look(browser):
    """Return a function that opens a page and fails the test on any error, dialog or request to elsewhere."""
    contexts, wrong = [], []

    def opened(address, width=1280, scheme="light", seconds=60):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        home = str(address) if str(address).startswith("http") else Path(address).as_uri()
        page.on("request", lambda asked: None if asked.url.startswith(home) else wrong.append(asked.url))
        page.goto(home)
        page.wait_for_selector("html[data-ready]", timeout=1000 * seconds)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong
