"""Damaged files of a run are named, and never used."""

import json
import random
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dphero.audit.run_ledger import check_ledger
from dphero.experiments import Interrupted, RunDirectory, resolve, train
from dphero.experiments.comparison.plan import Planned, load_plan, save_plan
from dphero.experiments.comparison.sweep import outcomes
from dphero.experiments.runs import rundir
from dphero.experiments.runs.prediction import Predictor

pytest.importorskip("sklearn")

SETTINGS = {"data": "digits", "noise_multiplier": 3.0, "epochs": 4, "seed": 987654321}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = RunDirectory.create(tmp_path_factory.mktemp("finished") / "run", resolve(SETTINGS))
    train(directory)
    return directory.path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    directory = RunDirectory.create(tmp_path_factory.mktemp("stopped") / "run", resolve(SETTINGS))
    with pytest.raises(Interrupted):
        train(directory, report=lambda progress: progress.step == 7 and signal.raise_signal(signal.SIGTERM))
    return directory.path


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def flips(contents, count, seed=0):
    """Yield contents with one bit flipped, at random places."""
    for place in random.Random(seed).sample(range(len(contents)), min(count, len(contents))):
        yield contents[:place] + bytes([contents[place] ^ 1 << place % 8]) + contents[place + 1 :]


def damages(contents):
    """Yield what accidents make of a file."""
    yield from flips(contents, 20)
    yield contents[: len(contents) // 2]
    yield contents[:-1]
    yield b""
    yield bytes(len(contents))
    yield contents + b"\n{}\n"


def use(path):
    """Do all that is done with a finished run, and return what comes out."""
    directory = RunDirectory.open(path)
    shown = train(directory)
    images = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)
    np.save(path.parent / "x.npy", images)
    seen = Predictor(path).predict(path.parent / "x.npy")
    statement = [directory.read(name) for name in ("statement.txt", "statement.json")]
    return {**shown, "run": ""}, seen, statement, check_ledger(directory), directory.metrics, directory.recipe


READ = (
    "result.json",
    "ledger.json",
    "model.safetensors",
    "model.json",
    "statement.txt",
    "statement.json",
    "metrics.jsonl",
)


@pytest.mark.parametrize("name", READ)
def test_damaged_files_of_a_finished_run_are_named(name, copy):
    whole = (copy / name).read_bytes()
    expected = use(copy)
    for damaged in damages(whole):
        (copy / name).write_bytes(damaged)
        try:
            found = use(copy)
        except ValueError as error:
            assert name in str(error), error
        else:
            assert name == "result.json" and found == expected  # white space between what it says
    (copy / name).write_bytes(whole)
    assert use(copy) == expected


def test_a_damaged_recipe_is_named_or_means_the_same(copy):
    path, expected = copy / "recipe.toml", use(copy)
    settings = expected[-1].with_(data="", device="")
    for damaged in damages(path.read_bytes()):
        path.write_bytes(damaged)
        try:
            found = use(copy)
        except (ValueError, OSError) as error:
            assert "987654321" not in str(error)
        else:  # where data and device are may change
            assert found[:-1] == expected[:-1] and found[-1].with_(data="", device="") == settings


def test_files_of_another_run_are_not_taken_for_its_own(copy, tmp_path):
    """A model with the statement of another: each file is whole, together they lie."""
    other = RunDirectory.create(tmp_path / "other", resolve({**SETTINGS, "noise_multiplier": 0.5, "epochs": 1}))
    train(other)
    for name in ("model.safetensors", "ledger.json", "statement.json"):
        shutil.copy(other.path / name, copy / name)
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            RunDirectory.open(copy).read(name)


