"""Directories that no run of ours has written: odd values, odd names, and figures that must not be shown unmarked."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dphero.accounting import Ledger
from dphero.cli import app
from dphero.report import build, read
from dphero.report.gain import Gain, worst_gain

pytest.importorskip("plotly")
pytestmark = pytest.mark.timeout(300)

FEDERATED = Path(__file__).parent / "federated-run"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CIFAR = RESULTS / "cifar10-runs" / "feature-dp-epsilon-3-seed-0"
RESULT = {name: value for name, value in json.loads((CIFAR / "result.json").read_text()).items() if name != "sha256"}
RESULT = {name: value for name, value in RESULT.items() if name not in ("version", "files", "recipe")}


def changed(**values):
    return {"result.json": json.dumps({**RESULT, **values})}


def section(page, name):
    return page.main.partition(f'id="{name}"')[2].partition("</section>")[0]


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"metrics.jsonl": '{"step": 1, "epoch": 1, "accuracy": NaN}\n'}, "evaluation 1 has no accuracy"),
        ({"metrics.jsonl": '{"step": 1, "accuracy": true}\n'}, "evaluation 1 has no accuracy"),
        ({"metrics.jsonl": '{"step": 1, "epoch": "one", "accuracy": 0.5}\n'}, "epoch of evaluation 1 is 'one'"),
        ({"metrics.jsonl": '{"step": 1, "epsilon": [3], "accuracy": 0.5}\n'}, "epsilon of evaluation 1"),
        ({"metrics.jsonl": f'{{"step": 1, "accuracy": 1{"0" * 400}}}\n'}, "evaluation 1 has no accuracy"),
        (changed(accuracy="0.7"), "accuracy of the result is '0.7'"),
        (changed(accuracy=float("nan")), "accuracy of the result is nan"),
        (changed(accuracy=70.0), "a share lies between 0 and 1"),
        (changed(epsilon="small"), "epsilon of the result is 'small'"),
        (changed(epsilon=float("inf")), "epsilon of the result is inf"),
        (changed(other_prices=[1]), "other_prices are no table of numbers"),
        (changed(is_bound="yes"), "is_bound is neither true nor false"),
        (changed(accountant=None), "accountant is no name"),
        ({"environment.json": '{"packages": [1]}'}, "packages are no table"),
        ({"environment.json": "[" * 100_000}, "environment.json is damaged"),
        ({"federation.json": '{"clients": "many"}'}, "its clients are 'many'"),
        ({"federation.json": '{"clients": 3}', **changed(clients=[1, 2])}, "no table of what each has spent"),
        ({"recipe.toml": 'data = 3\nmodel = "lenet"\n'}, "data must be"),
        ({"federation.json": '{"clients": 3, "options": 3, "rounds": [1], "data": "; rm x"}'}, None),
        ({"statement.txt": ""}, None),
        ({"metrics.jsonl": '{"step": 1, "epoch": 1, "accuracy": 0.5, "loss": NaN, "epsilon": null}\n{"st'}, None),
    ],
)
def test_odd_values_are_damage_and_nothing_else_is_lost(log, files, what):
    log("good")
    odd = log("odd", files)
    material = read([odd.parent])
    page = build(material).html()
    assert re.search(r">69\.11 (%|±)", page)
    if what is None:
        assert not material.problems and len(material.runs) == 2
        assert "; rm" not in section(build(read([odd])), "reproduce"), "a command is made of the recipe's settings"
    else:
        assert [run.name for run in material.runs] == ["good"]
        assert what in " ".join(each.what for each in material.problems)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("audit/audit.json", '{"audits": 3}'),
        ("audit/audit.json", '{"audits": [{"claimed_epsilon": "x"}]}'),
        ("audit/audit.json", '{"one_run": [1]}'),
        ("audit/audit.json", '{"ledger": [1]}'),
        ("explain/explain.json", '{"runs": 3}'),
        ("explain/explain.json", '{"agreement": [{"a": ["x"], "b": "y"}]}'),
        ("explain/explain.json", '{"verdicts": [3]}'),
    ],
)
def test_odd_findings_beside_a_run(log, name, text):
    place = log("run")
    (place / name).parent.mkdir()
    (place / name).write_text(text)
    material = read([place])
    assert [Path(each.place).name for each in material.problems] == [Path(name).name]
    assert "69.11 %" in build(material).main


def plan(place, runs, version=1):
    place.mkdir(exist_ok=True)
    (place / "plan.json").write_text(json.dumps({"version": version, "runs": runs}))
    return place


def planned(name, **more):
    recipe = {"data": "digits", "model": "digits", "method": "dp-sgd", "epsilon": 3.0}
    return {"name": name, "recipe": recipe, "target": None, "setting": {}} | more


@pytest.mark.parametrize(
    ("runs", "what"),
    [
        ([], "it plans no run"),
        ([planned("a", target="three")], "the ε of a is 'three'"),
        ([planned("a", recipe={"data": "x", "model": "y", "method": "magic"})], "'magic' is not known"),
        ([planned("../a")], "is no name of a run's directory"),
        ([3], "plan.json is damaged"),
    ],
)
def test_odd_plans(log, tmp_path, runs, what):
    good = log("good")
    material = read([plan(tmp_path / "compared", runs), good])
    assert what in material.problems[0].what and len(material.runs) == 1
    found = CliRunner().invoke(app, ["report", str(tmp_path / "compared"), "-o", str(tmp_path / "page.html")])
    assert found.exit_code == 2 and what in found.stderr and "nothing of it could be read" in found.stderr


@pytest.mark.parametrize("rows", [3, [3], [{"errors": 3}], [{"epsilon": "x"}], [{"other_prices": {"claim": []}}]])
def test_an_odd_table_beside_a_plan(tmp_path, rows):
    place = plan(tmp_path / "compared", [planned("a")])
    (place / "table.json").write_text(json.dumps({"rows": rows}))
    material = read([place])
    assert "table.json" in material.problems[0].place
    assert "begun" in build(material).main


def test_a_comparison_that_has_not_begun(tmp_path):
    page = build(read([plan(tmp_path / "compared", [planned("a"), planned("b")])])).main
    assert "No statement yet" in page and "begun" in page


def test_names_that_are_no_text(log, tmp_path):
    place = log("run\udcff\nnext")
    page = tmp_path / "page\udcff.html"
    found = CliRunner().invoke(app, ["report", str(place), str(place.parent / "gone"), "-o", str(page)])
    assert found.exit_code == 2
    found = CliRunner().invoke(app, ["report", str(place), "-o", str(page)])
    assert found.exit_code == 0, found.output
    assert "run?\nnext" in page.read_text()


def test_commands_hold_nothing_that_a_shell_would_run(tmp_path):
    """A stranger's folder may be called anything: what is to be typed in quotes it, and no comment ends early."""
    place = tmp_path / "fed\ntouch hacked; #"
    shutil.copytree(FEDERATED, place)
    environment = json.loads((place / "environment.json").read_text())
    result = json.loads((place / "result.json").read_text())
    environment["packages"] = {"dphero": "1; touch hacked", "evil": "1.0"}
    (place / "environment.json").write_text(json.dumps(environment))
    (place / "result.json").write_text(
        json.dumps({k: v for k, v in result.items() if k not in ("version", "sha256", "files")})
    )
    item = json.loads((RESULTS / "reproduction" / "table1.json").read_text())
    (tmp_path / "table1.json").write_text(json.dumps({**item, "item": "table1; touch hacked"}))
    page = build(read([place, tmp_path / "table1.json"]))
    commands = section(page, "reproduce").replace("&#x27;", "'").replace("&gt;", ">")
    outside = re.sub(r"'[^']*'", "", commands)
    assert "hacked" in commands and "hacked" not in outside
    assert "evil" not in commands


