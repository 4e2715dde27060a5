"""Run directories and comparisons that come from strangers: what they can do, and what they cannot."""

import json
import os
import shutil
import threading
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from dphero._files import seal_json
from dphero.cli import app
from dphero.data.catalog import BUILT_INS
from dphero.data.download import cache
from dphero.experiments import RunDirectory, resolve, train
from dphero.experiments.comparison.compare import summarise
from dphero.experiments.comparison.plan import Planned, load_plan, save_plan
from dphero.experiments.comparison.sweep import Outcome, sweep
from dphero.experiments.comparison.worker import train_run
from dphero.experiments.runs.prediction import Predictor
from dphero.methods import recipe as recipes

pytest.importorskip("sklearn")

SETTINGS = {"data": "digits", "noise_multiplier": 3.0, "epochs": 1, "seed": 987654321}
CODE = """
import pathlib
pathlib.Path("ran").touch()
from torch import nn
def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
def data():
    raise SystemExit(0)
"""


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = RunDirectory.create(tmp_path_factory.mktemp("finished") / "run", resolve(SETTINGS))
    train(directory)
    return directory.path


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A finished run whose network is code, with that code in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_net.py").write_text(CODE)
    monkeypatch.delitem(__import__("sys").modules, "evil_net", raising=False)
    directory = RunDirectory.create(tmp_path / "run", resolve({**SETTINGS, "model": "evil_net:net"}))
    train(directory)
    (tmp_path / "ran").unlink()
    monkeypatch.delitem(__import__("sys").modules, "evil_net")
    np.save(tmp_path / "x.npy", np.zeros((1, 8, 8), np.float32))
    return directory.path


# -- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("predict", "run", "x.npy"), ("train", "--resume", "run"), ("audit", "run")])
def test_code_that_a_run_names_is_not_imported(command, evil):
    result = run(*command)
    assert result.exit_code == 2 and not os.path.exists("ran")
    shown = " ".join(result.stderr.split())
    assert "recipe.toml names code" in shown and "model 'evil_net:net'" in shown and "--trust" in shown


def test_with_trust_it_is(evil, monkeypatch):
    result = run("predict", "run", "x.npy", "--trust")
    assert result.exit_code == 0 and os.path.exists("ran"), result.stderr
    assert run("train", "--resume", "run", "--trust").exit_code == 0
    with pytest.raises(ValueError, match="names code"):
        Predictor(evil)


def test_without_the_guard_a_prediction_runs_a_strangers_code(evil, monkeypatch):
    monkeypatch.setattr(recipes, "require_trust", lambda *arguments: None)
    assert run("predict", "run", "x.npy").exit_code == 0
    assert os.path.exists("ran")


def test_a_signature_cannot_name_another_network(finished, tmp_path):
    path = shutil.copytree(finished, tmp_path / "run")
    (path / "result.json").unlink()  # and with it the digests
    values = json.loads((path / "model.json").read_text())
    (path / "model.json").write_text(json.dumps({**values, "model": "evil_net:net"}))
    with pytest.raises(ValueError, match=r"model.json is damaged: it names model 'evil_net:net', and .* 'digits'"):
        Predictor(path)