def test_without_the_digests_damage_is_believed(copy, monkeypatch):
    """The guard taken away: a flipped bit of the ledger changes the price, one of the weights the model."""
    monkeypatch.setattr(rundir.files, "digests", lambda path: {})
    ledger = copy / "ledger.json"
    assert '"noise_multiplier": 3.0' in ledger.read_text()
    ledger.write_text(ledger.read_text().replace('"noise_multiplier": 3.0', '"noise_multiplier": 7.0'))
    assert check_ledger(RunDirectory.open(copy)).ledger_epsilon < RunDirectory.open(copy).result["epsilon"] / 2
    weights = load_file(copy / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, copy / "model.safetensors")
    Predictor(copy)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused(value, copy, monkeypatch):
    monkeypatch.setattr(rundir.files, "digests", lambda path: {})  # as in a run of an older version
    weights = load_file(copy / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = value
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors holds NaN or infinity in "):
        Predictor(copy)


@pytest.mark.parametrize("name", ["checkpoint.pt", "metrics.jsonl", "recipe.toml"])
def test_damaged_files_of_a_stopped_run_are_named(name, stopped, tmp_path):
    path = shutil.copytree(stopped, tmp_path / "run")
    whole = (path / name).read_bytes()
    before = {file: (path / file).read_bytes() for file in ("checkpoint.pt", "ledger.json")}
    for damaged in [*flips(whole, 10), whole[: len(whole) // 2], b"", bytes(len(whole))]:
        (path / name).write_bytes(damaged)
        with pytest.raises((ValueError, OSError)) as refused:
            train(RunDirectory.open(path), report=lambda progress: pytest.fail("went on"))
        assert name in str(refused.value) or "no data" in str(refused.value), refused.value
        for file, contents in before.items():
            assert file == name or (path / file).read_bytes() == contents
    (path / name).write_bytes(whole)
    assert train(RunDirectory.open(path))["steps"] == 12


def test_lost_metrics_do_not_cost_the_run(stopped, finished, tmp_path, caplog):
    path = shutil.copytree(stopped, tmp_path / "run")
    (path / "metrics.jsonl").unlink()
    train(RunDirectory.open(path))
    assert "evaluations up to step 7 are lost" in caplog.text
    assert [line["step"] for line in RunDirectory.open(path).metrics] == [9, 12]
    assert (path / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


def test_runs_of_older_versions_are_read(copy):
    """They have no digests."""
    expected = use(copy)
    path = copy / "result.json"
    new = ("version", "recipe", "files", "sha256")
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name not in new})
    )
    assert use(copy) == expected


def test_a_damaged_ledger_of_a_stopped_run_is_named_and_written_anew(stopped, finished, tmp_path, caplog):
    for place, (old, new) in enumerate([(b"3.0", b"7.0"), (b'"count": 7', b'"count": 6'), (b"{", b"")]):
        path = shutil.copytree(stopped, tmp_path / str(place))
        whole = (path / "ledger.json").read_bytes()
        assert old in whole
        (path / "ledger.json").write_bytes(whole.replace(old, new))
        caplog.clear()
        train(RunDirectory.open(path))
        assert "ledger.json is damaged" in caplog.text and "anew" in caplog.text
        assert (path / "ledger.json").read_bytes() == (finished / "ledger.json").read_bytes()
    caplog.clear()
    train(RunDirectory.open(shutil.copytree(stopped, tmp_path / "whole")))
    assert not caplog.records


def test_a_damaged_plan_is_named(tmp_path):
    planned = Planned("a", resolve(SETTINGS), setting={"lr": 0.5})
    save_plan(tmp_path, [planned])
    path = tmp_path / "plan.json"
    whole = path.read_bytes()
    for damaged in damages(whole):
        path.write_bytes(damaged)
        try:
            found = load_plan(tmp_path)
        except ValueError as error:
            assert "plan.json" in str(error)
        else:
            assert found == [planned]  # white space
    path.write_bytes(whole)
    save_plan(tmp_path, [planned])
    plain = {name: value for name, value in json.loads(whole).items() if name != "sha256"}
    path.write_text(json.dumps({**plain, "version": 1}))  # as older versions wrote it
    assert load_plan(tmp_path) == [planned]
    save_plan(tmp_path, [planned])


def test_a_result_that_says_nothing_is_damaged(copy, tmp_path):
    (copy / "result.json").write_text("{}")  # no digest, as older versions wrote it
    with pytest.raises(ValueError, match=r"result.json is damaged: it lacks accuracy, epsilon"):
        train(RunDirectory.open(copy))
    (tmp_path / "all" / "runs").mkdir(parents=True)
    copy.rename(tmp_path / "all" / "runs" / "a")
    with pytest.raises(ValueError, match=r"result.json is damaged: it lacks accuracy, epsilon"):
        outcomes([Planned("a", resolve(SETTINGS))], tmp_path / "all")


def test_metrics_without_a_step_are_damaged(copy):
    path = copy / "result.json"
    new = ("version", "recipe", "files", "sha256")  # a run of an older version, without digests
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name not in new})
    )
    (copy / "metrics.jsonl").write_text('{"step": 3, "epoch": 1}\n{"epoch": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged: line 2 does not tell the step"):
        RunDirectory.open(copy).metrics  # noqa: B018
