"""The page in a real browser: no error, no network; toggles, hover and keyboard work; numbers are the files'."""

import json
import re
import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from dphero.report import build, read, write

pytest.importorskip("plotly")
pytestmark = pytest.mark.timeout(300)

FEDERATED = Path(__file__).parent / "federated-run"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def page_of_comparison(comparison, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    write(build(read([comparison])), path)
    return path


def traces(page, figure):
    """What is drawn at this moment."""
    script = 'name => document.querySelector(`[data-figure="${name}"]`).data.map(t => ({...t, marker: null}))'
    return page.evaluate(script, figure)


def until(page, condition, seconds=60):
    """Wait for a condition (playwright's own waiting needs eval, which the page forbids)."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


def visible(page, figure, group):
    return [each.get("visible", True) for each in traces(page, figure) if each.get("legendgroup") == group]


def test_numbers_equal_the_files(page_of_comparison, comparison, look):
    page = look(page_of_comparison)
    for number, method in enumerate(("sgd", "dp-sgd", "dp-hero", "dp-hero-published")):
        results = [json.loads(each.read_text()) for each in comparison.glob(f"runs/{method}_seed*/result.json")]
        line = page.locator("#summary tbody tr").nth(number)
        assert method in line.inner_text()
        shown = line.locator("[data-value]").evaluate_all("all => all.map(e => Number(e.dataset.value))")
        assert statistics.fmean(each["accuracy"] for each in results) in shown
        if results[0]["epsilon"] is not None:
            assert max(each["epsilon"] for each in results) in shown
    assert page.locator("#summary table .badge.unsound").inner_text() == "unsound as published"
    drawn = {each["name"]: each for each in traces(page, "frontier")}
    accuracies = [
        json.loads(each.read_text())["accuracy"] for each in comparison.glob("runs/dp-hero_seed*/result.json")
    ]
    assert drawn["dp-hero"]["y"] == [statistics.fmean(accuracies)]
    assert sorted(drawn["dp-hero: single runs"]["y"]) == sorted(accuracies)


def test_toggles_hover_and_keyboard(page_of_comparison, look):
    page = look(page_of_comparison)
    group = "dp-sgd"
    button = page.locator('[data-legend="frontier"] button', has_text=re.compile("^dp-sgd$"))
    assert visible(page, "frontier", group) == [True, False]
    button.click()
    until(page, "document.querySelector('[data-figure=gain]').data.some(t => t.visible === false)")
    assert not any(visible(page, "frontier", group) + visible(page, "gain", group)), "one switch rules all figures"
    assert button.get_attribute("aria-pressed") == "false"
    button.press("Enter")
    assert visible(page, "frontier", group) == [True, False]
    page.get_by_label("show single runs").check()
    assert visible(page, "frontier", group) == [True, True]
    page.get_by_label("place methods at their true ε").check()
    placed = {each["name"]: each["x"] for each in traces(page, "frontier")}
    assert placed["dp-hero"] == pytest.approx([8.0], abs=0.05) and placed["dp-hero"] != [8.0]

    assert "accuracy" in hovered(page)


def hovered(page):
    """What is shown when the mouse stands on the first point of the frontier."""
    page.locator('[data-figure="frontier"]').scroll_into_view_if_needed()
    point = page.locator('[data-figure="frontier"] .scatterlayer .trace .point').first.bounding_box()
    page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    page.wait_for_selector('[data-figure="frontier"] .hoverlayer .hovertext')
    return page.locator('[data-figure="frontier"] .hoverlayer').text_content()


@pytest.mark.parametrize(("source", "method", "runs"), [
    ("mnist-comparison", "dp-hero", "runs/dp-hero_eps3_*"), ("cifar10-runs", "feature-dp", "feature-dp-epsilon-3-*"),
])  # fmt: skip
def test_real_comparisons(source, method, runs, tmp_path, look):
    """MNIST on a CPU, three seeds, and CIFAR-10 on a GPU: numbers are those of the logs; switches and hover work."""
    write(build(read([RESULTS / source])), tmp_path / "page.html")
    page = look(tmp_path / "page.html")
    logs = [
        [json.loads(line) for line in each.read_text().splitlines()]
        for each in sorted((RESULTS / source).glob(f"{runs}/metrics.jsonl"))
    ]
    for figure, name in (("accuracy", "accuracy"), ("budget", "epsilon")):
        curve = [statistics.fmean(line[name] for line in at_once) for at_once in zip(*logs, strict=True)]
        drawn = [each for each in traces(page, figure) if each.get("legendgroup") == method and each["mode"] != "none"]
        assert curve in [each["y"] for each in drawn]
        assert all(each["x"] == [line["epoch"] for line in logs[0]] for each in drawn)
    finals = [json.loads(each.read_text()) for each in (RESULTS / source).glob(f"{runs}/result.json")]
    shown = page.locator("#summary table [data-value]").evaluate_all("all => all.map(e => Number(e.dataset.value))")
    assert {statistics.fmean(each["accuracy"] for each in finals), max(each["epsilon"] for each in finals)} <= {*shown}
    assert "accuracy" in hovered(page)
    page.locator('[data-legend="accuracy"] button', has_text=re.compile(f"^{method}$")).click()
    until(page, "document.querySelector('[data-figure=gain]').data.some(t => t.visible === false)")
    assert not any(visible(page, "gain", method) + visible(page, "accuracy", method))


@pytest.mark.parametrize("width", [390, 1280])
def test_numbers_of_a_far_axis_do_not_touch(width, tmp_path, look):
    """Beside a true ε of 668,718 an ε of 1 keeps its place, and numbers below can be read."""
    write(build(read([RESULTS / "mnist-comparison"])), tmp_path / "page.html")
    page = look(tmp_path / "page.html", width)
    page.get_by_label("place methods at their true ε").check()
    until(page, "document.querySelector('[data-figure=frontier] .xtitle').textContent.startsWith('true')")
    texts = "all => all.map(e => e.getBoundingClientRect()).map(({left, right}) => [left, right])"
    places = sorted(page.locator("[data-figure=frontier] .xtick text").evaluate_all(texts))
    assert len(places) >= 2
    assert all(right + 4 <= left for (_, right), (left, _) in pairwise(places)), places
    reach = {each["name"]: each["x"] for each in traces(page, "frontier")}
    assert reach["sgd (not private)"][1] > max(reach["dp-hero-published (UNSOUND AS PUBLISHED)"]) > 600_000


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_fits_the_screen_and_can_be_read(page_of_comparison, look, width, scheme):
    page = look(page_of_comparison, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    contrasts = page.evaluate(CONTRASTS)
    assert contrasts and min(each[0] for each in contrasts) >= 4.5, sorted(contrasts)[:3]
    unnamed = "e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label'))"
    assert not page.evaluate(f"[...document.querySelectorAll('button, input, a, [role]')].filter({unnamed}).length")
    assert page.locator("main").count() == page.locator("h1").count() == page.locator("nav").count() == 1


def test_on_paper(page_of_comparison, tmp_path, look):
    """Dark pages are printed in dark ink on white; what matters is unfolded."""
    page = look(page_of_comparison, scheme="dark")
    assert min(each[0] for each in page.evaluate(NAMES)) >= 4.5, "names at the ends of lines"
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    until(page, "document.querySelector('#statement-0').open")
    ink = page.locator(".badge.sound").first.evaluate("e => getComputedStyle(e).backgroundColor")
    assert min(map(int, re.findall(r"\d+", ink))) > 200, "a dark badge would be printed"
    until(page, "document.querySelector('[data-figure=frontier] .xtick text').style.fill === 'rgb(0, 0, 0)'")
    write(build(read([many_runs(tmp_path / "many")])), tmp_path / "many.html")
    page = look(tmp_path / "many.html")
    assert not page.locator("#all-settings").get_attribute("open")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#all-settings").get_attribute("open") is not None
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("#all-settings").get_attribute("open") is None


CONTRASTS = """() => {
  const light = (c) => { const v = c / 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  return [...document.querySelectorAll('p, th, td, .badge, a, summary, caption, .what, .note, button, dt, dd, h2')]
    .filter((e) => e.offsetParent && e.textContent.trim()).map((e) => {
      const [a, b] = [luminance(parse(getComputedStyle(e).color)), luminance(behind(e))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), e.className + ' ' + e.textContent.slice(0, 30)]; });
}"""

NAMES = (
    CONTRASTS.replace(
        "'p, th, td, .badge, a, summary, caption, .what, .note, button, dt, dd, h2'", "'.annotation text'"
    )
    .replace("e.offsetParent && ", "")
    .replace("getComputedStyle(e).color", "getComputedStyle(e).fill")
)


def test_a_federated_run(tmp_path, look):
    write(build(read([FEDERATED])), tmp_path / "page.html")
    page = look(tmp_path / "page.html", 390)
    result = json.loads((FEDERATED / "result.json").read_text())
    (bars,) = traces(page, "clients-federated-run")
    assert dict(zip(bars["x"], bars["y"], strict=True)) == {f"client {n}": e for n, e in result["clients"].items()}
    (held,) = traces(page, "partition-federated-run")
    lines = (FEDERATED / "partition.csv").read_text().splitlines()[1:]
    assert held["z"] == [[int(each) for each in line.split(",")[1:]] for line in lines]
    assert "of one client" in page.locator("#promise").inner_text()


def test_names_are_text(log, tmp_path, look):
    name = "<script>alert('name')<"
    places = [log(name, data="<img src=x onerror=alert(1)>"), log("other", data="</script><script>alert(2)")]
    write(build(read(places)), tmp_path / "page.html")
    page = look(tmp_path / "page.html")
    assert name in page.locator("#recipe").inner_text()
    assert "<img src=x onerror=alert(1)>" in page.locator("#summary").inner_text()
    page.locator('[data-legend="gain"] button').first.click()


def test_a_live_page_follows_the_training(log, look):
    from dphero.report.serve import LiveServer

    metrics = (log("whole") / "metrics.jsonl").read_text().splitlines(keepends=True)
    place = log("live", {"result.json": None, "statement.txt": None, "metrics.jsonl": "".join(metrics[:3])})
    with LiveServer([place]) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            page = look(server.address)
            assert len(traces(page, "budget")[0]["y"]) == 3
            assert "in training" in page.locator("#summary").inner_text()
            page.locator("#numbers-budget summary").click()
            with (place / "metrics.jsonl").open("a") as file:
                file.writelines(metrics[3:9])
            until(page, "document.querySelector('[data-figure=budget]')?.data?.[0]?.y.length === 9")
            assert page.locator("#numbers-budget").get_attribute("open") is not None, "what was open stays open"
        finally:
            server.shutdown()


def test_two_hundred_runs(tmp_path, look):
    place, started = many_runs(tmp_path / "many"), time.process_time()
    size = write(build(read([place])), tmp_path / "page.html")
    assert time.process_time() - started < 5
    assert size < 10e6
    begun = time.process_time()
    page = look(tmp_path / "page.html")
    assert time.process_time() - begun < 5
    assert page.locator("#summary tbody tr").count() == 40


def many_runs(place):
    """Forty settings with five seeds each, all of different noise."""
    for number in range(40):
        method, epsilon = ("dp-sgd", "dp-hero", "adaclip", "geoclip")[number % 4], 0.5 + number // 4
        event = {"kind": "poisson_gaussian", "sample_rate": 0.01, "noise_multiplier": 1.0 + number / 50, "count": 500}
        for seed in range(5):
            path = place / f"{method}-{epsilon}-{seed}"
            path.mkdir(parents=True)
            recipe = {"data": "mnist", "model": "lenet", "method": method, "epsilon": epsilon, "seed": seed}
            path.joinpath("recipe.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in recipe.items()))
            path.joinpath("ledger.json").write_text(json.dumps({"version": 1, "events": [event]}))
            lines = [
                {"step": 50 * epoch, "epoch": epoch, "accuracy": 0.9 + epoch / 1000, "epsilon": epsilon * epoch / 30}
                for epoch in range(1, 31)
            ]
            path.joinpath("metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            result = {"accuracy": 0.93 + seed / 1000, "epsilon": epsilon, "delta": 1e-5, "steps": 500, "seconds": 1.0}
            result |= {"is_bound": True, "accountant": "pld", "other_prices": {}, "noise_multiplier": 1.0}
            path.joinpath("result.json").write_text(json.dumps(result))
    return place


def test_heat_maps_on_a_phone_and_on_paper(look, tmp_path):
    """Pictures are no wider than they were drawn, and verdicts can be read."""
    write(build(read([RESULTS / "heatmaps"])), tmp_path / "page.html")
    page = look(tmp_path / "page.html", 390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = page.locator("#heat-maps img").evaluate_all("all => all.map(e => [e.width, e.naturalWidth])")
    assert wide and all(shown <= natural / 1.5 + 1 for shown, natural in wide)
    page = look(tmp_path / "page.html", 680)
    page.emulate_media(media="print")
    verdicts = page.locator("#heat-maps .words").evaluate_all("all => all.map(e => e.offsetWidth)")
    assert verdicts and min(verdicts) > 150
