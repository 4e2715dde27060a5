"""``dphero methods``: every method with what it protects, for people and as JSON; one with its options; and a page."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dphero.cli import app
from dphero.methods import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def run(*arguments):
    return CliRunner().invoke(app, ["methods", *arguments], env={"COLUMNS": "200"})


def test_the_short_list_for_people():
    result = run()
    assert result.exit_code == 0 and len(result.stdout.splitlines()) < 60
    flat = " ".join(result.stdout.replace("│", " ").split())
    for name, method in METHODS.items():
        assert name in flat and method.card.title.split()[0] in flat


def test_the_whole_list_for_people():
    result = run("--all")
    assert result.exit_code == 0
    flat = " ".join(result.stdout.split())
    for name, method in METHODS.items():
        card = method.card
        assert f"{name} {card.title}" in flat
        for words in (card.protects, card.relation, card.sampling, card.paper, card.extra_data, *card.flaws):
            assert " ".join(words.split()) in flat, (name, words)


def test_the_list_as_json():
    result = run("--json")
    assert result.exit_code == 0 and result.stdout.count("\n") == 1
    records = json.loads(result.stdout)
    assert [record["name"] for record in records] == sorted(METHODS)
    keys = {"name", "title", "protects", "relation", "sampling", "paper", "priced", "flaws", "extra_data", "sound"}
    for record in records:
        assert record.keys() == keys | {"options", "defaults"}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_one_with_its_options(name):
    record = json.loads(run(name, "--json").stdout)
    assert record["name"] == name
    assert [option["name"] for option in record["options"]] == [field.name for field in fields(METHODS[name])]
    shown = " ".join(run(name).stdout.split())
    for option in record["options"]:
        assert option["description"], f"{name}: {option['name']} is not described"
        assert f"{option['name']} = {option['default']}" in shown


def test_an_unknown_one():
    result = run("labeldp")
    assert result.exit_code != 0
    assert "did you mean 'label-dp'?" in str(result.exception or result.output) + result.output


def test_every_method_has_a_section_that_names_what_is_protected():
    sections = dict(re.findall(r"^## `([\w-]+)`.*?\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    assert set(sections) == set(METHODS)
    for name, text in sections.items():
        for word in ("Does.", "Protects.", "Price."):
            assert f"**{word}**" in text, (name, word)