def test_heat_maps_beside_a_plan_hide_no_run(comparison, tmp_path):
    shutil.copytree(comparison, tmp_path / "compared")
    shutil.copy(RESULTS / "heatmaps" / "explain.json", tmp_path / "compared")
    shutil.copy(RESULTS / "heatmaps" / "heatmaps.png", tmp_path / "compared")
    material = read([tmp_path / "compared"])
    assert len(material.runs) == 5 and len(material.explained) == 1


@pytest.mark.parametrize("images", [{"private": True}, {"private": "no"}, {}, None])
def test_heat_maps_of_images_that_may_be_private_are_kept_back(log, images):
    place = log("run")
    (place / "explain").mkdir()
    (place / "explain" / "heatmaps.png").write_bytes(b"\x89PNG\r\n\x1a\na face")
    verdicts = [{"group": "dp-hero", "score": "iou", "verdict": "differs by more than another seed does"}]
    numbers = {"images": images, "pictures": [{"file": "heatmaps.png", "title": "x"}], "verdicts": verdicts}
    (place / "explain" / "explain.json").write_text(json.dumps(numbers))
    kept = build(read([place])).html()
    assert "data:image/png" not in kept and "differs by more" not in kept
    assert "PRIVATE training images" in kept and "--with-private-diagnostics" in kept
    shown = build(read([place]), private_diagnostics=True).main
    assert "data:image/png" in shown and "differs by more" in shown and "PRIVATE training images" in shown


def test_unsound_stands_beside_every_figure_of_a_published_run(comparison, tmp_path):
    """Also where an audit has refuted it, or has not, and in a page about nothing else."""
    (source,) = comparison.glob("runs/dp-hero-published*")
    place = tmp_path / source.name
    shutil.copytree(source, place)
    (place / "audit").mkdir()
    finding = {"mechanism": "release", "claimed_epsilon": 5.0, "audited_epsilon": 1.0, "noise_multiplier": 3.0}
    for refuted in (False, True):
        audit = {"refuted": refuted, "audits": [finding | {"refuted": refuted}], "conclusion": "so"}
        (place / "audit" / "audit.json").write_text(json.dumps(audit))
        material = read([place])
        page = build(material)
        assert "UNSOUND AS PUBLISHED" in page.title
        assert "unsound as published" in section(page, "summary")
        assert "UNSOUND AS PUBLISHED" in section(page, "promise")
        claims = section(page, "claims")
        assert claims.count("UNSOUND AS PUBLISHED") >= 2 and "not refuted" not in claims
        assert "unsound as published" in material.runs[0]._repr_html_()
        for name, figure in page.figures.items():
            marked = [each for each in figure["data"] if "dp-hero-published" in str(each)]
            assert all("UNSOUND" in str(each) for each in marked), name
            for heading in re.findall(rf'id="numbers-{name}".*?</details>', page.main, re.DOTALL):
                assert all("UNSOUND" in line for line in heading.split("<tr ")[2:]), name


