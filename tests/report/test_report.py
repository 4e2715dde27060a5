"""The page: what it tells, what it keeps back, and what it does with damage."""

import http.client
import json
import math
import re
import threading
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dphero.accounting import Ledger, trade_off
from dphero.cli import app
from dphero.report import build, figures, read
from dphero.report.figures.drawing import wider_below

pytest.importorskip("plotly")
pytestmark = pytest.mark.timeout(300)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CIFAR = RESULTS / "cifar10-runs" / "feature-dp-epsilon-3-seed-0"


def run(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def exact(text):
    """The exact numbers behind those that are shown."""
    return {float(each) for each in re.findall(r'data-value="([^"]+)"', text)}


def test_numbers_on_the_page_are_those_of_the_files(tmp_path):
    page = tmp_path / "page.html"
    found = run(CIFAR, "-o", page, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout) | {"bytes": 0} == {
        "report": str(page), "bytes": 0, "runs": [CIFAR.name], "skipped": [],
    }  # fmt: skip
    assert page.stat().st_mode & 0o077 == 0, "accuracies are computed without noise"
    text = page.read_text()
    result = json.loads((CIFAR / "result.json").read_text())
    gained = trade_off(Ledger.from_json((CIFAR / "ledger.json").read_text())).true_positive_rate(0.01)
    assert {result["epsilon"], result["accuracy"], gained} <= exact(text)
    assert "69.11 %" in text and "NVIDIA H200" in text and "Gaussian noise on Poisson lots, 360 releases" in text
    metrics = [json.loads(line) for line in (CIFAR / "metrics.jsonl").read_text().splitlines()]
    drawn = build(read([CIFAR])).figures
    assert drawn["budget"]["data"][0]["y"] == [line["epsilon"] for line in metrics]
    assert drawn["accuracy"]["data"][0]["y"] == [line["accuracy"] for line in metrics]


def test_a_table_whose_runs_are_gone_and_runs_from_a_gpu(tmp_path):
    material = read([RESULTS / "mnist-methods", RESULTS / "cifar10-runs"])
    rows = json.loads((RESULTS / "mnist-methods" / "table.json").read_text())["rows"]
    assert not material.problems
    assert len(material.rows) == len(rows) + 2
    page = build(material)
    assert {row["accuracy"] for row in rows} <= exact(page.main)
    published = [row for row in rows if row["method"] == "dp-hero-published"]
    assert page.main.count("unsound as published") >= 2 * len(published) > 0
    assert {row["claimed_epsilon"] for row in published} <= set(page.figures["claims"]["data"][0]["x"])
    claims = page.main.partition('id="claims"')[2].partition("</section>")[0]
    below = [row for row in rows if row["claimed_epsilon"] and row["method"] == "gdp"]
    assert claims.count("not a proven bound") == len(below) > 0, "gdp claims less than what is proven of it"
    assert "sound<" not in claims, "that nothing was found proves nothing"


def test_private_things_are_kept_back(log):
    place = log("run", {"environment.json": '{"command": ["train", "--seed", "987654321"]}'}, seed=987654321)
    text = build(read([place])).html()
    metrics = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert "987654321" not in text
    assert not any(repr(line[name])[:10] in text for line in metrics for name in ("loss", "signal_to_noise"))
    federated = Path(__file__).parent / "federated-run"
    seeds = [json.loads((federated / "federation.json").read_text())["seed"]]
    seeds += re.findall(r"(?m)^seed = (\d+)", (federated / "recipe.toml").read_text())
    page = build(read([federated])).html()
    assert seeds and not any(str(seed) in page for seed in seeds if seed is not None and len(str(seed)) > 3)
    shown = build(read([place]), private_diagnostics=True)
    assert shown.figures["diagnostics"]["data"][0]["y"] == [line["loss"] for line in metrics]
    assert "No ε covers them" in shown.main


def test_what_is_damaged_is_named_and_the_rest_is_shown(log, tmp_path):
    good = log("good")
    log("cut-recipe", {"recipe.toml": 'data = "cif'})
    log("cut-result", {"result.json": '{"accuracy": 0.6'})
    log("no-epsilon", {"result.json": '{"accuracy": 0.6}'})
    log("odd-ledger", {"ledger.json": '{"version": 1, "events": [{"kind": "unheard"}]}'})
    log("odd-metrics", {"metrics.jsonl": '{"step": 1}\n'})
    log("unknown-method", method="magic")
    audited = log("audited")
    (audited / "audit").mkdir()
    (audited / "audit" / "audit.json").write_text("{")
    explained = log("explained")
    (explained / "explain").mkdir()
    (explained / "explain" / "explain.json").write_text('{"pictures": [{"file": "../x.png"}]}')
    found = run(tmp_path, "-o", tmp_path / "page.html", "--json")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["runs"] == ["audited", "explained", "good"]
    assert len(told["skipped"]) == 8
    text = (tmp_path / "page.html").read_text()
    for each in told["skipped"]:
        assert each["place"] in found.stderr and each["place"] in text
    assert json.loads((good / "result.json").read_text())["epsilon"] in exact(text)


def test_a_run_that_has_just_begun(log):
    place = log("begun", {name: None for name in ("result.json", "metrics.jsonl", "ledger.json", "statement.txt")})
    page = build(read([place]))
    assert "begun" in page.main and "No statement yet" in page.main and "gain" not in page.figures


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        ([str(Path(__file__))], "is no directory"),
        (["--serve", "-o", "x.html", "."], "leave out --out"),
        (["--port", "1", "."], "--port belongs to --serve"),
        (["-o", ".", str(CIFAR)], "is a directory"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run(*arguments)
    assert found.exit_code == 2
    assert message in found.stderr


def test_heat_maps_are_embedded(log):
    place = log("run")
    (place / "explain").mkdir()
    png = b"\x89PNG\r\n\x1a\nnot much of a picture"
    (place / "explain" / "heatmaps.png").write_bytes(png)
    numbers = {
        "images": {"private": False},
        "pictures": [{"file": "heatmaps.png", "title": "Heat <maps>"}],
        "verdicts": [{"group": "dp-hero", "score": "spearman", "verdict": "within the spread of seeds"}],
    }
    (place / "explain" / "explain.json").write_text(json.dumps(numbers))
    text = build(read([place])).main
    assert "data:image/png;base64,iVBORw0KGgpub3QgbXVjaCBvZiBhIHBpY3R1cmU=" in text
    assert "Heat &lt;maps&gt;" in text and "within the spread of seeds" in text and "PRIVATE" not in text


def test_scores_of_heat_maps_are_those_of_the_file():
    numbers = json.loads((RESULTS / "heatmaps" / "explain.json").read_text())
    text = build(read([RESULTS / "heatmaps"])).main
    lines = {re.sub(".*<span>", "", line.partition("<span class")[0]): line for line in text.split('<tr role="row">')}
    for group in ("dp-sgd", "dp-hero", "dp-hero-published (UNSOUND)"):
        pairs = next(
            each for each in numbers["agreement"]
            if {each["a"], each["b"]} == {"sgd", group} and each["epoch"] == each["to"] == "last"
        )  # fmt: skip
        of = [each["name"] for each in numbers["runs"] if each["group"] == group]
        faithful = [m["faithfulness"] for m in numbers["maps"] if m["run"] in of and m["epoch"] == "last"]
        assert len(of) == len(faithful) >= 3
        reached = [each["accuracy"] for each in numbers["runs"] if each["group"] == group]
        assert f"{100 * sum(reached) / len(reached):.1f} % right" in lines[group].replace("\u00a0", " ")
        shown = [f"{pairs[name]['mean']:.2f}<" for name in ("spearman", "iou", "same_class")]
        mean = sum(faithful) / len(faithful)
        true = "true ε" if "UNSOUND" in group else "ε"
        spent = math.ceil(1000 * max(each["epsilon"] for each in numbers["runs"] if each["group"] == group)) / 1000
        spent = f"{spent:,.0f}" if spent > 1000 else f"{spent:.3f}"
        assert f">{true} = {spent}, " in lines[group].replace("\u00a0", " ")
        for each in (*shown, f"{mean:+.3f}<", f">{min(faithful):+.3f} to {max(faithful):+.3f}<"):
            assert each in lines[group], each


def test_each_of_several_explanations_names_its_folder(log):
    places = [log("one"), log("two")]
    for place in places:
        (place / "explain").mkdir()
        said = {"group": "dp-hero", "verdict": "within the spread of seeds"}
        verdicts = [said | {"score": "spearman"}, said | {"score": "iou"}]
        numbers = {"images": {"private": False}, "verdicts": verdicts}
        (place / "explain" / "explain.json").write_text(json.dumps(numbers))
    text = build(read(places)).main
    assert all(f"<strong>{place / 'explain'}</strong>" in text for place in places)
    assert text.count("within the spread of seeds") == 2, "what all scores say is said once"
    assert "dphero explain" in text


def test_where_nothing_can_be_read_no_page_is_written(tmp_path):
    (tmp_path / "empty").mkdir()
    found = run(tmp_path / "empty", "-o", tmp_path / "page.html")
    assert found.exit_code == 2 and not (tmp_path / "page.html").exists()
    assert "empty" in found.stderr and "nothing of it could be read" in found.stderr


def test_lines_that_coincide_show_the_colours_of_all():
    def line(name, y, dash="solid"):
        return {"name": name, "x": [1, 2], "y": y, "line": {"dash": dash, "width": 2}, "marker": {"size": 7}}

    drawn = [line("a", [1, 2]), line("b", [3, 4]), line("a", [1, 2]), line("c", [1.01, 2]), line("d", [1, 2], "dot")]
    assert [each["line"]["width"] for each in wider_below(drawn)] == [7, 2, 7, 3, 2]
    assert [each["marker"]["size"] for each in wider_below(drawn)] == [12, 7, 12, 8, 7], "points are rims, too"
    assert drawn[0]["line"]["width"] == 2 and drawn[0]["marker"]["size"] == 7
    assert wider_below(3 * drawn) == 3 * drawn, "among many, wide lines would cover others"
    page = build(read([RESULTS / "mnist-comparison"])).main
    for name in ("gain", "budget"):
        assert "lie upon each other" in page.partition(f'data-legend="{name}"')[2].partition("<details")[0], name


def test_what_is_said_of_several_runs_holds_for_them():
    """Who is as good, when they began, what is proven; and no switch that would change nothing."""
    page = build(read([RESULTS / "mnist-comparison"]))
    rows = json.loads((RESULTS / "mnist-comparison" / "table.json").read_text())["rows"]
    proven = [row for row in rows if row["is_bound"] and row["protects"] != "nothing"]
    best = max(proven, key=lambda row: row["accuracy"])
    near = sum(best["accuracy"] - row["accuracy"] <= max(best["spread"], row["spread"]) for row in proven) - 1
    assert f"; {near} of the others within one standard deviation" in page.main and near == 3
    environments = (RESULTS / "mnist-comparison").glob("runs/*/environment.json")
    assert (
        f'>first started</th><td role="cell">{min(json.loads(e.read_text())["started"] for e in environments)}<'
        in page.main
    )
    assert {each["name"] for each in page.figures["claims"]["data"]} == {"claimed", "true"}, "no bound: not 'at most'"
    assert page.main.count("data-control") == 2
    apart = build(read([RESULTS / "cifar10-runs"])).main
    assert "data-control" not in apart and "of the others" not in apart
    alone = build(read([CIFAR])).main
    assert ">started</th>" in alone and "All runs" not in alone


def test_a_federated_run_says_how_many_clients_and_who_is_worst():
    material = read([Path(__file__).parent / "federated-run"])
    run = material.runs[0]
    assert build(material).title.endswith(f", {run.federation['clients']} clients")
    assert "worst client" in build(material).main and run.result["worst_client"] in run.result["clients"]


def test_the_command_of_a_federated_run_is_one_that_the_command_line_takes():
    material = read([Path(__file__).parent / "federated-run"])
    command = re.search(r"dphero federate (--data .+) --seed SEED --out again\n", build(material).main)[1].split()
    with get_command(app).commands["federate"].make_context("federate", command) as taken:
        (run,) = material.runs
        for name, value in {**run.recipe.as_dict(), **run.federation}.items():
            if name in taken.params and name != "seed":
                assert taken.params[name] in (value, str(value)) or not value, name


def test_the_results_of_a_reproduction(tmp_path):
    source = RESULTS / "reproduction"
    material = read([source])
    assert len(material.reproduced) == len(list(source.glob("*.json"))) and not material.problems
    page = build(material)
    rows = json.loads((source / "iterations.json").read_text())["rows"]
    shown = page.main.partition('id="reproduced-iterations"')[2].partition("</details>")[0]
    accuracies = re.findall(r'data-label="accuracy \(%\)">([^<]+)<', shown)
    assert accuracies == [f"{row['accuracy']:.4g}" for row in rows]
    assert shown.count("badge unsound") == sum("UNSOUND" in row["remark"] for row in rows) > 0
    assert page.main.count("data:image/png") == len(material.reproduced)
    assert "dphero reproduce table1 --quick" in page.main

    for name, text in (("lots", "{"), ("cifar", '{"rows": 3}'), ("epochs", None)):
        text = (source / "epochs.json").read_text().replace('"method"', '"methods"') if text is None else text
        (tmp_path / f"{name}.json").write_text(text)
    told = json.loads(run(tmp_path, source / "table1.json", "-o", tmp_path / "page.html", "--json").stdout)
    assert {Path(each["place"]).name for each in told["skipped"]} == {"lots.json", "cifar.json", "epochs.json"}
    assert "Table 1" in (tmp_path / "page.html").read_text()


def test_figures_for_notebooks(comparison):
    material = read([comparison])
    for draw in (figures.gain, figures.budget, figures.accuracy, figures.diagnostics, figures.frontier, figures.seeds):
        assert draw(material).data, draw
    assert figures.claims(material).layout.annotations[0].text == " true ε = ∞ →"
    federated = read([Path(__file__).parent / "federated-run"]).runs[0]
    assert figures.partition(federated).data[0].type == "heatmap"
    assert figures.clients(federated).data[0].type == "bar"
    assert "proven bound" in federated._repr_html_()
    with pytest.raises(ValueError, match="no simulated federated run"):
        figures.partition(material.runs[0])


def test_the_server_answers_its_own_page_alone(log):
    from dphero.report.serve import LiveServer

    with LiveServer([log("run")]) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        port = server.server_address[1]

        def status(path, host):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", path, headers={"Host": host})
            return connection.getresponse().status

        try:
            assert server.server_address[0] == "127.0.0.1"
            assert status(f"/{server.word}/", f"localhost:{port}") == 200
            assert status(f"/{server.word}/update?known={server.latest()[0]}", f"127.0.0.1:{port}") == 204
            assert status("/", f"127.0.0.1:{port}") == 404
            assert status(f"/{server.word}/", "evil.example") == 403
        finally:
            server.shutdown()


def test_ctrl_c_ends_it(log, monkeypatch):
    from dphero.report.serve import LiveServer

    def interrupted(self, poll_interval):
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveServer, "serve_forever", interrupted)
    found = run(log("run"), "--serve")
    assert found.exit_code == 0
    assert re.match(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/\n", found.stdout)
