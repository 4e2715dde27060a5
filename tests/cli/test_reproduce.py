"""``dphero reproduce`` as users meet it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dphero.cli import app
from dphero.cli.runs.reproduce import _show
from dphero.experiments.reproduction.report import Report, brief
from dphero.experiments.reproduction.running import Reproduced

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

ITEMS = [
    "table1",
    "iterations",
    "epochs",
    "cifar",
    "epsilon-boxes",
    "lots",
    "learning-rates",
    "linear-analysis",
    "noise-spectra",
    "heterogeneity",
    "sigma-per-iteration",
]


def run(*arguments):
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)], env={"COLUMNS": "240"})


def test_list_names_every_item_its_place_in_the_paper_and_its_time():
    found = json.loads(run("list", "--json").stdout)
    assert [item["name"] for item in found] == ITEMS
    assert all(item["paper"] and item["shows"] and {"quick", "full"} <= set(item["minutes"]) for item in found)
    shown = run("list").stdout
    assert all(name in shown for name in ITEMS)
    narrow = CliRunner().invoke(app, ["reproduce", "list"], env={"COLUMNS": "60"}).stdout
    assert all(name in narrow for name in ITEMS) and "…" not in narrow


def test_in_80_columns_the_list_has_two_lines_for_each_item_in_columns_that_stand_below_each_other():
    shown = CliRunner().invoke(app, ["reproduce", "list"], env={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, shown)) <= 80
    headings, pairs = shown[0], list(zip(shown[2::2], shown[3::2], strict=False))[: len(ITEMS)]
    kept = {item["name"]: item for item in json.loads(run("list", "--json").stdout)}
    for (line, below), name in zip(pairs, ITEMS, strict=True):
        item = kept[name]
        cells = {"item": name, "in the paper": item["paper"], "--quick": item["minutes"]["quick"]}
        for heading, cell in (cells | {"--full": item["minutes"]["full"]}).items():
            assert line[headings.index(heading) :].startswith(cell), (heading, line)
        assert below == f"    {item['shows']}"


def test_an_item_prints_a_table_and_says_what_is_unsound(tmp_path):
    result = run("linear-analysis", "--data", "digits", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "UNSOUND AS PUBLISHED" in result.stdout
    assert str(tmp_path / "linear-analysis.png") in result.stdout.replace("\n", "")


@pytest.mark.parametrize("name", ITEMS)
def test_the_tables_of_all_items_fit_80_columns_with_no_word_broken(name, monkeypatch, capsys):
    folder = Path(__file__).parents[2] / "benchmarks" / "results" / "reproduction"
    kept = json.loads((folder / f"{name}.json").read_text())
    report = Report(kept["rows"], [], kept["notes"])
    monkeypatch.setenv("COLUMNS", "80")
    _show(Reproduced(name, kept["size"], report, (Path(f"{name}.md"),), {}))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    table = [line for line in shown.splitlines() if line[:1] in "┃│"]
    assert len(table) <= 75 and table[-1].count("│") <= 8 and "…" not in shown
    words = {word for line in table for word in line.replace("┃", "│").split()}
    expected = {word for line in brief(kept["rows"]) for pair in line.items() for text in pair for word in text.split()}
    assert expected <= words
    assert name == "heterogeneity" or "UNSOUND AS PUBLISHED" in " ".join(shown.split())  # that has sound rows alone
    assert "The whole table, " in shown and f"is in {name}.md" in " ".join(shown.split())


def test_json_is_one_object(tmp_path):
    result = run("linear-analysis", "--data", "digits", "--out", tmp_path, "--json")
    found = json.loads(result.stdout)
    assert found["items"][0]["item"] == "linear-analysis"
    assert found["items"][0]["rows"][1]["true ε"] is None  # infinite


def test_wrong_names_and_combinations_are_refused(tmp_path):
    result = run("table2", "--out", tmp_path)
    assert result.exit_code == 2 and "did you mean 'table1'" in result.stderr
    result = run("lots", "--data", "digits", "--full", "--out", tmp_path)
    assert result.exit_code == 2 and "leave out --full" in result.stderr
    assert not list(tmp_path.iterdir())


def test_missing_data_is_said_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("DPHERO_DATA", str(tmp_path / "none"))
    result = run("iterations", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "dphero data get mnist" in result.stderr
    assert not (tmp_path / "out").exists()
