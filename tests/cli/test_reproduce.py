"""``dphero reproduce`` as users meet it."""

import json

import pytest
from typer.testing import CliRunner

from dphero.cli import app

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


def test_an_item_prints_a_table_and_says_what_is_unsound(tmp_path):
    result = run("linear-analysis", "--data", "digits", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "UNSOUND AS PUBLISHED" in result.stdout
    assert str(tmp_path / "linear-analysis.png") in result.stdout.replace("\n", "")


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