@pytest.mark.parametrize(
    ("text", "given", "named"),
    [
        ('data = "evil_net:data"', (), "data 'evil_net:data'"),
        ('data = "digits"\nmodel = "evil_net:net"', (), "model 'evil_net:net'"),
        ('data = "digits"\n[options]\npublic = "evil_net:data"', (), "option public 'evil_net:data'"),
        ('data = "digits"\n[options]\npublic = "evil_net:data"', ("--set", "a=1"), "option public 'evil_net:data'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_code_that_a_recipe_names_is_not_imported(command, text, given, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil_net.py").write_text(CODE)
    (tmp_path / "theirs.toml").write_text(text)
    result = run(command, "--recipe", "theirs.toml", *(given if command == "train" else ()))
    assert result.exit_code == 2 and not os.path.exists("ran")
    assert "theirs.toml names code" in result.stderr and named in " ".join(result.stderr.split())


def test_code_that_the_user_names_needs_no_trust():
    recipes.require_trust({"model": "theirs:net", "options": {}}, "file", False, instead={"model": "mine:net"})
    recipes.require_trust({"model": "theirs:net"}, "file", True)
    assert recipes.code_named({"data": "/home/a:b/set.npz", "model": "mlp", "options": {"a": ["x:y", 3]}}) == [
        "option a 'x:y'"
    ]


def test_a_plan_cannot_name_code_or_places_elsewhere(tmp_path):
    recipe = resolve({**SETTINGS, "model": "evil_net:net"})
    save_plan(tmp_path, [Planned("a", recipe)])
    with pytest.raises(ValueError, match=r"plan.json names code"):
        load_plan(tmp_path)
    assert load_plan(tmp_path, trust=True)[0].recipe == recipe
    values = json.loads((tmp_path / "plan.json").read_text())
    for name in ("../elsewhere", "/tmp/elsewhere", "..", ".hidden", "a/b", "\x1b[2J", "", 3):
        values["runs"][0]["name"] = name
        (tmp_path / "plan.json").write_text(json.dumps(seal_json(values)))
        with pytest.raises(ValueError, match="no name of a run's directory"):
            load_plan(tmp_path, trust=True)


# -- links, pipes and devices -----------------------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path):
    (tmp_path / "victim").write_text("precious")
    yield tmp_path / "victim"
    assert (tmp_path / "victim").read_text() == "precious"


def test_locks_are_not_followed(finished, victim, tmp_path):
    path = shutil.copytree(finished, tmp_path / "run")
    (path / "result.json").unlink()
    (path / ".lock").unlink()
    (path / ".lock").symlink_to(victim)
    with pytest.raises(ValueError, match=r"\.lock is a symbolic link"):
        train(RunDirectory.open(path))


def test_locks_of_comparisons_are_not_followed(victim, tmp_path):
    plan = [Planned("a", resolve(SETTINGS))]
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / ".lock").symlink_to(victim)
    with pytest.raises(ValueError, match=r"\.lock is a symbolic link"):
        sweep(plan, tmp_path / "all")
    (tmp_path / "all" / ".lock").unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "all" / "runs").mkdir()
    (tmp_path / "all" / "runs" / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a symbolic link, and runs are not written elsewhere"):
        sweep(plan, tmp_path / "all")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_locks_of_the_cache_are_not_followed(victim, tmp_path):
    (tmp_path / ".mnist.lock").symlink_to(victim)
    with pytest.raises(ValueError, match="symbolic link"), cache.staging(BUILT_INS["mnist"], tmp_path):
        pass


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.json", "environment.json", "checkpoint.pt", "tensorboard"])
def test_nothing_is_written_through_links(name, victim, tmp_path):
    directory = RunDirectory.create(tmp_path / "run", resolve(SETTINGS))
    (directory.path / name).unlink(missing_ok=True)
    (directory.path / name).symlink_to(victim)
    try:
        train(directory)
    except (ValueError, OSError) as error:
        assert name in str(error) and "symbolic link" in str(error)
    else:
        assert not (directory.path / name).is_symlink()  # the file is in its place


@pytest.mark.parametrize("name", ["recipe.toml", "result.json", "model.json", "model.safetensors", "statement.txt"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "link"])
def test_what_is_no_file_is_refused_and_not_waited_for(name, kind, finished, tmp_path):
    path = shutil.copytree(finished, tmp_path / "run")
    (path / name).rename(tmp_path / "secret")
    make = {
        "pipe": os.mkfifo,
        "device": lambda place: place.symlink_to("/dev/zero"),
        "directory": lambda place: place.mkdir(),
        "link": lambda place: place.symlink_to(tmp_path / "secret"),
    }
    make[kind](path / name)
    refused = []

    def use():
        for each in (lambda: Predictor(path), lambda: RunDirectory.open(path).read(name)):
            try:
                each()
            except ValueError as error:
                refused.append(str(error))

    user = threading.Thread(target=use, daemon=True)
    user.start()
    user.join(30)
    assert not user.is_alive() and refused and name in refused[-1]


@pytest.mark.parametrize("name", ["checkpoint.pt", "metrics.jsonl", ".lock"])
def test_a_pipe_in_a_stopped_run_is_refused(name, finished, tmp_path):
    path = shutil.copytree(finished, tmp_path / "run")
    (path / "result.json").unlink()
    (path / name).unlink()
    os.mkfifo(path / name)
    started = time.monotonic()
    answer = train_run(str(path), RunDirectory.open(path).recipe.as_dict())
    assert answer["kind"] == "failed" and name in answer["error"] and time.monotonic() - started < 30


# -- what is shown, and who may see it --------------------------------------------------------------------------------


def test_escape_codes_are_shown_as_text(finished, tmp_path):
    path = shutil.copytree(finished, tmp_path / "run")
    (path / "result.json").unlink()
    values = json.loads((path / "model.json").read_text())
    values["classes"] = [f"\x1b]0;owned\x07\x9b31m{number}\u202e" for number in range(10)]
    (path / "model.json").write_text(json.dumps(values))
    np.save(tmp_path / "\x1b[2Jx.npy", np.zeros((1, 8, 8), np.float32))
    for arguments in ((), ("--json",)):
        result = run("predict", path, tmp_path / "\x1b[2Jx.npy", *arguments)
        assert result.exit_code == 0, result.stderr
        assert not {"\x1b", "\x07", "\x9b"} & set(result.output)
        assert arguments or "\\x1b]0;owned\\x07\\x9b31m" in "".join(result.stdout.split("│")).replace(" ", "")
    result = run("predict", path, tmp_path / "\x1b[2J")
    assert result.exit_code == 2 and "\x1b" not in result.stderr and "\\x1b[2J" in result.stderr


def test_the_seed_stands_in_private_files_alone(finished):
    private = {path.name for path in finished.iterdir() if not path.stat().st_mode & 0o077}
    holding = {path.name for path in finished.rglob("*") if path.is_file() and b"987654321" in path.read_bytes()}
    assert "recipe.toml" in holding and holding <= private


def test_tables_of_comparisons_are_their_owners_alone(finished, tmp_path):
    pytest.importorskip("matplotlib")
    planned = Planned("a", resolve(SETTINGS))
    save_plan(tmp_path, [planned])
    summarise([Outcome(planned, finished, RunDirectory.open(finished).result)], tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"plan.json", "table.csv", "table.json", "table.md", "accuracy.csv", "accuracy.png", "curves.svg"} <= names
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path.name