def test_what_clients_share_may_be_unsound_too(tmp_path):
    """The clients train soundly; what they gave away before is not."""
    place = tmp_path / "run"
    shutil.copytree(FEDERATED, place)
    federation = json.loads((place / "federation.json").read_text())
    (place / "federation.json").write_text(json.dumps(federation | {"shared": "distilled-published", "unsound": True}))
    material = read([place, FEDERATED])
    assert [row.remark for row in material.rows] == ["UNSOUND AS PUBLISHED", ""]
    page = build(material)
    assert section(page, "summary").count("unsound as published") >= 1
    names = {each["legendgroup"]: each["line"]["color"] for each in page.figures["budget"]["data"]}
    assert len(set(names.values())) == 2 and "dp-hero (UNSOUND AS PUBLISHED)" in names


def test_a_small_true_epsilon_is_not_said_to_protect_nobody(comparison):
    from dataclasses import replace

    from dphero.report.words import explain_epsilon

    row = next(row for row in read([comparison]).rows if not row.sound)
    assert "which protects nobody in practice" in explain_epsilon(replace(row, epsilon=1e6))
    said = explain_epsilon(replace(row, epsilon=2.0, is_bound=False))
    assert "UNSOUND" in said and "2.0, and that is no proven bound" in said and "nobody" not in said


def test_what_protects_labels_alone_is_not_said_to_hide_members():
    from dphero.report.words import explain_gain

    material = read([RESULTS / "mnist-methods"])
    assert max((row for row in material.rows if row.remark == "labels only"), key=lambda row: row.accuracy)
    summary = section(build(material), "summary")
    assert "label-dp, ε = 3 asked (labels only)" in summary
    assert "label-dp" not in summary.partition("</ul>")[0], "labels are less than examples"
    from dphero.accounting import trade_off

    ledger = Ledger.from_json(json.dumps({"version": 1, "events": []}))
    assert "who was in the data is not" in explain_gain(Gain(trade_off(ledger), labels_only=True))


def test_a_gain_that_is_not_known_is_not_outdone_by_one_that_is(log, monkeypatch):
    from dphero.report import gain

    known, unknown = read([log("a"), log("b")]).runs
    monkeypatch.setattr(
        gain, "gain_of", lambda run: Gain(None, "odd") if run is unknown else gain._gain(run.ledger.to_json(), "pld")
    )
    assert worst_gain([known]).curve is not None
    assert worst_gain([known, unknown]).reason == "odd"


def test_long_trainings_are_thinned(log):
    lines = [
        {"step": step, "epoch": step / 100, "accuracy": step / 40_000, "epsilon": step / 1e4, "loss": 1.0}
        for step in range(1, 20_001)
    ]
    place = log("long", {"metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines)})
    page = build(read([place]))
    for name in ("accuracy", "budget"):
        drawn = page.figures[name]["data"][0]
        assert len(drawn["x"]) == len(drawn["y"]) <= 501
        assert (drawn["x"][0], drawn["x"][-1]) == (0.01, 200.0)


def test_an_infinite_price_in_a_reproduction_is_shown():
    rows = json.loads((RESULTS / "reproduction" / "linear-analysis.json").read_text())["rows"]
    page = build(read([RESULTS / "reproduction" / "linear-analysis.json"])).main
    infinite = [row for row in rows if row["true ε"] is None]
    assert infinite and page.count(">∞<") == len(infinite)


def test_several_runs_of_one_setting(log):
    """The mean fits its tile, with the spread below; what is not set is left out."""
    shown = build(read([log("one"), log("other", changed(accuracy=RESULT["accuracy"] - 0.02))])).main
    mean, spread = 100 * RESULT["accuracy"] - 1, 2 / 2**0.5
    assert f">{mean:.2f} %</span>" in shown
    assert f"± {spread:.2f} over 2 runs" in shown
    recipe = section(build(read([FEDERATED])), "recipe")
    assert "clients" in recipe and "participations" not in re.sub("<wbr>", "", recipe)


def test_settings_of_a_method_tell_runs_apart(log):
    """Two runs that differ in an option, or in noise alone, have names of their own in every figure."""
    places = [log(f"run-{exponent}") for exponent in (1, 2)]
    for place, depth in zip(places, (1, 2), strict=True):
        with (place / "recipe.toml").open("a") as file:
            file.write(f"depth = {depth}\n")  # the options stand last
        (place / "result.json").write_text(json.dumps(RESULT))
    labels = [row.label for row in read(places).rows]
    assert len(set(labels)) == 2 and all("depth" in label for label in labels)
